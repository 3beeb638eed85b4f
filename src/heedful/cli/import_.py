"""`heedful import`: models of other formats as models of heedful's."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.before import add_verb
from heedful.cli.flags import NewFolder, Overwrite
from heedful.cli.shared import note

app = typer.Typer(
    help="Make a heedful model of one in another format; no code of it is run.",
    no_args_is_help=True,
)


def hf(
    *,
    directory: Path = typer.Argument(
        ..., help="A local directory with config.json and model.safetensors."
    ),
    out: NewFolder,
    settings: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the model, e.g. head=classify or num_labels=3.",
    ),
    architecture: str | None = typer.Option(
        None, help="Build this one. Default: heedful's own of the directory's model type."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Import a model in the Hugging Face format: weights, tokenizers, labels and ids.

    Nothing is fetched and nothing is unpickled. What the directory lacks or has too much is said.

    Example: heedful import hf downloads/gpt2 gpt2
    """
    from heedful.export.hf import import_hf
    from heedful.recipe_files import read_setting

    keys = dict(read_setting(setting, "head=classify") for setting in settings or [])
    model = import_hf(
        directory, out, overwrite=overwrite, architecture=architecture, say=note, **keys
    )
    count = pipelines.parameter_count(model.net)
    typer.echo(f"{out}: a {model.kind}, {model.card.architecture} of {count:,} parameters")


add_verb(app, "hf", hf)
