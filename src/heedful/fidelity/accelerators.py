"""Accelerators: marks before the letter that selects an entry of a menu (~File, _File, &File)."""

import re
from collections import Counter

from heedful.data.inline import TAG
from heedful.fidelity.pieces import find_pieces
from heedful.fidelity.reasons import Reason

# A `~` before a number means about, and between two numbers a range.
_MARKED = re.compile(r"(?<![\w~&])(?:~(?=[^\W\d])|[_&](?=\w))|(?<=[^\W_])~(?=[^\W\d])")


def _marks(text: str, extra: tuple[str, ...]) -> list[re.Match[str]]:
    """The marks of a text, but those in pieces, such as the path ~/notes."""
    found = [*_MARKED.finditer(text)]
    if not found:
        return []
    pieces = [(piece.start, piece.end) for piece in find_pieces(text, extra)]
    return [mark for mark in found if not any(start <= mark.start() < end for start, end in pieces)]


def with_accelerator(
    source: str, target: str, extra: tuple[str, ...] = ()
) -> tuple[str, list[str]]:
    """The target with one mark if the source has one, as it is if the source has none.

    A missing mark is put before the letter that it marks in the source, if a word of the target
    begins with that, or else before its first letter. Several marks of a source are a reason for a
    review where the target does not have them.

    Args:
        extra: as of `find_pieces`.
    """
    if not any(mark in source for mark in "~_&"):
        return target, []
    marks = _marks(source, extra)
    if not marks:
        return target, []
    found = _marks(target, extra)
    if len(marks) > 1:
        missing = Counter(mark[0] for mark in marks) - Counter(mark[0] for mark in found)
        pieces = ", ".join(missing.elements())
        return target, [Reason("missing", {"pieces": pieces})] if missing else []
    [mark] = marks
    places = [other.start() for other in found if other[0] == mark[0]]
    if places:
        for place in reversed(places[1:]):
            target = target[:place] + target[place + 1 :]
        return target, []
    bare = TAG.sub(lambda tag: " " * len(tag[0]), target)
    for piece in find_pieces(target, extra):
        bare = bare[: piece.start] + " " * (piece.end - piece.start) + bare[piece.end :]
    letter = re.escape(source[mark.end()])
    match = re.search(rf"\b{letter}", bare, re.IGNORECASE) or re.search(r"[^\W\d_]", bare)
    if match is None:
        return target, [Reason("missing", {"pieces": mark[0]})]
    return target[: match.start()] + mark[0] + target[match.start() :], []
