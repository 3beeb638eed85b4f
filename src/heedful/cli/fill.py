"""`heedful fill`: which words belong where a text is masked."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, spread
from heedful.cli.lines import Filter, input_chunks, json_line, line_writer, tell_counts
from heedful.errors import UserError


@spread()
def fill(
    *,
    model: Path = typer.Argument(..., help="A masked language model's directory."),
    text: list[str] | None = typer.Option(
        None, "--text", "-t", help="A text with <mask> or [MASK] in it; repeatable."
    ),
    top: int = typer.Option(5, min=1, help="Candidates for each mask."),
    json: JsonLines = False,
    given: Filter,
) -> None:
    """Name the likeliest words for each mask in a text.

    A line for each candidate, best first: its probability, the token, and the text with it, with
    tabs between. After each mask stands an empty line. Of several masks each is filled with the
    others still masked.

    Example: heedful fill runs/encoder --text 'A <mask> barks.' --top 3
    """
    if text and given.input is not None:
        raise UserError("give --text or --input, not both")
    chunks: Iterator[list[str]] = iter([text]) if text else input_chunks(given.input)
    filler = given.open(model, pipelines.MaskedLanguageModel, "fill")
    number = 0
    with line_writer(given.output) as write:
        for chunk in chunks:
            for line in chunk:
                number += 1
                try:
                    masks = filler.fill(
                        line, top_k=top, too_long="truncate" if given.truncate else "error"
                    )
                except UserError as error:
                    if given.strict:
                        raise UserError(f"line {number}: {error}") from None
                    filler.leave_out(f"line {number}: {error}")
                    masks = [[]]
                if json:
                    found = [[asdict(candidate) for candidate in mask] for mask in masks]
                    write(json_line(text=line, masks=found))
                    continue
                for mask in masks:
                    for each in mask:
                        write(f"{each.probability:.6f}\t{each.token}\t{each.text}")
                    write("")
        if not number:
            raise UserError("there is no text: give --text TEXT, --input FILE, or lines on stdin")
        if number == filler.num_left_out:
            raise UserError("no line can be used; give texts with a mask")
    tell_counts(filler, "lines")
