"""`heedful embed`: a vector for each text."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli import lines
from heedful.cli.flags import spread
from heedful.cli.lines import Filter, tell_counts
from heedful.errors import UserError


@spread("output", "strict")
def embed(
    *,
    model: Path = typer.Argument(..., help="A model directory, of any kind."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="A file .npy or .jsonl. Default: JSONL on stdout."
    ),
    pooling: str = typer.Option("mean", help="Of the tokens' states: mean, first or last."),
    given: Filter,
) -> None:
    """Turn each line into a vector, from the states of the model's last layer.

    A file .npy holds one array (texts, width) of 32-bit floats; JSONL has a line for each text.

    Example: heedful embed runs/encoder --input texts.txt --output vectors.npy
    """
    as_array = output is not None and output.suffix == ".npy"
    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise UserError(f"--output {output}: the file's name must end in .npy or .jsonl")
    chunks = lines.input_chunks(given.input)
    opened: Any = given.open(model, pipelines.SavedModel, "embed")
    too_long = "truncate" if given.truncate else "error"
    bar = lines.progress_bar("embedding", shown=output is not None)
    parts = []
    with nullcontext(print) if as_array else lines.line_writer(output) as write, bar as progress:
        for chunk in chunks:
            vectors = opened.vectors(chunk, pooling=pooling, too_long=too_long)
            progress(len(chunk))
            if as_array:
                parts.append(vectors)
                continue
            for text, vector in zip(chunk, vectors.tolist(), strict=True):
                write(lines.json_line(text=text, vector=vector))
    if as_array:
        import numpy as np

        from heedful.files import replacing

        assert output is not None
        empty = np.zeros((0, opened.config.d_model), np.float32)
        with replacing(output) as file:
            np.save(file, np.concatenate([empty, *parts]))
    tell_counts(opened, "texts")
