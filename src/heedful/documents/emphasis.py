"""Emphasis of Markdown in a translation, whose marks are not recognized beside any character.

Source: CommonMark, section 6.2 ("left-flanking delimiter run").
"""

import unicodedata
from collections.abc import Iterator, Sequence

from heedful.data.inline import InlinePiece

_ELEMENTS = {
    "*": ("<em>", "</em>"),
    "_": ("<em>", "</em>"),
    "**": ("<strong>", "</strong>"),
    "__": ("<strong>", "</strong>"),
    "***": ("<strong><em>", "</em></strong>"),
    "___": ("<strong><em>", "</em></strong>"),
    "~~": ("<del>", "</del>"),
}
MARKS = frozenset(_ELEMENTS)


def with_emphasis(pieces: Sequence[InlinePiece], before: str, behind: str) -> list[str]:
    """The texts of pieces, with tags of HTML in place of marks that would be read as text.

    Within a word, such as one of a language without blanks, `*` is read and `_` is not; neither is
    between a letter and a sign.

    Args:
        before, behind: the characters around the pieces; "" at the edge of the file.
    """
    raws = [piece.raw for piece in pieces]
    kinds = [piece.kind for piece in pieces]
    for first, last in _pairs(pieces):
        mark = raws[first]
        for form in dict.fromkeys((mark, mark.replace("_", "*"))):
            raws[first] = raws[last] = form
            if _is_read(raws, kinds, first, before, behind) and _is_read(
                raws, kinds, last, before, behind
            ):
                break
        else:
            raws[first], raws[last] = _ELEMENTS[mark]
    return raws


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


def _is_read(
    raws: Sequence[str], kinds: Sequence[str], index: int, before: str, behind: str
) -> bool:
    """True for a mark that opens or closes emphasis where it stands."""
    sign, kind = raws[index][0], kinds[index]

    def is_mark(place: int) -> bool:
        """True for a mark of the same sign."""
        return kinds[place] != "text" and raws[place] in MARKS and raws[place][0] == sign

    around: list[str] = []
    for step, edge in ((-1, before), (1, behind)):
        place = index + step
        # Marks of the same kind beside it, as in `***`, are read together.
        while 0 <= place < len(raws) and (
            not raws[place] or (kinds[place] == kind and is_mark(place))
        ):
            place += step
        is_inside = 0 <= place < len(raws)
        if is_inside and is_mark(place):
            return False  # both would be one
        around.append((raws[place] if is_inside else edge)[-1 if step < 0 else 0 :][:1])
    left, right = around
    opens = not _is_blank(right) and (not _is_sign(right) or _is_blank(left) or _is_sign(left))
    closes = not _is_blank(left) and (not _is_sign(left) or _is_blank(right) or _is_sign(right))
    if kind == "open":
        return opens and (sign != "_" or not closes or _is_sign(left))
    return closes and (sign != "_" or not opens or _is_sign(right))


def _is_blank(character: str) -> bool:
    return not character or character.isspace()


def _is_sign(character: str) -> bool:
    """True for punctuation and symbols."""
    return bool(character) and unicodedata.category(character)[0] in "PS"
