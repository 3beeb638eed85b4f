"""`heedful generate`: texts that a model goes on with, streamed as they are written."""

import json as json_format
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from heedful.inference import GenerationOptions, Writer


def generate(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A text to go on with; repeatable.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="A prompt a line. Default: stdin.")
    ] = None,
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Take all of the input as one prompt.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: stdout.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most new tokens. Default: 64, or what a source's length allows."),
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Fewest new tokens.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="Draw tokens; below 1 closer to the likeliest. 0: greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest that make up this share.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from those at least this share of the likeliest.")
    ] = None,
    typical: Annotated[
        float | None, typer.Option(help="Draw from the typical ones that make up this share.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of drawing; else another each time.")] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam size; 1 is no beam search.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of beam search: the exponent.")] = 1.0,
    groups: Annotated[int, typer.Option(min=1, help="Of diverse beam search.")] = 1,
    diversity_penalty: Annotated[float, typer.Option(help="Of diverse beam search.")] = 0.0,
    nbest: Annotated[int, typer.Option(min=1, help="Outputs for each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the output before this text; repeatable.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divide the scores of tokens that were there; 1: none.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtract this from tokens that were there.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Subtract this for each time that a token was there.")
    ] = None,
    no_repeat: Annotated[int, typer.Option(min=0, help="No n-gram of this size twice.")] = 0,
    ban: Annotated[
        list[str] | None, typer.Option(help="A text that may not be written; repeatable.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|lookup",
            help="Write the same faster: a small model with the same vocabulary, or lookup.",
        ),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="How many it proposes at a time.")] = 4,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut sources that are too long.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each prompt.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Go on with prompts, or answer sources with a model of two stacks, as it is written.

    Without sampling options the likeliest token is taken each time. Only what is new is written;
    to stdout it streams, and a prompt that is typed is answered at once.

    Example: heedful generate runs/novel --prompt 'It was' --temperature 0.8 --top-p 0.95
    """
    from heedful.errors import UserError
    from heedful.inference import GenerationOptions, LanguageModel, Translator, expect, load

    if prompt and input is not None:
        raise UserError("give --prompt or --input, not both")
    chunks = _prompts(prompt, input, whole_file)  # a missing file is told before a model is loaded
    writer = load(model, device=device)
    if not isinstance(writer, Translator):
        expect(writer, LanguageModel, "generate")
    sampled = any(option is not None for option in (temperature, top_k, top_p, min_p, typical))
    helper: Any = draft
    if draft not in (None, "lookup"):
        helper = load(str(draft), device=device)
        if not isinstance(helper, Translator):
            expect(helper, LanguageModel, "--draft")
    options = GenerationOptions(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        beam_size=beam if sampled else max(beam, nbest),
        length_penalty=length_penalty,
        num_groups=groups,
        diversity_penalty=diversity_penalty,
        num_return=nbest,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram_size=no_repeat,
        banned=ban or (),
        stop=stop or (),
        draft=helper,
        num_draft_tokens=draft_tokens,
        too_long="truncate" if truncate else "error",
    )
    _write(
        writer, chunks, options, secrets.randbelow(2**31) if seed is None else seed, output, json
    )
    if writer.num_truncated:
        typer.echo(f"{writer.num_truncated} sources were truncated", err=True)


def _write(
    model: "Writer",
    chunks: Iterator[list[str]],
    options: "GenerationOptions",
    seed: int,
    output: Path | None,
    json: bool,
) -> None:
    """Every prompt's outputs. Prompt number i draws alike, whatever it comes with."""
    from heedful.cli.lines import line_writer, piece_writer, progress_bar
    from heedful.errors import UserError

    streams = output is None and not json and options.beam_size == options.num_return == 1
    bar = nullcontext(lambda count: None) if output is None else progress_bar("generating")
    number = 0
    with line_writer(output) as write, bar as progress:
        for chunk in chunks:
            given = _given(options, progress)
            seeds = [seed + (place << 32) for place in range(number, number + len(chunk))]
            number += len(chunk)
            if streams:
                for prompt, own in zip(chunk, seeds, strict=True):
                    for piece in model.stream(prompt, **given, seed=[own]):
                        piece_writer(piece)
                    write("")
                continue
            for prompt, outputs in zip(
                chunk, model.generations(chunk, **given, seed=seeds), strict=True
            ):
                if json:
                    content = {"prompt": prompt, "outputs": [asdict(each) for each in outputs]}
                    write(json_format.dumps(content, ensure_ascii=False))
                else:
                    for each in outputs:
                        write(each.text)
    if not number:
        raise UserError("there is no prompt: give --prompt TEXT, --input FILE, or lines on stdin")


def _given(options: "GenerationOptions", progress: Callable[[int], None]) -> dict[str, Any]:
    """The options by keyword; a model among them is not copied, as `asdict` would do."""
    from dataclasses import fields

    content = {field.name: getattr(options, field.name) for field in fields(options)}
    del content["seed"]
    return {**content, "progress": progress}


def _prompts(given: list[str] | None, path: Path | None, whole_file: bool) -> Iterator[list[str]]:
    from heedful.cli.lines import input_chunks, read_whole

    if given:
        return iter([given])
    if whole_file:
        return iter([[read_whole(path)]])
    if path is None and sys.stdin.isatty():
        typer.echo("type a prompt a line; Ctrl-D ends", err=True)
    return input_chunks(path)
