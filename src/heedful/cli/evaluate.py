"""`heedful evaluate`: what a model is worth on a file, whatever its kind."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.flags import Device, Json, ModelFolder, Truncate, spread
from heedful.cli.lines import progress_bar, read_parallel, read_whole
from heedful.cli.shared import make_console, print_json
from heedful.errors import UserError

_MOST_COLUMNS = 12  # of a table of errors that is printed

if TYPE_CHECKING:
    from heedful.inference import Classifier, LanguageModel, Translator


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
    signatures, exact match; perplexity and token accuracy are those of the reference. With --text:
    perplexity and bits of all of a file as one text. With --labelled: accuracy and macro F1, each
    label's precision, recall and F1, and what texts of each label were taken for.

    Examples follow: the outputs furthest from their reference by chrF, or the mistakes that the
    classifier was surest of, and some at random, always the same.

    Example: heedful evaluate runs/translation --src test.en --ref test.de --json
    """
    from heedful.inference import Classifier, LanguageModel, Translator, expect, load

    given = [src is not None or ref is not None, text is not None, labelled is not None]
    if sum(given) != 1 or (src is None) != (ref is None):
        raise UserError("give --src and --ref, or --text, or --labelled: what the model is for")
    opening = partial(load, model, device=device, engine="eager")  # after the files are read
    if text is not None:
        content = read_whole(text)
        found = _of_text(expect(opening(), LanguageModel, "evaluate --text"), content, text)
    elif labelled is not None:
        fields = {"text_field": text_field, "label_field": label_field, "pair_field": pair_field}
        classifier = expect(opening(), Classifier, "evaluate --labelled")
        found = _of_labels(classifier, labelled, fields, output, examples)
    else:
        assert src is not None
        assert ref is not None
        lines = read_parallel(src, ref)
        translator = expect(opening(), Translator, "evaluate --src")
        options["too_long"] = "truncate" if truncate else "error"
        target = language or translator.card.tgt_language
        found = _of_pairs(translator, *lines, options, metrics, target, output, examples)
    _print({"model": str(model)} | found, json)


def _of_pairs(
    translator: "Translator",
    sources: list[str],
    references: list[str],
    options: dict[str, Any],
    metrics: str | None,
    language: str | None,
    output: Path | None,
    num_examples: int,
) -> dict[str, Any]:
    from heedful.evaluation.metrics import DEFAULT_METRICS, corpus_scores, sentence_chrf
    from heedful.files import write_text
    from heedful.plugins import metric

    names = DEFAULT_METRICS if metrics is None else tuple(metrics.split(","))
    for name in names:
        metric.get(name)  # a wrong one is told before the work
    with progress_bar("translating", len(sources)) as progress:
        outputs = translator.translate(sources, progress=progress, **options)
    scores = corpus_scores(outputs, references, trg_lang=language, metrics=names)
    forced = translator.teacher_forced(sources, references, too_long=options["too_long"])
    if output is not None:
        write_text(output, "".join(f"{line}\n" for line in outputs))
    chosen = translator.options(**options)
    search = {"beam_size": chosen.beam_size, "length_penalty": chosen.length_penalty}
    chrf = sentence_chrf(outputs, references)
    ranked = sorted(range(len(chrf)), key=chrf.__getitem__)
    shown = _examples(
        ranked,
        len(outputs),
        num_examples,
        lambda line: {
            "line": line + 1,
            "source": sources[line],
            "output": outputs[line],
            "reference": references[line],
            "chrf": chrf[line],
        },
    )
    return {**search, **scores.to_dict(), **forced, "examples": shown}


def _examples(
    ranked: Sequence[int], count: int, wanted: int, entry: Callable[[int], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Some of `ranked`, the worst first, and as many of all `count`, drawn by a fixed seed."""
    import random

    drawn = sorted(random.Random(0).sample(range(count), min(wanted, count)))
    return {"worst": [*map(entry, ranked[:wanted])], "random": [*map(entry, drawn)]}


def _of_text(model: "LanguageModel", content: str, path: Path) -> dict[str, Any]:
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


def _of_labels(
    model: "Classifier",
    path: Path,
    fields: dict[str, str | None],
    output: Path | None,
    num_examples: int,
) -> dict[str, Any]:
    import numpy as np

    from heedful.data.rows import LABEL, read_rows
    from heedful.evaluation.labels import confusion, label_scores, per_label
    from heedful.files import write_text
    from heedful.tasks.classification import label_ids

    # Columns of a file without a header are numbered.
    named: dict[str, Any] = {
        key.removesuffix("_field"): int(name) if name is not None and name.isdecimal() else name
        for key, name in fields.items()
        if name is not None or key != "pair_field"
    }
    given = read_rows([path], named)
    wanted = label_ids(given, model.labels)
    with progress_bar("classifying", len(given)) as progress:
        pairs = given.columns.get("pair")
        found = model.classify(given["text"], pairs=pairs, progress=progress)
    numbers = {label: number for number, label in enumerate(model.labels)}
    chosen = np.array([numbers[each.label] for each in found])
    table = confusion(wanted, chosen, len(model.labels))
    if output is not None:
        write_text(output, "".join(f"{each.label}\n" for each in found))
    wrong = np.flatnonzero(chosen != wanted).tolist()
    wrong.sort(key=lambda row: -found[row].probability)
    shown = _examples(
        wrong,
        len(given),
        num_examples,
        lambda row: {
            "place": given.place(row),
            "text": given["text"][row],
            **({} if pairs is None else {"pair": pairs[row]}),
            "label": given[LABEL][row],
            "said": found[row].label,
            "probability": found[row].probability,
        },
    )
    return {
        "num_texts": len(given),
        **label_scores(table),
        "per_label": per_label(table, model.labels),
        "labels": list(model.labels),
        "confusion": table.tolist(),
        "examples": shown,
    }


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
    from rich.table import Table

    shown = Table("label", box=None, pad_edge=False)
    for name in ("precision", "recall", "F1", "texts"):
        shown.add_column(name, justify="right")
    for label, of in scores.items():
        figures = (f"{of[name]:.4f}" for name in ("precision", "recall", "f1"))
        shown.add_row(label, *figures, f"{of['num_texts']:,}")
    tables = [shown]
    if len(labels) <= _MOST_COLUMNS:
        tables.append(Table("label / said", box=None, pad_edge=False))
        for label in labels:
            tables[-1].add_column(label, justify="right")
        for label, row in zip(labels, table, strict=True):
            tables[-1].add_row(label, *(f"{count:,}" for count in row))
    for each in tables:
        typer.echo()
        make_console().print(each)
