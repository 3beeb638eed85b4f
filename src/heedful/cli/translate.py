"""`heedful translate`: lines in, translations out, in their order."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.flags import takes_options
from heedful.cli.shared import (
    Device,
    Engine,
    Input,
    Output,
    Precision,
    Strict,
    Threads,
    Truncate,
    open_model,
    tell_counts,
    too_long_of,
)

if TYPE_CHECKING:
    from heedful.inference import Translator


@takes_options("draft", "num_draft_tokens")
def translate(
    *,
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="A model directory; of several the mean of their probabilities is searched.",
        ),
    ],
    input: Input = None,
    output: Output = None,
    options: dict[str, Any],
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the score and a tab before each.")
    ] = False,
    weight: Annotated[
        list[float] | None,
        typer.Option("--weight", help="Of a model among several, in their order; repeatable."),
    ] = None,
    truncate: Truncate = False,
    strict: Strict = False,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Translate lines from a file or a pipe.

    One line out for each line in (with --nbest N: N lines each, best first). Output streams: a
    line that is typed is answered at once. A line that is too long for the model is reported and
    left out: its translation is blank.

    Several models with one vocabulary, each of its own size and architecture, translate together;
    they run eager.

    Example: echo 'Hello.' | heedful translate runs/translation
    """
    from heedful.cli.lines import input_chunks, line_writer, progress_bar

    chunks = input_chunks(input)  # a missing file is told before a model is loaded
    translator = _opened(models, weight, input, (device, engine, precision, threads))
    if input is None and sys.stdin is not None and sys.stdin.isatty():
        typer.echo("ready: type a line, and its translation follows; Ctrl-D ends", err=True)
    options["too_long"] = too_long_of(truncate, strict)
    nbest = options.get("num_return", 1)
    cut = 0
    bar = progress_bar("translating", shown=output is not None)
    with line_writer(output) as write, bar as progress:
        ahead = 0 if input is None else 1  # who types a line waits for its answer
        options |= {"scores": scores, "progress": progress}
        for found in translator.in_turn(chunks, ahead=ahead, **options):
            cut += not found[0].finished
            missing = [None] * (nbest - len(found))
            for entry in [*found, *missing]:
                text = "" if entry is None else entry.text
                score = -math.inf if entry is None else entry.score
                write(f"{score:.6f}\t{text}" if scores else text)
    tell_counts(translator, "lines")
    if cut:
        typer.echo(f"{cut} translations were cut off by the length limit", err=True)


def _opened(
    models: list[Path],
    weights: list[float] | None,
    input: Path | None,
    how: tuple[str, str, str, int | None],
) -> "Translator":
    """The model, or several as one."""
    from heedful.errors import UserError
    from heedful.inference import Translator, ensemble, expect

    device, engine, precision, threads = how
    if len(models) > 1:
        if engine not in ("auto", "eager"):
            raise UserError(f"several models run eager alone; leave out --engine {engine}")
        engine = "eager"
    opened: list[Translator] = [
        open_model(each, input, device, engine, precision, threads) for each in models
    ]
    for translator in opened:
        expect(translator, Translator, "translate")
    return opened[0] if len(opened) == 1 and not weights else ensemble(opened, weights)
