"""`heedful embed`: a vector for each text."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli import lines
from heedful.cli.flags import (
    ModelFolder,
    NormalizeOption,
    PoolingOption,
    PromptNameOption,
    PromptOption,
    RunTime,
    leave_out,
)
from heedful.cli.help import IN_OUT
from heedful.cli.lines import InputOutput, report_counts
from heedful.errors import UserError


@leave_out("output")
def embed(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Write to this .npy or .jsonl file.",
        show_default="JSON lines on stdout",
        rich_help_panel=IN_OUT,
    ),
    pooling: PoolingOption = None,
    normalize: NormalizeOption = None,
    prompt: PromptOption = None,
    prompt_name: PromptNameOption = None,
    run_time: RunTime,
) -> None:
    """Print a vector for each text, from the states of the model's last layer.

    An .npy file holds one array (texts, d_model) of float32; otherwise one line of JSON per text.
    A text that is too long for the model is reported and left out: its vector is zeros in the
    array, and null in JSON.

    Example: heedful embed runs/encoder --input texts.txt --output vectors.npy
    """
    suffix = "" if output is None else output.suffix.lower()
    as_array = suffix == ".npy"
    if output is not None and suffix not in (".npy", ".jsonl"):
        raise UserError(f"--output {output}: the file's name must end in .npy or .jsonl")
    chunks = in_out.chunks()
    many = in_out.input is not None
    opened: Any = run_time.open(model, pipelines.SavedModel, "embed", many=many)
    options: dict[str, Any] = {
        "pooling": pooling,
        "normalize": normalize,
        "prompt": prompt,
        "prompt_name": prompt_name,
        "too_long": in_out.too_long,
        "batch_tokens": run_time.batch_tokens,
    }
    bar = lines.progress_bar("embedding", shown=output is not None)
    parts, number = [], 0
    with nullcontext(print) if as_array else lines.line_writer(output) as write, bar as progress:
        for chunk in chunks:
            vectors = opened.vectors(chunk, first_number=number + 1, **options)
            number += len(chunk)
            progress(len(chunk))
            if as_array:
                parts.append(vectors)
                continue
            for text, vector in zip(chunk, vectors, strict=True):
                write(lines.json_line(text=text, vector=vector.tolist() if vector.any() else None))
        report_counts(opened, "texts", number)
    if as_array:
        import numpy as np

        from heedful.files import atomic_open

        assert output is not None
        empty = np.zeros((0, opened.config.d_model), np.float32)
        with atomic_open(output) as file:
            np.save(file, np.concatenate([empty, *parts]))
