"""`heedful import`: models of other formats as models of heedful's."""

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.help import help_of

app = typer.Typer(
    help="Make a heedful model of one in another format; no code of it is run.",
    no_args_is_help=True,
)


@app.callback()
def _formats() -> None:
    """Keep the format's name a command of its own, though there is but one."""


def hf(
    directory: Annotated[
        Path, typer.Argument(help="A local directory with config.json and model.safetensors.")
    ],
    out: Annotated[Path, typer.Argument(help="The new model directory.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the model, e.g. head=classify or num_labels=3.",
        ),
    ] = None,
) -> None:
    """Import a model in the Hugging Face format: weights, tokenizers, labels and ids.

    Nothing is fetched and nothing is unpickled. What the directory lacks or has too much is said.

    Example: heedful import hf downloads/gpt2 gpt2
    """
    from heedful.export.hf import import_hf
    from heedful.inference import parameter_count

    model = import_hf(
        directory,
        out,
        say=lambda notice: typer.echo(f"note: {notice}", err=True),
        **_keys(settings or []),
    )
    count = parameter_count(model.net)
    typer.echo(f"{out}: a {model.kind}, {model.card.architecture} of {count:,} parameters")


app.command("hf", help=help_of(hf))(hf)


def _keys(settings: list[str]) -> dict[str, object]:
    import yaml

    from heedful.errors import UserError

    keys: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--set {setting}: write key=value, for example head=classify")
        try:
            keys[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
            keys[key] = text
    return keys
