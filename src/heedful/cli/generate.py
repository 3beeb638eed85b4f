"""`heedful generate`: texts that a model goes on with, streamed as they are written."""

import secrets
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.flags import takes_options
from heedful.cli.shared import (
    Device,
    Engine,
    Input,
    JsonLines,
    ModelFolder,
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
    from heedful.inference import Generator


@takes_options()
def generate(
    *,
    model: ModelFolder,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A text to go on with; repeatable.")
    ] = None,
    input: Input = None,
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Take all of the input as one prompt.")
    ] = False,
    output: Output = None,
    options: dict[str, Any],
    truncate: Truncate = False,
    strict: Strict = False,
    json: JsonLines = False,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Go on with prompts, or answer sources with a model of two stacks, as it is written.

    What is not asked for is as the model's card says; where it says nothing, the likeliest token is
    taken each time, or a beam of 5 searched for a source. Only what is new is written; without a
    beam search it streams to stdout, and a prompt that is typed is answered at once.

    Example: heedful generate runs/novel --prompt 'It was' --temperature 0.8 --top-p 0.95
    """
    from heedful.errors import UserError
    from heedful.inference import Generator, expect, load

    if prompt and input is not None:
        raise UserError("give --prompt or --input, not both")
    if prompt and whole_file:
        raise UserError("--whole-file is of --input or stdin; leave it or --prompt out")
    chunks = _prompts(prompt, input, whole_file)  # a missing file is told before a model is loaded
    generator = open_model(model, input, device, engine, precision, threads)
    expect(generator, Generator, "generate")
    draft = options.get("draft")
    if draft not in (None, "lookup"):
        options["draft"] = load(str(draft), device=device, engine="eager")
        expect(options["draft"], Generator, "--draft")
    options["too_long"] = too_long_of(truncate, strict)
    _write(generator, chunks, options, output, json, ahead=0 if input is None else 1)
    tell_counts(generator, "sources")


def _write(
    model: "Generator",
    chunks: Iterator[list[str]],
    options: dict[str, Any],
    output: Path | None,
    json: bool,
    ahead: int,
) -> None:
    """Every prompt's outputs. Prompt number i draws alike, whatever it comes with."""
    from heedful.cli.lines import json_line, kept, line_writer, piece_writer, progress_bar
    from heedful.errors import UserError

    options["said"] = frozenset(options)
    seed = options.setdefault("seed", secrets.randbelow(2**31))
    chosen = model.options(**options)
    waiting: deque[str] = deque()
    bar = progress_bar("generating", shown=output is not None)
    number = 0
    with line_writer(output) as write, bar as progress:
        if output is None and not json and chosen.beam_size == chosen.num_return == 1:
            for number, prompt in enumerate(chain.from_iterable(chunks), 1):
                own = {"seed": [seed + (number - 1 << 32)], "first_number": number}
                for piece in model.stream(prompt, **options | own):
                    piece_writer(piece)
                write("")
        else:
            windows = kept(chunks, waiting)
            options |= {"scores": json, "progress": progress}
            found = model.in_turn(windows, ahead=ahead, **options)
            for outputs in found:
                number, prompt = number + 1, waiting.popleft()
                if json:
                    write(json_line(prompt=prompt, outputs=[asdict(each) for each in outputs]))
                else:
                    for each in outputs:
                        write(each.text)
        if not number:
            raise UserError(
                "there is no prompt: give --prompt TEXT, --input FILE, or lines on stdin"
            )


def _prompts(given: list[str] | None, path: Path | None, whole_file: bool) -> Iterator[list[str]]:
    from heedful.cli.lines import input_chunks, read_whole

    if given:
        return iter([given])
    if whole_file:
        return iter([[read_whole(path)]])
    if path is None and sys.stdin.isatty():
        typer.echo("type a prompt a line; Ctrl-D ends", err=True)
    return input_chunks(path)
