"""`heedful import`: models of other formats as models of heedful's."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import NewFolder, Overwrite
from heedful.cli.guard import add_command
from heedful.cli.help import new_group
from heedful.cli.shared import note

app = new_group("Convert a model in another format to heedful's; no code of it is run.")


def hf(
    *,
    directory: Path = typer.Argument(
        ..., metavar="DIR", help="Local directory with config.json and model.safetensors."
    ),
    out: NewFolder,
    settings: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the model, e.g. head=classify or num_labels=3; repeatable.",
    ),
    architecture: str | None = typer.Option(
        None, metavar="NAME", help="Architecture to build.", show_default="by the model type"
    ),
    overwrite: Overwrite = False,
) -> None:
    """Import a model in the Hugging Face format: weights, tokenizers, labels and ids.

    Nothing is downloaded and nothing is unpickled. Missing and unused tensors are reported.

    Example: heedful import hf downloads/gpt2 gpt2
    """
    from heedful.export.hf import import_hf
    from heedful.recipe_files import read_settings

    keys = read_settings(settings or (), "head=classify")
    model = import_hf(
        directory, out, overwrite=overwrite, architecture=architecture, on_notice=note, **keys
    )
    count = pipelines.parameter_count(model.net)
    typer.echo(f"{out}: a {model.kind}, {model.metadata.architecture} of {count:,} parameters")


def peft(
    *,
    directory: Path = typer.Argument(
        ..., metavar="DIR", help="Local directory with adapter_config.json and its weights."
    ),
    out: NewFolder,
    base: Path = typer.Option(
        ..., metavar="MODEL", help="Model directory that the adapter was trained on."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Import an adapter of peft (LoRA), as a model directory that refers to its base model.

    Example: heedful import peft downloads/adapter adapted --base gpt2
    """
    from heedful.export.peft import import_peft

    model = import_peft(directory, out, base=base, overwrite=overwrite, say=note)
    typer.echo(f"{out}: a {model.kind} that refers to {base}")


add_command(app, "hf", hf)
add_command(app, "peft", peft)
