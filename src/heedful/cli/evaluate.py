"""`heedful evaluate`: what a model is worth on a file, whatever its kind."""

import math
import random
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.flags import Device, Json, ModelFolder, Truncate, spread
from heedful.cli.lines import progress_bar, read_parallel, read_whole
from heedful.cli.shared import make_console, print_json
from heedful.errors import UserError
from heedful.files import write_text

# Outputs, what is said of them, those that are furthest from right, and all for examples.
Entries = list[dict[str, Any]]
Judged = tuple[list[str], dict[str, Any], Entries, Entries]
_MOST_COLUMNS = 12  # of a table of errors that is printed


@spread("num_return", "draft", "num_draft_tokens")
def evaluate(
    *,
    model: ModelFolder,
    src: Path | None = typer.Option(None, help="Source lines, for a translator."),
    ref: Path | None = typer.Option(None, help="Reference lines, as many."),
    text: Path | None = typer.Option(None, help="Running text, for a language model."),
    labelled: Path | None = typer.Option(
        None, help="For a classifier: a .tsv, .jsonl or .parquet with labels."
    ),
    text_field: str | None = typer.Option(
        None, help="Of labelled texts: a column's number or name, or a key."
    ),
    label_field: str | None = typer.Option(None, help="That of the label."),
    pair_field: str | None = typer.Option(None, help="That of the second text."),
    options: dict[str, Any],
    metrics: str | None = typer.Option(
        None, help="Of bleu, chrf, chrf++, ter, exact_match, tokenized_lowercase_bleu; by commas."
    ),
    language: str | None = typer.Option(
        None, help="Language of the target, e.g. de. Default: the model's."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Also write the translations or labels here."
    ),
    examples: int = typer.Option(
        3, min=0, help="Show so many of the worst outputs, and as many at random."
    ),
    json: Json = False,
    truncate: Truncate = False,
    device: Device = "auto",
) -> None:
    """Score a model on held-out text: translations, running text, or labelled texts.

    With --src and --ref a file is translated and scored: sacreBLEU's BLEU, chrF and TER with
    signatures, exact match; perplexity and token accuracy are those of the reference. Capitals are
    forgiven where the model's tokenizer makes them small (case:lc in the signature). With --text:
    perplexity and bits of all of a file as one text. With --labelled: accuracy and macro F1, each
    label's precision, recall and F1, and what texts of each label were taken for.

    Examples follow: the outputs furthest from their reference by chrF, or the mistakes that the
    classifier was surest of, and some at random, always the same.

    Example: heedful evaluate runs/translation --src test.en --ref test.de --json
    """
    given = [src is not None or ref is not None, text is not None, labelled is not None]
    if sum(given) != 1 or (src is None) != (ref is None):
        raise UserError("give --src and --ref, or --text, or --labelled: what the model is for")
    opening = partial(pipelines.load, model, device=device, backend="eager")  # after the files
    outputs: list[str] | None = None
    ranked: Entries = []
    entries: Entries = []
    if text is not None:
        content = read_whole(text)
        language_model = pipelines.expect(opening(), pipelines.LanguageModel, "evaluate --text")
        found = _of_text(language_model, content, text)
    elif labelled is not None:
        fields = {"text": text_field, "label": label_field, "pair": pair_field}
        classifier = pipelines.expect(opening(), pipelines.Classifier, "evaluate --labelled")
        outputs, found, ranked, entries = _of_labels(classifier, labelled, fields)
    elif src is not None and ref is not None:
        lines = read_parallel(src, ref)
        translator = pipelines.expect(opening(), pipelines.Translator, "evaluate --src")
        options["too_long"] = "truncate" if truncate else "error"
        target = language or translator.card.tgt_language
        outputs, found, ranked, entries = _of_pairs(translator, *lines, options, metrics, target)
    if outputs is not None:
        if output is not None:
            write_text(output, "".join(f"{line}\n" for line in outputs))
        drawn = random.Random(0).sample(range(len(entries)), min(examples, len(entries)))
        at_random = [entries[number] for number in sorted(drawn)]
        found["examples"] = {"worst": ranked[:examples], "random": at_random}
    _print({"model": str(model)} | found, json)


