"""`heedful fill`: the most probable tokens for the masks of a text."""

from dataclasses import asdict

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, ModelFolder, RunTime, leave_out
from heedful.cli.lines import InputOutput, json_line, line_writer, report_counts
from heedful.errors import UserError


@leave_out("batch_tokens")
def fill(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    top_k: int = typer.Option(5, min=1, metavar="N", help="Candidates per mask."),
    json: JsonLines = False,
    run_time: RunTime,
) -> None:
    """Print the most probable tokens for each <mask> or [MASK] of a text.

    One line per candidate, best first: probability, token, and the text with it, separated by tabs.
    An empty line ends the candidates of a mask. If a text has several masks, each is filled while
    the others stay masked.

    Example: heedful fill runs/encoder 'A <mask> barks.' --top-k 3
    """
    chunks = in_out.chunks()
    many = in_out.input is not None
    filler = run_time.open(model, pipelines.MaskedLanguageModel, "fill", many=many)
    number = 0
    with line_writer(in_out.output) as write:
        for chunk in chunks:
            for line in chunk:
                number += 1
                try:
                    masks = filler.fill(
                        line, top_k=top_k, too_long="truncate" if in_out.truncate else "error"
                    )
                except UserError as error:
                    if in_out.strict:
                        raise UserError(f"line {number}: {error}") from None
                    filler.leave_out(f"line {number}: {error}")
                    masks = [[]]
                if json:
                    candidates = [[asdict(candidate) for candidate in mask] for mask in masks]
                    write(json_line(text=line, masks=candidates))
                    continue
                for mask in masks:
                    for fill in mask:
                        write(f"{fill.probability:.6f}\t{fill.token}\t{fill.text}")
                    write("")
        if not number:
            raise UserError("no text: give TEXT, --input FILE, or lines on stdin")
        report_counts(filler, "lines", number)
