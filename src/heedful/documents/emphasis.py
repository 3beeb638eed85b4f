"""Emphasis of Markdown in a translation, whose marks are not recognized beside any character.

Source: CommonMark, section 6.2 ("left-flanking delimiter run").
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from heedful.data.inline import InlinePiece

_ELEMENTS = {
    "*": ("<em>", "</em>"),
    "_": ("<em>", "</em>"),
    "**": ("<strong>", "</strong>"),
    "__": ("<strong>", "</strong>"),
    "***": ("<em><strong>", "</strong></em>"),
    "___": ("<em><strong>", "</strong></em>"),
    "~~": ("<del>", "</del>"),
}
MARKS = frozenset(_ELEMENTS)
_MOST_TOGETHER = 32  # pairs, of which each is tried as marks


def with_emphasis(pieces: Sequence[InlinePiece], before: str, behind: str) -> list[str]:
    """The texts of pieces, with other marks or tags of HTML for marks that would be read otherwise.

    Within a word, such as one of a language without blanks, `*` is read and `_` is not; neither is
    between a letter and a sign, and marks that touch may be read together.

    Args:
        before, behind: the marks around the pieces, with another character each; "" at the edge of
            the file.
    """
    outer = _outer_marks(before, behind)
    size = sum(map(len, outer))
    whole = [
        InlinePiece("text", before[: len(before) - size]),
        *(InlinePiece("open", mark, mark) for mark in outer),
        *pieces,
        *(InlinePiece("close", mark, mark) for mark in reversed(outer)),
        InlinePiece("text", behind[size:]),
    ]
    raws = [piece.raw for piece in whole]
    outside = len(outer) + 1  # pieces on each side that are not changed
    for start, end, pairs in _groups(raws, sorted(_pairs(whole))):
        inner = [(first - start, last - start) for first, last in pairs if first >= outside]
        fixed = [(first - start, last - start) for first, last in pairs if first < outside]
        raws[start:end] = _rewritten(raws[start:end], sorted(inner, key=itemgetter(1)), fixed)
    return raws[outside : len(raws) - outside]


def _groups(
    raws: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The pairs that touch or are in each other, with the range of their pieces.

    The range has the text around them too. Text is between the groups, so that the marks of one do
    not change how those of another are read.
    """
    groups: list[list[tuple[int, int]]] = []
    end = before = 0
    for first, last in pairs:
        if not groups or any(raws[end + 1 : first]):
            groups.append([])
        groups[-1].append((first, last))
        end = max(end, last)
    for index, group in enumerate(groups):
        behind = groups[index + 1][0][0] if index + 1 < len(groups) else len(raws)
        yield before, behind, group
        before = max(last for _, last in group) + 1


def _rewritten(
    raws: list[str], inner: Sequence[tuple[int, int]], fixed: Sequence[tuple[int, int]]
) -> list[str]:
    """The pieces of a group with other marks or tags for the inner pairs, if need be.

    Of very many that touch or are in each other, each would be read once for every other: all are
    tags then.
    """
    pairs = [*inner, *fixed]
    if _is_read(raws, pairs):
        return raws
    marks = [raws[first] for first, _ in inner]
    for mark, (first, last) in zip(marks, inner, strict=True):
        raws[first], raws[last] = _ELEMENTS[mark]
    if len(inner) > _MOST_TOGETHER:
        return raws
    for mark, (first, last) in zip(marks, inner, strict=True):
        for form in dict.fromkeys((mark, mark.replace("_", "*"), mark.replace("*", "_"))):
            raws[first] = raws[last] = form
            if _is_read(raws, pairs):
                break
        else:
            raws[first], raws[last] = _ELEMENTS[mark]
    return raws


def _outer_marks(before: str, behind: str) -> list[str]:
    """The marks of pairs around a text, from outside; empty if others are before than behind."""
    opened = [match[0] for match in re.finditer(r"([*_~])\1*", before)]
    closed = [match[0] for match in re.finditer(r"([*_~])\1*", behind)]
    return opened if opened == closed[::-1] and MARKS.issuperset(opened) else []


def _pairs(pieces: Sequence[InlinePiece]) -> Iterator[tuple[int, int]]:
    """The indices of the marks of each pair."""
    opened: dict[str, list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.raw not in MARKS or piece.pair != piece.raw:
            continue
        if piece.kind == "open":
            opened.setdefault(piece.raw, []).append(index)
        elif piece.kind == "close" and opened.get(piece.raw):
            yield opened[piece.raw].pop(), index


def _is_read(raws: Sequence[str], pairs: Sequence[tuple[int, int]]) -> bool:
    """True if a parser reads each pair that is written as marks, and no other emphasis.

    Of the characters around the marks only the classes matter. Symbols are signs since version 0.31
    of CommonMark, and were letters before: the pairs are read in both cases.
    """
    elements = {
        index: _ELEMENTS[raws[index]][side]
        for pair in pairs
        for side, index in enumerate(pair)
        if raws[index] in MARKS
    }
    if not elements:
        return True
    for symbol in ".a":
        written = meant = ""
        for index, raw in enumerate(raws):
            written += raw if index in elements else _classes(raw, symbol)
            meant += elements.get(index, _classes(raw, symbol))
        if _parser()(written).strip() != meant.strip():
            return False
    return True


def _classes(text: str, symbol: str) -> str:
    """A text with a blank, a letter or a sign that has no meaning in place of each character."""

    def class_of(character: str) -> str:
        category = unicodedata.category(character)[0]
        if character.isspace():
            return " "
        return {"P": ".", "S": "." if character.isascii() else symbol}.get(category, "a")

    return "".join(map(class_of, text))


@functools.cache
def _parser() -> Callable[[str], str]:
    """A function from inline Markdown to HTML."""
    from markdown_it import MarkdownIt

    render = MarkdownIt("commonmark").enable("strikethrough").renderInline
    return lambda text: str(render(text)).replace("<s>", "<del>").replace("</s>", "</del>")
