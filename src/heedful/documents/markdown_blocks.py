"""Blocks of Markdown that its parser does not know: front matter, and indented blocks.

These are indented by four columns below a line: of an admonition or a tab (Python-Markdown), or,
behind a blank line, of a footnote or a definition. They hold Markdown. CommonMark reads them as
code, or as lines of a paragraph.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_END = r"(?:\r\n?|\n)"
LINE_END = re.compile(_END)
# YAML, and TOML (Hugo, Zola).
FRONT_MATTER = re.compile(
    rf"\A(?:---[ \t]*{_END}(?:.*?{_END})??(?:---|\.\.\.)"
    rf"|\+\+\+[ \t]*{_END}(?:.*?{_END})??\+\+\+)[ \t]*(?:{_END}|\Z)",
    re.DOTALL,
)
# An admonition has a type, a title in quotes, or both; a tab has a title.
HEAD = (
    r"(?:!!!|\?\?\?\+?)\s+(?:(?:[\w-]+\s+)*\".*\"|[\w-]+(?:\s+inline(?:\s+end)?)?)\s*\Z"
    r"|===[!+]?\s+\".*\"\s*\Z"
)
_HEAD = re.compile(HEAD)
_NOTE = re.compile(r"\[\^[^\[\]\s]+\]:|:[ \t]")
_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)\Z")
_INDENT = 4


class Block(NamedTuple):
    """Lines `start` to `stop` of a text, and these without the indentation of the block."""

    start: int
    stop: int
    lines: list[str]


def indented_blocks(lines: Sequence[str]) -> list[Block]:
    """The outermost blocks of a text, without blank lines at their ends."""
    depths = [_depth(line) for line in lines]
    blank_from = [len(lines)] * (len(lines) + 1)  # the first blank line from each line on
    for number in range(len(lines) - 1, -1, -1):
        blank_from[number] = number if depths[number] is None else blank_from[number + 1]
    blocks, number, fence = [], 0, ""
    while number < len(lines):
        text = lines[number].strip()
        if mark := _FENCE.match(text):
            if not fence:
                fence = mark[1]
            elif text.startswith(fence) and not mark[2].strip():
                fence = ""
        is_head = not fence and _HEAD.match(text) is not None
        if fence or not (is_head or _NOTE.match(text)):
            number += 1
            continue
        depth = (depths[number] or 0) + _INDENT
        start = stop = end = number + 1 if is_head else blank_from[number]
        while end < len(lines) and ((own := depths[end]) is None or own >= depth):
            end += 1
            stop = stop if own is None else end
        if stop > start:
            inner = [_without_indent(line, depth) for line in lines[start:stop]]
            blocks.append(Block(start, stop, inner))
        number = max(number + 1, stop if stop > start else 0)
    return blocks


def _without_indent(line: str, columns: int) -> str:
    """A line without its first columns of blanks."""
    text = line.lstrip(" \t")
    return line[: len(line) - len(text)].expandtabs(_INDENT)[columns:] + text


def _depth(line: str) -> int | None:
    """The columns of blanks before a text; None for a blank line."""
    text = line.lstrip(" \t")
    return len(line[: len(line) - len(text)].expandtabs(_INDENT)) if text.strip() else None
