"""The `heedful` command: its verbs."""

from importlib import import_module

import typer

from heedful import __version__
from heedful.cli import import_, recipes
from heedful.cli.before import looked_at
from heedful.cli.shared import help_of

app = typer.Typer(
    name="heedful",
    help="Train, search, evaluate and look into Transformers, from raw text on one machine.",
    epilog="Start with: heedful demo   (then: heedful recipes ls)",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MAKING = ("demo", "train", "distill")
USING = ("translate", "generate", "fill", "classify", "embed")
JUDGING = ("evaluate", "score", "average", "optimize", "verify", "info", "export")
for verb in (*MAKING, *USING, *JUDGING):
    function = getattr(import_module(f"heedful.cli.{verb}"), verb)
    app.command(verb, help=help_of(function))(looked_at(function))
app.add_typer(import_.app, name="import")
app.add_typer(recipes.app, name="recipes")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Options of the command itself."""
