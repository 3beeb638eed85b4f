"""Writes docs/cli.md from the commands themselves: the text of every `--help`, as one page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer import Context
from typer.main import get_command

from heedful.cli.app import make_app
from heedful.cli.help import WIDTH, first_sentence

PAGE = Path(__file__).parent / "cli.md"
SETTINGS: dict[str, Any] = {"max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
NOTE = "<!-- Written by `make docs` from the commands' own help. Do not edit. -->\n\n"


def render() -> str:
    """The current page."""
    root: Any = get_command(make_app())
    context = Context(root, info_name="heedful", **SETTINGS)
    parts = ["# The command line", f"```\n{root.get_help(context)}\n```"]
    for name, command in _commands(root):
        parts.append(f"## heedful {name}\n\n{first_sentence(command.help)}")
        inner = Context(command, context, info_name=name, **SETTINGS)
        parts.append(f"```\n{command.get_help(inner)}\n```")
    text = "\n\n".join(parts)
    return NOTE + "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Commands with their names, those of nested groups included."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        yield f"{prefix}{name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")
