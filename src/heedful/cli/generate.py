"""`heedful generate`: texts that a model goes on with, streamed as they are written."""

import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, tee
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli import lines
from heedful.cli.flags import JsonLines, ModelFolder, spread
from heedful.cli.lines import Filter, tell_counts
from heedful.errors import UserError


@spread()
def generate(
    *,
    model: ModelFolder,
    prompt: list[str] | None = typer.Option(
        None, "--prompt", "-p", help="A text to go on with; repeatable."
    ),
    whole_file: bool = typer.Option(
        False, "--whole-file", help="Take all of the input as one prompt."
    ),
    options: dict[str, Any],
    json: JsonLines = False,
    given: Filter,
) -> None:
    """Go on with prompts, or answer sources with a model of two stacks, as it is written.

    What is not asked for is as the model's card says; where it says nothing, the likeliest token is
    taken each time, or a beam of 5 searched for a source. Only what is new is written; without a
    beam search it streams to stdout, and a prompt that is typed is answered at once.

    Example: heedful generate runs/novel --prompt 'It was' --temperature 0.8 --top-p 0.95
    """
    if prompt and given.input is not None:
        raise UserError("give --prompt or --input, not both")
    if prompt and whole_file:
        raise UserError("--whole-file is of --input or stdin; leave it or --prompt out")
    # A missing file is told before a model is loaded.
    chunks = _prompts(prompt, given.input, whole_file)
    generator = given.open(model, pipelines.Generator, "generate")
    draft = options.get("draft")
    if draft not in (None, "lookup"):
        opened = pipelines.load(str(draft), device=given.device, backend="eager")
        options["draft"] = pipelines.expect(opened, pipelines.Generator, "--draft")
    options["too_long"] = given.too_long
    _write(generator, chunks, options, json, given)
    tell_counts(generator, "sources")


def _write(
    model: "pipelines.Generator",
    chunks: Iterator[list[str]],
    options: dict[str, Any],
    json: bool,
    given: Filter,
) -> None:
    """Every prompt's outputs. Prompt number i draws alike, whatever it comes with."""
    options["said"] = frozenset(options)
    seed = options.setdefault("seed", secrets.randbelow(2**31))
    chosen = model.options(**options)
    number = 0
    with lines.line_writer(given.output) as write, given.progress("generating") as progress:
        if given.output is None and not json and chosen.beam_size == chosen.num_return == 1:
            for number, prompt in enumerate(chain.from_iterable(chunks), 1):
                own = {"seed": [seed + (number - 1 << 32)], "first_number": number}
                for piece in model.stream(prompt, **options | own):
                    lines.show(piece, end="")
                write("")
        else:
            options |= {"scores": json, "progress": progress}
            chunks, again = tee(chunks)
            answers = model.in_turn(chunks, ahead=given.ahead, **options)
            pairs = zip(answers, chain.from_iterable(again), strict=False)
            for outputs, prompt in pairs:
                number += 1
                if json:
                    write(
                        lines.json_line(prompt=prompt, outputs=[asdict(each) for each in outputs])
                    )
                else:
                    for each in outputs:
                        write(each.text)
        if not number:
            raise UserError(
                "there is no prompt: give --prompt TEXT, --input FILE, or lines on stdin"
            )


def _prompts(prompts: list[str] | None, path: Path | None, whole_file: bool) -> Iterator[list[str]]:
    if prompts:
        return iter([prompts])
    if whole_file:
        return iter([[lines.read_whole(path)]])
    if path is None and sys.stdin.isatty():
        typer.echo("type a prompt a line; Ctrl-D ends", err=True)
    return lines.input_chunks(path)
