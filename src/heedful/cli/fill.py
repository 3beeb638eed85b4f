"""`heedful fill`: which words belong where a text is masked."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.shared import (
    Device,
    Engine,
    Input,
    JsonLines,
    Output,
    Precision,
    Strict,
    Threads,
    Truncate,
    open_model,
    tell_counts,
    too_long_of,
)


def fill(
    model: Annotated[Path, typer.Argument(help="A masked language model's directory.")],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", help="A text with <mask> or [MASK] in it; repeatable."),
    ] = None,
    input: Input = None,
    output: Output = None,
    top: Annotated[int, typer.Option(min=1, help="Candidates for each mask.")] = 5,
    json: JsonLines = False,
    truncate: Truncate = False,
    strict: Strict = False,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Name the likeliest words for each mask in a text.

    A line for each candidate, best first: its probability, the token, and the text with it, with
    tabs between. After each mask stands an empty line. Of several masks each is filled with the
    others still masked.

    Example: heedful fill runs/encoder --text 'A <mask> barks.' --top 3
    """
    from heedful.cli.lines import input_chunks, json_line, line_writer
    from heedful.errors import UserError
    from heedful.inference import MaskedLanguageModel, expect

    if text and input is not None:
        raise UserError("give --text or --input, not both")
    chunks: Iterator[list[str]] = iter([text]) if text else input_chunks(input)
    filler = open_model(model, input, device, engine, precision, threads)
    expect(filler, MaskedLanguageModel, "fill")
    number = 0
    with line_writer(output) as write:
        for chunk in chunks:
            for line in chunk:
                number += 1
                try:
                    masks = filler.fill(line, top_k=top, too_long=too_long_of(truncate))
                except UserError as error:
                    if strict:
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
