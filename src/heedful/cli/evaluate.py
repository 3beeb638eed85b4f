"""`heedful evaluate`: scores of a model on held-out data."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful import pipelines
from heedful.cli.flags import Json, ModelFolder, RunTime, Truncate, flag_of, leave_out
from heedful.cli.help import IN_OUT
from heedful.cli.lines import (
    check_plain,
    note_breaks,
    progress_bar,
    read_parallel,
    read_whole,
    report_counts,
    settle,
)
from heedful.cli.shared import make_console, note, print_json
from heedful.errors import UserError
from heedful.files import write_lines
from heedful.options import BACKENDS, RUN_TIME, TooLong, option

if TYPE_CHECKING:
    import numpy as np

    from heedful.data.labels import ProblemType
    from heedful.data.rows import Rows

# Outputs (None: no texts), scores, the examples in order from the worst, and all examples.
Entries = list[dict[str, Any]]
EvaluationOutput = tuple[list[str] | None, dict[str, Any], Entries, Entries]
# The share of a text's characters that its tokenizer keeps, below which a note says so.
_MIN_READ = 0.99
_MOST_COLUMNS = 12  # of a confusion matrix that is printed


@dataclass(frozen=True)
class HeldOut:
    """Files of held-out data, and the output."""

    src: Path | None = typer.Option(
        None, metavar="FILE", help="Source lines, for a translator.", rich_help_panel=IN_OUT
    )
    ref: Path | None = typer.Option(
        None, metavar="FILE", help="Reference lines, one per source.", rich_help_panel=IN_OUT
    )
    input: Path | None = typer.Option(
        None,
        "--input",
        "-i",
        metavar="FILE",
        help="Running text for a language model; labeled texts (.tsv, .jsonl, .parquet) for a "
        "classifier.",
        rich_help_panel=IN_OUT,
    )
    text_field: str | None = typer.Option(
        None,
        metavar="COLUMN",
        help="Column of labeled texts, by number or name.",
        show_default="the first, or text",
        rich_help_panel=IN_OUT,
    )
    label_field: str | None = typer.Option(
        None,
        metavar="COLUMN",
        help="Column of their labels.",
        show_default="the second, or label",
        rich_help_panel=IN_OUT,
    )
    pair_field: str | None = typer.Option(
        None,
        metavar="COLUMN",
        help="Column of second texts.",
        show_default="none",
        rich_help_panel=IN_OUT,
    )
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the translations or labels to this file.",
        rich_help_panel=IN_OUT,
    )
    truncate: Truncate = False
    strict: bool = typer.Option(
        False,
        "--strict",
        help="Stop at the first pair with a side that is too long, instead of leaving it out.",
        rich_help_panel=IN_OUT,
    )
    json: Json = False

    @property
    def too_long(self) -> TooLong:
        """Treatment of sides that are too long."""
        return "truncate" if self.truncate else "error" if self.strict else "leave_out"

    @property
    def fields(self) -> dict[str, str | None]:
        """The columns of labeled texts by their role."""
        return {"text": self.text_field, "label": self.label_field, "pair": self.pair_field}


@dataclass(frozen=True)
class EvaluationRunTime(RunTime):
    """Flags for device, backend and batches; the default backend is the net itself."""

    backend: str = option(BACKENDS, "eager", RUN_TIME, metavar="NAME")


@leave_out("num_return", "draft", "num_draft_tokens")
def evaluate(
    *,
    model: ModelFolder,
    data: HeldOut,
    metrics: str | None = typer.Option(
        None,
        metavar="NAMES",
        help="Metrics separated by commas; heedful list metrics names them.",
        show_default="bleu,chrf,ter,exact_match",
    ),
    language: str | None = typer.Option(
        None, metavar="CODE", help="Target language, e.g. de.", show_default="the model's"
    ),
    examples: int = typer.Option(
        3, min=0, metavar="N", help="Print this many of the worst outputs, and of random ones."
    ),
    options: dict[str, Any],
    run_time: EvaluationRunTime,
) -> None:
    """Score a model on held-out data: translations, running text, or labeled texts.

    Translator (--src, --ref): sacreBLEU's BLEU, chrF and TER with signatures and exact match of the
    translations; perplexity and token accuracy of the references. Scores ignore case if the
    tokenizer lowercases (case:lc in the signature). Language model (--input): perplexity and bits
    of the whole file as one text. Classifier (--input): accuracy, macro F1, precision, recall and
    F1 per label, and the confusion matrix; of several labels a text (separated by commas) micro and
    macro F1 and exact match; of a regression the correlations of Pearson and Spearman, and the mean
    squared and absolute error.

    A source that is too long for the model is reported and left out: its translation is blank, and
    scored as that. Perplexity and token accuracy are of the pairs whose sides both fit. Texts of a
    classifier are truncated, and counted.

    Examples follow: the outputs with the lowest chrF, the mistakes with the highest probability, or
    the largest errors of values, and random ones, the same each time.

    Example: heedful evaluate runs/translation --src test.en --ref test.de
    """
    if (data.src is None) != (data.ref is None) or (data.src is None) == (data.input is None):
        raise UserError("give --src and --ref for a translator, --input for other models")
    fields = {f"--{name}-field": value for name, value in data.fields.items()}
    search = {flag_of(name): value for name, value in options.items()}
    if data.src is not None:
        _refuse("translators", fields)
    else:
        search |= {"--metrics": metrics, "--language": language}
        search |= {"--truncate": data.truncate, "--strict": data.strict}
        _refuse("language models and classifiers", search)
    if data.src is not None and data.ref is not None:
        lines = read_parallel(data.src, data.ref)
        translator = run_time.open(model, pipelines.Translator, "evaluate with --src and --ref")
        options |= {"too_long": data.too_long, "batch_tokens": run_time.batch_tokens}
        target = language or options.get("tgt_language") or translator.metadata.tgt_language
        result = _evaluate_pairs(translator, *lines, options, metrics, target)
    else:
        result = _evaluate_file(model, data, run_time)
    outputs, content, ranked, entries = result
    if outputs is not None:
        if data.output is not None:
            note_breaks(write_lines(data.output, outputs))
        rows = random.Random(0).sample(range(len(entries)), min(examples, len(entries)))
        at_random = [entries[row] for row in sorted(rows)]
        content["examples"] = {"worst": ranked[:examples], "random": at_random}
    _print({"model": str(model)} | content, data.json)


def _evaluate_file(model: Path, data: HeldOut, run_time: RunTime) -> EvaluationOutput:
    """Scores of a language model or a classifier, by the kind of the model."""
    path = data.input
    assert path is not None
    opened: Any = run_time.open(model, pipelines.SavedModel, "evaluate")
    if isinstance(opened, pipelines.LanguageModel):
        fields = {f"--{name}-field": value for name, value in data.fields.items()}
        _refuse("language models", fields | {"--output": data.output})
        return None, _evaluate_text(opened, path, run_time.batch_tokens), [], []
    if isinstance(opened, pipelines.Classifier):
        return _evaluate_labels(opened, path, data.fields, run_time.batch_tokens)
    if isinstance(opened, pipelines.Translator):
        raise UserError("a translator is evaluated on pairs: give --src FILE and --ref FILE")
    raise UserError(f"evaluate does not support a {opened.kind}")


def _refuse(kinds: str, flags: Mapping[str, object]) -> None:
    """Raise UserError for flags that have no effect on these kinds of models."""
    set_flags = [flag for flag, value in flags.items() if value is not None and value is not False]
    if set_flags:
        raise UserError(f"{', '.join(set_flags)}: without effect for {kinds}; leave it out")


def _evaluate_pairs(
    translator: "pipelines.Translator",
    sources: list[str],
    references: list[str],
    options: dict[str, Any],
    metrics: str | None,
    language: str | None,
) -> EvaluationOutput:
    from heedful import extras
    from heedful.evaluation.metrics import corpus_scores, sentence_chrf, split_at_spaces

    extras.require("eval", "the evaluation of translations")
    names = _usable_metrics(metrics, language)
    if language is None and (problem := split_at_spaces(references, names)):
        note(f"{problem}; give --language zh or ja")
    settled = settle(translator, options)
    with progress_bar("translating", len(sources)) as progress:
        outputs = translator.translate(sources, progress=progress, **options)
    report_counts(translator, "lines", len(sources))
    left_out = translator.num_left_out
    translator.num_left_out = translator.num_truncated = 0
    lowercase = translator.tgt_tokenizer.lowercases
    scores = corpus_scores(
        outputs, references, tgt_language=language, metrics=names, lowercase=lowercase
    )
    shared = ("too_long", "batch_tokens", "src_language", "tgt_language")
    forced = translator.teacher_forced(
        sources, references, **{name: options[name] for name in shared if name in options}
    )
    if translator.num_left_out:
        note(f"pairs without perplexity, a side is too long: {translator.num_left_out:,}")
    if translator.num_truncated:
        note(f"sources and references truncated for perplexity: {translator.num_truncated:,}")
    counts = {"num_left_out": left_out, "num_pairs_left_out": translator.num_left_out}
    counts = {name: count for name, count in counts.items() if count}
    search = {"beam_size": settled.beam_size, "length_penalty": settled.length_penalty}
    ranks = sentence_chrf(outputs, references, lowercase=lowercase)
    columns = zip(sources, outputs, references, ranks, strict=True)
    entries: Entries = [
        {"line": number, "source": source, "output": output, "reference": reference, "chrf": chrf}
        for number, (source, output, reference, chrf) in enumerate(columns, 1)
    ]
    ranked = sorted(entries, key=lambda entry: entry["chrf"])
    return outputs, {**search, **scores.to_dict(), **forced, **counts}, ranked, entries


def _usable_metrics(metrics: str | None, language: str | None) -> tuple[str, ...]:
    """The given metrics, or the default ones without those that cannot be computed here, which are
    named; raises UserError for a given one."""
    from heedful.evaluation.metrics import DEFAULT_METRICS, metric_problem, usable_metric

    if metrics is not None:
        names = tuple(metrics.split(","))
        for name in names:
            usable_metric(name, language)
        return names
    problems = {name: metric_problem(name, language) for name in DEFAULT_METRICS}
    for name, problem in problems.items():
        if problem is not None:
            typer.echo(f"scores are without {name}: {problem}", err=True)
    return tuple(name for name, problem in problems.items() if problem is None)


def _evaluate_text(
    model: "pipelines.LanguageModel", path: Path, batch_tokens: int | None
) -> dict[str, Any]:
    """Perplexity and bits of a text; each token has at least half the net's length as context."""
    check_plain(path)
    content = read_whole(path)
    score = model.score([content], batch_tokens=batch_tokens)[0]
    if not score.num_tokens:
        raise UserError(f"{path} is too short: it has a single token, and nothing to predict")
    tokenizer = model.tokenizer
    num_read = len(tokenizer.normalize(content))
    if num_read < _MIN_READ * len(content):
        note(
            f"the tokenizer joins blanks or drops characters: it reads {num_read:,} of "
            f"{len(content):,}, and bits per character and per byte are those of all"
        )
    num_unknown = tokenizer.encode(content).count(tokenizer.unk_id)
    if num_unknown:
        note(
            f"unknown tokens, which perplexity and bits count like known ones: {num_unknown:,} of "
            f"{score.num_tokens:,}"
        )
    return {
        "num_tokens": score.num_tokens,
        **({"num_unknown": num_unknown} if num_unknown else {}),
        "perplexity": score.perplexity,
        "bits_per_character": score.bits_per_character(content),
        "bits_per_byte": score.bits_per_byte(content),
    }


