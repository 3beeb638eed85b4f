"""The `heedful` command: its commands, in groups."""

from collections.abc import Mapping, Sequence
from importlib import import_module

import typer

from heedful import __version__
from heedful.cli.guard import Debug, add_command, show_tracebacks
from heedful.cli.help import new_group

GROUPS: Mapping[str, Sequence[str]] = {
    "Train": (
        "demo",
        "train",
        "distill",
        "adapt",
        "back-translate",
        "average",
        "prepare",
        "plan",
        "tokenizer",
    ),
    "Run a model": (
        "translate",
        "generate",
        "chat",
        "fill",
        "classify",
        "embed",
        "bulk",
        "serve",
    ),
    "Evaluate": ("evaluate", "score", "verify", "inspect", "report", "compare"),
    "Convert and speed up": ("optimize", "merge", "import", "export"),
    "List": ("list", "info", "recipes", "cache"),
}
COMMANDS = {name: title for title, names in GROUPS.items() for name in names}
_MODULES = {"import": "import_", "inspect": "inspect_", "list": "list_"}  # names of Python


def make_app(names: Sequence[str] = ()) -> typer.Typer:
    """The command with the named commands, or with all of them, which takes longer to build.

    With all of them there are also the flags that install completion in a shell.
    """
    app = new_group(
        "Train, search, evaluate and inspect Transformers, from raw text on one machine.",
        epilog="Start with: heedful demo   (then: heedful list recipes)",
        add_completion=not names,
        callback=_root,
    )
    for name in names or COMMANDS:
        attribute = _MODULES.get(name, name).replace("-", "_")
        module = import_module(f"heedful.cli.{attribute}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, rich_help_panel=COMMANDS[name])
        else:
            add_command(app, name, getattr(module, attribute), COMMANDS[name])
    return app


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
    debug: Debug = False,
) -> None:
    """Options of the command itself."""
    if debug:
        show_tracebacks()
