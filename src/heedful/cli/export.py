"""`heedful export`: a model in a format that other programs open."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.shared import ModelFolder, note


class Format(StrEnum):
    """What a model can be written as."""

    hf = "hf"


def export(
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(help="The new directory.")],
    to: Annotated[Format, typer.Option(help="The format; hf: what transformers opens.")],
) -> None:
    """Write a model with its tokenizers for other programs.

    For transformers: the directory opens with AutoTokenizer and the Auto class of the model's kind,
    and needs no code of ours.

    Example: heedful export runs/novel --to hf novel-hf
    """
    from heedful.export.hf import export_hf
    from heedful.inference import load

    assert to is Format.hf
    opened = load(model, device="cpu")
    export_hf(opened, out, say=note)
    typer.echo(f"{out}: a {opened.kind} in the Hugging Face format")