def _of_pairs(
    translator: "pipelines.Translator",
    sources: list[str],
    references: list[str],
    options: dict[str, Any],
    metrics: str | None,
    language: str | None,
) -> Judged:
    from heedful.evaluation.metrics import DEFAULT_METRICS, corpus_scores, sentence_chrf
    from heedful.plugins import metric

    names = DEFAULT_METRICS if metrics is None else tuple(metrics.split(","))
    for name in names:
        metric.get(name)  # a wrong one is told before the work
    with progress_bar("translating", len(sources)) as progress:
        outputs = translator.translate(sources, progress=progress, **options)
    scores = corpus_scores(
        outputs,
        references,
        trg_lang=language,
        metrics=names,
        lowercase=translator.tgt_tokenizer.lowercases,
    )
    forced = translator.teacher_forced(sources, references, too_long=options["too_long"])
    chosen = translator.options(**options)
    search = {"beam_size": chosen.beam_size, "length_penalty": chosen.length_penalty}
    columns = zip(sources, outputs, references, sentence_chrf(outputs, references), strict=True)
    entries: Entries = [
        {"line": number, "source": source, "output": output, "reference": reference, "chrf": chrf}
        for number, (source, output, reference, chrf) in enumerate(columns, 1)
    ]
    ranked = sorted(entries, key=lambda entry: entry["chrf"])
    return outputs, {**search, **scores.to_dict(), **forced}, ranked, entries


def _of_text(model: "pipelines.LanguageModel", content: str, path: Path) -> dict[str, Any]:
    """All of a text, each token told from those before it, at least half the net's length."""
    ids = model.prompt_ids([content])
    if len(ids[0]) < 2:
        raise UserError(f"{path} is too short: no token of it is told from one before")
    found = model.score(ids)[0]
    bits = -found.log_prob / math.log(2)
    return {
        "num_tokens": found.num_tokens,
        "perplexity": math.exp(-found.log_prob / found.num_tokens),
        "bits_per_character": bits / len(content),
        "bits_per_byte": bits / len(content.encode()),
    }


def _of_labels(model: "pipelines.Classifier", path: Path, fields: dict[str, str | None]) -> Judged:
    import numpy as np

    from heedful.data.rows import LABEL, read_rows
    from heedful.evaluation.labels import confusion, label_scores, per_label
    from heedful.tasks.classification import label_ids

    # Columns of a file without a header are numbered.
    named: dict[str, Any] = {
        key: int(name) if name is not None and name.isdecimal() else name
        for key, name in fields.items()
        if name is not None or key != "pair"
    }
    given = read_rows([path], named)
    wanted = label_ids(given, model.labels)
    with progress_bar("classifying", len(given)) as progress:
        pairs = given.columns.get("pair")
        found = model.classify(given["text"], pairs=pairs, progress=progress)
    chosen = np.array([model.labels.index(each.label) for each in found])
    table = confusion(wanted, chosen, len(model.labels))
    entries = [
        {
            "place": given.location(row),
            "text": given["text"][row],
            **({} if pairs is None else {"pair": pairs[row]}),
            "label": given[LABEL][row],
            "said": each.label,
            "probability": each.probability,
        }
        for row, each in enumerate(found)
    ]
    wrong = [entry for entry in entries if entry["said"] != entry["label"]]
    content = {
        "num_texts": len(given),
        **label_scores(table),
        "per_label": per_label(table, model.labels),
        "labels": list(model.labels),
        "confusion": table.tolist(),
    }
    outputs = [each.label for each in found]
    return outputs, content, sorted(wrong, key=lambda entry: -entry["probability"]), entries


def _print(content: dict[str, Any], json: bool) -> None:
    """As JSON, or a line for each score."""
    if json:
        print_json(content)
        return
    for name, entry in content.get("scores", {}).items():
        typer.echo(f"{name:<26}{entry['score']:9.4f}   {entry.get('signature', '')}".rstrip())
    for name, value in content.items():
        if isinstance(value, float) and name != "length_penalty":
            typer.echo(f"{name:<26}{value:9.4f}")
    if "confusion" in content:
        _print_labels(content["labels"], content["per_label"], content["confusion"])
    for kind, entries in content.get("examples", {}).items():
        if entries:
            typer.echo(f"\n{kind}:")
        for entry in entries:
            typer.echo()
            for name, value in entry.items():
                typer.echo(f"  {name:<12}{f'{value:.3f}' if isinstance(value, float) else value}")


def _print_labels(
    labels: list[str], scores: dict[str, dict[str, float]], table: list[list[int]]
) -> None:
    """A line for each label, and the table of errors where a screen has room for it."""
    from rich.table import Column, Table

    def shown(first: str, names: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
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
    shown("label", ("precision", "recall", "F1", "texts"), figures)
    if len(labels) <= _MOST_COLUMNS:
        counts = zip(labels, table, strict=True)
        rows = ((label, *(f"{count:,}" for count in row)) for label, row in counts)
        shown("label / said", labels, rows)
