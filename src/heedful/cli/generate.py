"""`heedful generate`: continuations of prompts, streamed."""

import secrets
from collections.abc import Iterator
from itertools import chain, tee
from typing import Any

import typer

from heedful import pipelines
from heedful.cli import lines
from heedful.cli.flags import JsonLines, ModelFolder, RunTime
from heedful.cli.help import IN_OUT
from heedful.cli.lines import InputOutput, report_counts
from heedful.errors import UserError


def generate(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    whole_file: bool = typer.Option(
        False, "--whole-file", help="Read all of the input as one prompt.", rich_help_panel=IN_OUT
    ),
    json: JsonLines = False,
    options: dict[str, Any],
    run_time: RunTime,
) -> None:
    """Continue prompts with a decoder-only model, or answer sources with an encoder-decoder.

    Options that are not given have the values in the model's metadata; without any there, search is
    greedy for a prompt, and a beam search of 5 for a source. Only the new text is written. Without
    a beam search it streams to stdout, and a prompt that is typed is answered at once.

    The prompts of a file or pipe have one line each (with --num-return N: N lines); a line break
    inside an output is then written as a space, and counted. A prompt that is too long for the
    model is reported and left out: its output is blank. With --truncate it loses its beginning.

    Example: heedful generate runs/novel 'It was' --temperature 0.8 --top-p 0.95
    """
    if in_out.texts and whole_file:
        raise UserError(
            "--whole-file reads --input or stdin; leave out the prompt, or --whole-file"
        )
    if whole_file:
        chunks = iter([[lines.read_whole(in_out.input)]])
    else:
        chunks = in_out.chunks("type one prompt per line; Ctrl-D ends")
    generator = run_time.open(model, pipelines.Generator, "generate", many=in_out.input is not None)
    draft = options.get("draft")
    if draft not in (None, "lookup"):
        opened = pipelines.load(str(draft), device=run_time.device, backend="eager")
        options["draft"] = pipelines.expect(opened, pipelines.Generator, "--draft")
    too_long = in_out.too_long
    if whole_file and too_long == "leave_out":  # there is no other prompt to keep
        too_long = "error"
    options |= {"too_long": too_long, "batch_tokens": run_time.batch_tokens}
    _write(generator, chunks, options, json, in_out, whole_file)


def _write(
    model: "pipelines.Generator",
    chunks: Iterator[list[str]],
    options: dict[str, Any],
    json: bool,
    in_out: InputOutput,
    whole_file: bool,
) -> None:
    """Write the outputs of every prompt; samples of prompt i do not depend on other prompts."""
    options["explicit"] = frozenset(options)
    lines.note_unused(options, model.options(**options), model)
    seed = options.setdefault("seed", secrets.randbelow(2**31))
    settled = model.options(**options)
    number = 0
    keeps_breaks = whole_file or not in_out.is_piped
    with (
        lines.line_writer(in_out.output, keeps_breaks=keeps_breaks) as write,
        in_out.progress("generating") as progress,
    ):
        if in_out.output is None and not json and settled.beam_size == settled.num_return == 1:
            for number, prompt in enumerate(chain.from_iterable(chunks), 1):
                own = {"seed": [seed + (number - 1 << 32)], "first_number": number}
                for piece in model.stream(prompt, **options | own):
                    write.part(piece)
                write("")
        else:
            options |= {"scores": json, "progress": progress}
            chunks, again = tee(chunks)
            answers = model.iterate_generations(chunks, ahead=in_out.ahead, **options)
            pairs = zip(answers, chain.from_iterable(again), strict=False)
            for outputs, prompt in pairs:
                number += 1
                if json:
                    generations = [output.as_dict() for output in outputs]
                    write(lines.json_line(prompt=prompt, outputs=generations))
                else:
                    for output in outputs:
                        write(output.text)
                    for _ in range(settled.num_return - len(outputs)):
                        write("")
        if not number:
            raise UserError("no prompt: give TEXT, --input FILE, or lines on stdin")
        report_counts(model, "prompts", number)
