"""`heedful translate`: lines in, translations out, in their order."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer


def translate(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="Lines to translate. Default: stdin.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: stdout.")
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy.")] = 5,
    nbest: Annotated[int, typer.Option(min=1, help="Translations for each line.")] = 1,
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the score and a tab before each.")
    ] = False,
    length_penalty: Annotated[float, typer.Option(help="Exponent of the length.")] = 1.0,
    normalization: Annotated[
        str, typer.Option(help="Of scores by length: average, gnmt or none.")
    ] = "average",
    stop: Annotated[
        str, typer.Option(help="Stop rule: optimal, beam_full or heuristic.")
    ] = "optimal",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest output. Default: from the training data.")
    ] = None,
    no_repeat: Annotated[int, typer.Option(min=0, help="No n-gram of this size twice.")] = 0,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut lines that are too long, and count them.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Translate lines from a file or a pipe.

    One line out for each line in (with --nbest N: N lines each, best first). Output streams: a
    line that is typed is answered at once.

    Example: echo 'Hello.' | heedful translate runs/translation
    """
    from heedful.cli.lines import input_chunks, line_writer, progress_bar
    from heedful.inference import load

    chunks = input_chunks(input)  # a missing file is told before a model is loaded
    translator = load(model, device=device)
    cut = 0
    bar = progress_bar("translating") if output else nullcontext(lambda count: None)
    with line_writer(output) as write, bar as progress:
        first = 1
        for chunk in chunks:
            found = translator.search(
                chunk,
                beam_size=max(beam, nbest),
                num_return=nbest,
                length_penalty=length_penalty,
                normalization=normalization,
                stop=stop,
                max_new_tokens=max_tokens,
                no_repeat_ngram_size=no_repeat,
                too_long="truncate" if truncate else "error",
                first_number=first,
                progress=progress,
            )
            first += len(chunk)
            for translations in found:
                cut += not translations[0].finished
                missing = [None] * (nbest - len(translations))
                for entry in [*translations, *missing]:
                    text = "" if entry is None else entry.text
                    score = -math.inf if entry is None else entry.score
                    write(f"{score:.6f}\t{text}" if scores else text)
    if translator.num_truncated:
        typer.echo(f"{translator.num_truncated} lines were truncated", err=True)
    if cut:
        typer.echo(f"{cut} translations were cut off by the length limit", err=True)
