"""Accelerators: marks before the letter that selects an entry of a menu (~File, _File, &File)."""

import re
from bisect import bisect_right
from collections import Counter
from itertools import pairwise

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
    pieces = [*find_pieces(text, extra)]
    starts = [piece.start for piece in pieces]

    def is_inside(place: int) -> bool:
        """True for a place in a piece, which is the last one that begins before it."""
        index = bisect_right(starts, place)
        return index > 0 and place < pieces[index - 1].end

    return [mark for mark in found if not is_inside(mark.start())]


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
        ends = [*places[1:], len(target)]
        rest = (target[place + 1 : end] for place, end in pairwise(ends))
        return "".join([target[: ends[0]], *rest]), []
    bare = TAG.sub(lambda tag: " " * len(tag[0]), target)
    parts, end = [], 0
    for piece in find_pieces(target, extra):
        parts += [bare[end : piece.start], " " * (piece.end - piece.start)]
        end = piece.end
    bare = "".join([*parts, bare[end:]])
    letter = re.escape(source[mark.end()])
    match = re.search(rf"\b{letter}", bare, re.IGNORECASE) or re.search(r"[^\W\d_]", bare)
    if match is None:
        return target, [Reason("missing", {"pieces": mark[0]})]
    return target[: match.start()] + mark[0] + target[match.start() :], []
