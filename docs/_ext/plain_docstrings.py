"""Docstrings are plain text with backticks; this makes reStructuredText of them.

A backtick pair is code, and the characters `|`, `*` and a trailing `_` mean themselves.
"""

import re
from collections.abc import Collection
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


def _linked(line: str, module: str, names: Collection[str]) -> str:
    """Names of a module in its docstring, which says what each is, lead to their descriptions."""

    def link(match: re.Match[str]) -> str:
        found = match[1] in names
        return f":py:obj:`{match[1]} <{module}.{match[1]}>`" if found else match[0]

    return re.sub(r"``(\w+)``", link, line)


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    names = getattr(obj, "__all__", ()) if what == "module" else ()
    is_example = False
    for index, line in enumerate(lines):
        is_example = line.lstrip().startswith(">>>") or (is_example and bool(line.strip()))
        if not is_example and not re.match(r"\s*:\w+[^:]*:", line) and "::" not in line:
            lines[index] = _linked(_convert(line), name, names)


def _sign(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: Any
) -> tuple[str | None, Any]:
    """Leave the checks of pydantic out of a signature: `Annotated[int, Ge(ge=1)]` is `int`.

    A default that is no literal, as `<factory>`, is `...`: Sphinx cannot read it.
    """
    while signature and (found := re.search(r"Annotated\[", signature)):
        depth, commas, end = 1, [], found.end()
        while depth:
            depth += {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}.get(signature[end], 0)
            if depth == 1 and signature[end] == ",":
                commas.append(end)
            end += 1
        before = re.sub(r"~?(?:[a-z]+\.)?$", "", signature[: found.start()])
        signature = before + signature[found.end() : commas[0]] + signature[end:]
    return signature and re.sub(r"<[^<>]+>", "...", signature), result


def setup(app: Sphinx) -> dict[str, bool]:
    """Convert each docstring before napoleon reads it."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("autodoc-process-signature", _sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
