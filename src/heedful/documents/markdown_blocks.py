"""Blocks of Markdown that its parser does not know: front matter, and indented blocks.

These are indented by four columns below a line: of an admonition or a tab (Python-Markdown), or,
behind a blank line, of a footnote or a definition. They hold Markdown. CommonMark reads them as
code, or as lines of a paragraph. Shortcodes of Hugo that hold code, or have several lines, are
blocks without Markdown.
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
_SHORTCODE = re.compile(
    r"\{\{[<%]\s*(/?)(highlight|code|code-toggle|mermaid)(?:\s[^{}]*)?[>%]\}\}\Z"
)
_OPEN_SHORTCODE = re.compile(r"\{\{[<%](?!.*\}\})")
_LONGEST = 100  # lines of a shortcode
_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)\Z")
_INDENT = 4


class Block(NamedTuple):
    """Lines `start` to `stop` of a text, and its Markdown: these without their indentation."""

    start: int
    stop: int
    lines: list[str]


def blocks_of_extensions(lines: Sequence[str]) -> list[Block]:
    """The outermost blocks of a text, without blank lines at their ends."""
    depths = [_depth(line) for line in lines]
    blank_from = [len(lines)] * (len(lines) + 1)  # the first blank line from each line on
    ends: dict[str, list[int]] = {}  # of shortcodes, the last one first
    for number in range(len(lines) - 1, -1, -1):
        blank_from[number] = number if depths[number] is None else blank_from[number + 1]
        if (found := _SHORTCODE.match(lines[number].strip())) and found[1]:
            ends.setdefault(found[2], []).append(number)
    blocks, number, fence = list[Block](), 0, ""
    while number < len(lines):
        text = lines[number].strip()
        block = None
        if mark := _FENCE.match(text):
            if not fence:
                fence = mark[1]
            elif text.startswith(fence) and not mark[2].strip():
                fence = ""
        if fence:
            pass
        elif _OPEN_SHORTCODE.match(text):
            stops = range(number + 1, min(blank_from[number], number + _LONGEST))
            stop = next((stop for stop in stops if "}}" in lines[stop]), None)
            block = None if stop is None else Block(number, stop + 1, [])
        elif (found := _SHORTCODE.match(text)) and not found[1]:
            behind = ends.get(found[2], [])
            while behind and behind[-1] < number:
                behind.pop()
            block = Block(number + 1, behind[-1], []) if behind else None
        elif _HEAD.match(text):
            block = _indented(lines, depths, number + 1, depths[number])
        elif _NOTE.match(text):
            block = _indented(lines, depths, blank_from[number], depths[number])
        if block is not None:
            blocks.append(block)
        number = number + 1 if block is None else block.stop
    return blocks


def _indented(
    lines: Sequence[str], depths: Sequence[int | None], start: int, outer: int | None
) -> Block | None:
    """The lines from `start` on that are indented, which may be none.

    Args:
        outer: the depth of the line that they belong to.
    """
    depth = (outer or 0) + _INDENT
    stop = end = start
    while end < len(lines) and ((own := depths[end]) is None or own >= depth):
        end += 1
        stop = stop if own is None else end
    inner = [_without_indent(line, depth) for line in lines[start:stop]]
    return Block(start, stop, inner) if inner else None


def _without_indent(line: str, columns: int) -> str:
    """A line without its first columns of blanks."""
    text = line.lstrip(" \t")
    return line[: len(line) - len(text)].expandtabs(_INDENT)[columns:] + text


def _depth(line: str) -> int | None:
    """The columns of blanks before a text; None for a blank line."""
    text = line.lstrip(" \t")
    return len(line[: len(line) - len(text)].expandtabs(_INDENT)) if text.strip() else None
