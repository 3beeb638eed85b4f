"""`heedful score`: how likely given translations are."""

from pathlib import Path
from typing import Annotated

import typer


def score(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    src: Annotated[Path, typer.Option(help="Source lines.")],
    tgt: Annotated[Path, typer.Option(help="Target lines, as many.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: stdout.")
    ] = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Divide by the number of target tokens.")
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut lines that are too long.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Print the natural log-probability of each target line given its source line.

    Example: heedful score runs/translation --src test.en --tgt candidates.de
    """
    from heedful.bundle import load
    from heedful.cli.lines import line_writer, read_parallel

    sources, targets = read_parallel(src, tgt)
    translator = load(model, device=device)
    found = translator.score(sources, targets, too_long="truncate" if truncate else "error")
    with line_writer(output) as write:
        for pair in found:
            value = pair.log_prob / (pair.num_tokens if per_token else 1)
            write(f"{value:.6f}")
