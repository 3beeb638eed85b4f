"""`heedful merge`: a whole model of one that refers to a base."""

import typer

from heedful import pipelines
from heedful.cli.flags import ModelFolder, NewFolder, Overwrite
from heedful.errors import UserError


def merge(model: ModelFolder, out: NewFolder, overwrite: Overwrite = False) -> None:
    """Merge an adapter (LoRA), or other trained weights, with the base model into a whole model.

    The new directory needs neither adapter nor base. The others are not changed.

    Example: heedful merge runs/adapted adapted
    """
    from heedful.files import MODEL_FILES, check_new, read_object, write_directory
    from heedful.pipelines.base import CONFIG

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    opened = pipelines.load(model, device="cpu", backend="eager")
    if "base" not in read_object(model / CONFIG):
        raise UserError(f"{model} has no base: it is a whole model already")
    write_directory(out, opened.file_writer(out))
    count = pipelines.parameter_count(opened.net)
    typer.echo(f"{out}: a {opened.kind} of {count:,} parameters")
