"""What `--help` says of a verb: its docstring, whose lines end where the terminal's do."""

import inspect
from collections.abc import Callable
from typing import Any


def help_of(verb: Callable[..., Any]) -> str:
    """The paragraphs of a docstring, each as one line: the terminal breaks it where it must."""
    paragraphs = (inspect.getdoc(verb) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