def _labeled_rows(
    path: Path, columns: dict[str, Any], names: Sequence[str], problem: "ProblemType"
) -> "Rows":
    """The rows of labeled texts; a first line that names columns is left out with a note."""
    from heedful.data.row_files import open_rows
    from heedful.data.rows import LABEL, collect
    from heedful.data.tsv import ColumnOrderError

    try:
        rows = collect(replace(open_rows([path], columns), problem=problem))
    except ColumnOrderError as error:
        given = " ".join(f"--{name}-field {number}" for name, number in error.columns.items())
        raise UserError(f"{error.problem}: give columns, such as {given}") from None
    if rows.report.num_headers:
        whole = collect(replace(open_rows([path], columns, header=False), problem=problem))
        if whole[LABEL][0] in names:  # a row, whose label is rare here
            rows = whole
        else:
            typer.echo(f"{path}: the first line has names of columns, and is left out", err=True)
    if rows.report.num_empty:
        typer.echo(f"texts left out as empty: {rows.report.num_empty}", err=True)
    return rows


def _evaluate_labels(
    model: "pipelines.Classifier",
    path: Path,
    fields: dict[str, str | None],
    batch_tokens: int | None,
) -> EvaluationOutput:
    import numpy as np

    from heedful.data.columns import Columns
    from heedful.data.labels import label_columns, label_targets
    from heedful.data.rows import LABEL
    from heedful.evaluation.labels import answer_texts, score_answers

    problem, names = model.metadata.problem, model.labels
    # Columns of a file without a header are numbered.
    columns: dict[str, Any] = {
        key: int(name) if name is not None and name.isdecimal() else name
        for key, name in fields.items()
        if name is not None or key != "pair"
    }
    rows = _labeled_rows(path, columns, names, problem)
    known = Columns(label_columns(rows, names, problem), rows.report)
    targets = label_targets(known, np.arange(len(rows)), names, problem)
    with progress_bar("classifying", len(rows)) as progress:
        pairs = rows.columns.get("pair")
        outputs = model.classify(
            rows["text"], pairs=pairs, progress=progress, batch_tokens=batch_tokens
        )
    report_counts(model, "texts", len(rows))
    answers = _answers(outputs, names, problem)
    scores, tables = score_answers(targets, answers, names, problem)
    labels = answer_texts(answers, names, problem)
    errors = np.abs(answers.astype(float) - targets)
    is_wrong = errors.reshape(len(rows), -1).any(1)
    name, badness = "probability", np.array([output.probability for output in outputs])
    if problem != "single_label":
        if problem == "multi_label":  # by the probabilities that are furthest from the truth
            probabilities = np.array([[*output.probabilities.values()] for output in outputs])
            errors *= np.abs(probabilities - targets)
        name, badness = "error", errors.max(1)
    entries = [
        {
            "location": rows.location(row),
            "text": rows["text"][row],
            **({} if pairs is None else {"pair": pairs[row]}),
            "label": rows[LABEL][row],
            "predicted": labels[row],
            name: float(badness[row]),
        }
        for row in range(len(rows))
    ]
    wrong = [entry for entry, is_error in zip(entries, is_wrong, strict=True) if is_error]
    content = {"num_texts": len(rows), **scores, **tables}
    return labels, content, sorted(wrong, key=lambda entry: -entry[name]), entries


