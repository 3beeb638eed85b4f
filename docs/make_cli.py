"""Writes docs/cli.md from the commands themselves: what `--help` says, as one page."""

import re
from pathlib import Path

from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

from heedful.cli.app import make_app

PAGE = Path(__file__).parent / "cli.md"
NOTE = "<!-- Written by `make docs` from the commands' own help. Do not edit. -->\n\n"


def render() -> str:
    """The page as it should be now."""
    command = get_command(make_app())
    for verb in command.commands.values():  # type: ignore[attr-defined]
        # Else each is cut after some words in the list of commands.
        verb.short_help = (verb.help or "").partition("\n\n")[0].replace("\n", " ")
    text = get_docs_for_click(obj=command, ctx=Context(command), name="heedful")
    text = re.sub(r"\n{3,}", "\n\n", text)
    return NOTE + "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")
