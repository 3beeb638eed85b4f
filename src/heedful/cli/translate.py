"""`heedful translate`: lines in, translations out, in the same order."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.alignments import AlignmentFlags
from heedful.cli.flags import JsonLines, ModelFolder, spread
from heedful.cli.help import IN_OUT
from heedful.cli.lines import (
    InputOutput,
    RunTime,
    json_line,
    line_writer,
    note_unused,
    report_counts,
)
from heedful.errors import UserError


@spread("draft", "num_draft_tokens")
def translate(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    scores: bool = typer.Option(
        False,
        "--scores",
        help="Before each translation write its score and a tab.",
        rich_help_panel=IN_OUT,
    ),
    json: JsonLines = False,
    aligned: AlignmentFlags,
    options: dict[str, Any],
    ensemble: list[Path] | None = typer.Option(
        None,
        metavar="MODEL",
        help="Search the mean of the probabilities of MODEL and this one; repeatable.",
        rich_help_panel="Ensemble",
    ),
    weight: list[float] | None = typer.Option(
        None,
        metavar="X",
        help="Weight of a model in the mean, in the order of the models; repeatable.",
        show_default="equal weights",
        rich_help_panel="Ensemble",
    ),
    run_time: RunTime,
) -> None:
    """Translate texts: arguments, lines of a file, or lines of stdin.

    One line out for each line in (with --num-return N: N lines, best first); a line break inside a
    translation is written as a space, and counted. A line that is typed is answered at once. A
    line that is too long for the model is reported and left out: its translation is blank.

    The models of an ensemble share a vocabulary, but not sizes or architecture; they run eager.

    Example: heedful translate runs/translation 'Hello.'

    Example: heedful translate runs/translation -i test.en --beam-size 4

    Example: heedful translate runs/en-de -i test.en --alignments test.align
    """
    if weight and not ensemble:
        raise UserError("--weight is the weight of a model of an --ensemble; give both, or neither")
    aligned.check()
    chunks = in_out.chunks("ready: type a line, and its translation follows; Ctrl-D ends")
    translator = _open([model, *(ensemble or [])], weight, in_out, run_time)
    options |= {"too_long": in_out.too_long, "batch_tokens": run_time.batch_tokens}
    settled = translator.options(**options)
    note_unused(options, settled, translator)
    num_return = options.get("num_return", 1)
    cut = number = 0
    with (
        aligned.writer(translator, settled) as aligner,
        line_writer(in_out.output) as write,
        in_out.progress("translating") as progress,
    ):
        chunks = chunks if aligner is None else aligner.remember(chunks)
        options |= {"scores": scores or json, "progress": progress}
        for outputs in translator.iterate_generations(chunks, ahead=in_out.ahead, **options):
            number += 1
            cut += not outputs[0].finished and outputs[0].failure is None
            if aligner is not None:
                aligner.add(outputs, num_return)
            if json:
                write(json_line(outputs=[asdict(output) for output in outputs]))
                continue
            for output in [*outputs, *[None] * (num_return - len(outputs))]:
                text = "" if output is None else output.text
                score = -math.inf if output is None else output.score
                write(f"{score:.6f}\t{text}" if scores else text)
        report_counts(translator, "lines", number)
    if cut:
        typer.echo(f"translations cut off by the length limit: {cut:,}", err=True)


def _open(
    models: list[Path], weights: list[float] | None, in_out: InputOutput, run_time: RunTime
) -> "pipelines.Translator":
    """The model, or the ensemble of several."""
    if len(models) > 1:
        run_time = run_time.only_eager("an ensemble")
    many = in_out.input is not None
    opened = [run_time.open(path, pipelines.Translator, "translate", many=many) for path in models]
    return opened[0] if len(opened) == 1 else pipelines.ensemble(opened, weights)
