"""The `heedful` command: its verbs."""

from collections.abc import Sequence
from importlib import import_module

import typer

from heedful import __version__
from heedful.cli.before import add_verb

MAKING = ("demo", "train", "distill")
USING = ("translate", "generate", "fill", "classify", "embed")
JUDGING = ("evaluate", "score", "average", "optimize", "verify", "info", "export")
# Verbs of verbs, and their modules.
GROUPS = {"import": "import_", "recipes": "recipes", "cache": "cache"}
VERBS = (*MAKING, *USING, *JUDGING, *GROUPS)


def make_app(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """The command with some of its verbs: to read the flags of all takes longer than a sentence."""
    app = typer.Typer(
        name="heedful",
        help="Train, search, evaluate and look into Transformers, from raw text on one machine.",
        epilog="Start with: heedful demo   (then: heedful recipes ls)",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_root,
    )
    for verb in verbs:
        module = import_module(f"heedful.cli.{GROUPS.get(verb, verb)}")
        if verb in GROUPS:
            app.add_typer(module.app, name=verb)
        else:
            add_verb(app, verb, getattr(module, verb))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Options of the command itself."""
