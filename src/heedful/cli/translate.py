"""`heedful translate`: lines in, translations out, in their order."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.flags import spread
from heedful.cli.lines import Filter, input_chunks, line_writer, tell_counts
from heedful.errors import UserError


@spread("draft", "num_draft_tokens")
def translate(
    *,
    models: list[Path] = typer.Argument(
        ...,
        metavar="MODEL...",
        help="A model directory; of several the mean of their probabilities is searched.",
    ),
    options: dict[str, Any],
    scores: bool = typer.Option(False, "--scores", help="Put the score and a tab before each."),
    weight: list[float] | None = typer.Option(
        None, "--weight", help="Of a model among several, in their order; repeatable."
    ),
    given: Filter,
) -> None:
    """Translate lines from a file or a pipe.

    One line out for each line in (with --num-return N: N lines each, best first). Output streams: a
    line that is typed is answered at once. A line that is too long for the model is reported and
    left out: its translation is blank.

    Several models with one vocabulary, each of its own size and architecture, translate together;
    they run eager.

    Example: echo 'Hello.' | heedful translate runs/translation
    """
    chunks = input_chunks(given.input)  # a missing file is told before a model is loaded
    translator = _opened(models, weight, given)
    if given.input is None and sys.stdin is not None and sys.stdin.isatty():
        typer.echo("ready: type a line, and its translation follows; Ctrl-D ends", err=True)
    options["too_long"] = given.too_long
    num_return = options.get("num_return", 1)
    cut = 0
    with line_writer(given.output) as write, given.progress("translating") as progress:
        options |= {"scores": scores, "progress": progress}
        for found in translator.in_turn(chunks, ahead=given.ahead, **options):
            cut += not found[0].finished
            missing = [None] * (num_return - len(found))
            for entry in [*found, *missing]:
                text = "" if entry is None else entry.text
                score = -math.inf if entry is None else entry.score
                write(f"{score:.6f}\t{text}" if scores else text)
    tell_counts(translator, "lines")
    if cut:
        typer.echo(f"translations cut off by the length limit: {cut:,}", err=True)


def _opened(
    models: list[Path], weights: list[float] | None, given: Filter
) -> "pipelines.Translator":
    """The model, or several as one."""
    if len(models) > 1:
        if given.backend not in ("auto", "eager"):
            raise UserError(f"several models run eager alone; leave out --backend {given.backend}")
        given = replace(given, backend="eager")
    opened = [given.open(each, pipelines.Translator, "translate") for each in models]
    return opened[0] if len(opened) == 1 and not weights else pipelines.ensemble(opened, weights)
