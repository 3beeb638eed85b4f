"""`heedful export`: a model in a format that other programs open."""

from typing import Literal

import typer

from heedful import pipelines
from heedful.cli.flags import ModelFolder, NewFolder, Overwrite
from heedful.cli.shared import note


def export(
    model: ModelFolder,
    out: NewFolder,
    to: Literal["hf", "ctranslate2"] = typer.Option(
        ..., help="hf: what transformers opens; ctranslate2: what that backend opens."
    ),
    precision: str = typer.Option(
        "float32",
        help="Of the weights: float32, bfloat16, float16 (hf) or int8 (ctranslate2).",
    ),
    overwrite: Overwrite = False,
) -> None:
    """Write a model with its tokenizers for other programs.

    For transformers: the directory opens with AutoTokenizer and the Auto class of the model's kind,
    and needs no code of ours.

    For CTranslate2 (heedful's extra `fast`): a directory with its tokenizers and example.py,
    which shows its use without torch. A model that CTranslate2 cannot run is refused with every
    reason.

    Example: heedful export runs/novel --to hf novel-hf
    """
    from heedful.export import ctranslate2, hf
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    (hf if to == "hf" else ctranslate2).check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    if to == "hf":
        hf.export_hf(opened, out, precision=precision, overwrite=overwrite, say=note)
        typer.echo(f"{out}: a {opened.kind} in the Hugging Face format")
        return
    ctranslate2.export_ctranslate2(opened, out, precision=precision, overwrite=overwrite)
    typer.echo(f"{out}: a {opened.kind} for CTranslate2; see {out / 'example.py'}")
