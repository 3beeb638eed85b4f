"""`heedful export`: a model in a format that other programs open."""

import typer

from heedful import pipelines
from heedful.cli.flags import ModelFolder, NewFolder, Overwrite
from heedful.cli.help import new_group
from heedful.cli.preflight import add_command
from heedful.cli.shared import note

app = new_group("Convert a model to a format that other programs open.")


def hf(
    model: ModelFolder,
    out: NewFolder,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the weights: float32, bfloat16 or float16."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a model in the Hugging Face format, with its tokenizers.

    The directory opens with AutoTokenizer and the Auto class of the model's kind, without heedful.

    Example: heedful export hf runs/novel novel-hf
    """
    from heedful.export import hf
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    hf.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    hf.export_hf(opened, out, precision=precision, overwrite=overwrite, on_notice=note)
    typer.echo(f"{out}: a {opened.kind} in the Hugging Face format")


def ctranslate2(
    model: ModelFolder,
    out: NewFolder,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the weights: float32, bfloat16 or int8."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a model for CTranslate2 (heedful's extra `fast`), with its tokenizers.

    example.py in the directory shows its use without torch. A model that CTranslate2 does not
    support is refused with every reason.

    Example: heedful export ctranslate2 runs/translation translation-ct2
    """
    from heedful.export import ctranslate2
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    ctranslate2.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    ctranslate2.export_ctranslate2(opened, out, precision=precision, overwrite=overwrite)
    typer.echo(f"{out}: a {opened.kind} for CTranslate2; see {out / 'example.py'}")


def peft(model: ModelFolder, out: NewFolder, overwrite: Overwrite = False) -> None:
    """Export the adapter (LoRA) of a model for peft, without its base model.

    peft opens it beside the base model in the Hugging Face format (heedful export hf BASE).

    Example: heedful export peft runs/adapted adapter
    """
    from heedful.export.peft import export_peft

    export_peft(model, out, overwrite=overwrite)
    typer.echo(f"{out}: an adapter for peft")


add_command(app, "hf", hf)
add_command(app, "peft", peft)
add_command(app, "ctranslate2", ctranslate2)