def _answers(
    outputs: Sequence["pipelines.Classification"], names: Sequence[str], problem: str
) -> "np.ndarray":
    """The predictions of a classifier for N texts, as the argument of `score_answers`."""
    import numpy as np

    if problem == "regression":
        return np.array([[*output.values.values()] for output in outputs])
    if problem == "multi_label":
        return np.array([[name in output.labels for name in names] for output in outputs])
    return np.array([names.index(output.label) for output in outputs])


def _print(content: dict[str, Any], json: bool) -> None:
    """Print JSON, or one line per score."""
    if json:
        print_json(content)
        return
    for name, entry in content.get("scores", {}).items():
        typer.echo(f"{name:<26}{entry['score']:9.4f}   {entry.get('signature', '')}".rstrip())
    for name, value in content.items():
        if isinstance(value, float) and name != "length_penalty":
            typer.echo(f"{name:<26}{value:9.4f}")
    if "per_label" in content:
        _print_labels(content["labels"], content["per_label"], content.get("confusion"))
    for kind, entries in content.get("examples", {}).items():
        if entries:
            typer.echo(f"\n{kind}:")
        for entry in entries:
            typer.echo()
            for name, value in entry.items():
                typer.echo(f"  {name:<12}{f'{value:.3f}' if isinstance(value, float) else value}")


def _print_labels(
    labels: list[str], scores: dict[str, dict[str, float]], table: list[list[int]] | None
) -> None:
    """Print a line per label, and a confusion matrix if a terminal has room for it."""
    from rich.table import Column, Table

    def print_table(first: str, names: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
        columns = (Column(name, justify="right") for name in names)
        table = Table(first, *columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        typer.echo()
        make_console().print(table)

    figures = [
        (
            label,
            *(f"{of[name]:.4f}" for name in ("precision", "recall", "f1")),
            f"{of['num_texts']:,}",
        )
        for label, of in scores.items()
    ]
    print_table("label", ("precision", "recall", "F1", "texts"), figures)
    if table is not None and len(labels) <= _MOST_COLUMNS:
        counts = zip(labels, table, strict=True)
        rows = ((label, *(f"{count:,}" for count in row)) for label, row in counts)
        print_table("label / predicted", labels, rows)
