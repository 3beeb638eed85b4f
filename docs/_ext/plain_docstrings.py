"""Docstrings are plain text with backticks; this makes reStructuredText of them.

A backtick pair is code, and the characters `|`, `*` and a trailing `_` mean themselves.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_CODE = re.compile(r"`+([^`]+)`+")


def _convert(line: str) -> str:
    """A line of a docstring outside of examples; a bullet stays one."""
    found = re.match(r"\s*\* ", line)
    bullet = found.group() if found else ""
    line = line.removeprefix(bullet)
    parts = _CODE.split(line)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{part}``"
        else:
            parts[index] = re.sub(r"([|*\\])|_(?=\W|$)", lambda m: "\\" + m.group(), part)
    return bullet + "".join(parts)


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    is_example = False
    for index, line in enumerate(lines):
        is_example = line.lstrip().startswith(">>>") or (is_example and bool(line.strip()))
        if not is_example and not re.match(r"\s*:\w+[^:]*:", line) and "::" not in line:
            lines[index] = _convert(line)


def setup(app: Sphinx) -> dict[str, bool]:
    """Convert each docstring before napoleon reads it."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
