"""Inline codes of documents in a text: tags such as `<g1>bold</g1>` and `<x2/>`.

The names of the tags are those of OmegaT's XLIFF filter, which translators know.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

TAG = re.compile(r"</?g\d+>|<x\d+/>")

Kind = Literal["text", "open", "close", "alone"]


class InlinePiece(NamedTuple):
    """A part of the content of a segment.

    Attributes:
        raw: the text of a `text`, unescaped; of a code its source in the file.
        pair: of `open` and `close`: what both have, such as the number of a `bpt` and its `ept`.
        name: of a code: what the same code in a translation has too; "": unknown.
    """

    kind: Kind
    raw: str
    pair: str = ""
    name: str = ""


class TagError(ValueError):
    """Tags of a translation are not those of its source; the message says which."""


@dataclass(frozen=True)
class TaggedText:
    """A text with a tag for each code.

    Attributes:
        text: with tags.
        codes: the piece of each tag.
    """

    text: str
    codes: dict[str, InlinePiece]

    def restored(self, text: str) -> list[InlinePiece]:
        """The pieces of another text, a translation, with each code at its tag.

        Raises:
            TagError: a tag is missing, is there twice, or pairs are not nested.
        """
        pieces: list[InlinePiece] = []
        seen: set[str] = set()
        opened: list[str] = []
        crossing = self._crossing
        for part in split_at_tags(text):
            code = self.codes.get(part)
            if code is None:
                pieces.append(InlinePiece("text", part))
                continue
            if part in seen:
                raise TagError(f"{part} is there twice")
            seen.add(part)
            if code.kind == "open":
                opened.append(part[1:-1])
            elif code.kind == "close" and part[2:-1] in opened:
                if not crossing.issuperset(_crossed(opened, part[2:-1])):
                    raise TagError(f"{part} crosses another")
            elif code.kind == "close":
                raise TagError(f"{part} is before its <{part[2:-1]}>")
            pieces.append(code)
        if missing := [tag for tag in self.codes if tag not in seen]:
            raise TagError(f"{', '.join(missing)} missing")
        return pieces

    @property
    def _crossing(self) -> set[frozenset[str]]:
        """The pairs of the source that cross each other."""
        opened: list[str] = []
        found: set[frozenset[str]] = set()
        for tag, piece in self.codes.items():
            if piece.kind == "open":
                opened.append(tag[1:-1])
            elif piece.kind == "close" and tag[2:-1] in opened:
                found.update(_crossed(opened, tag[2:-1]))
        return found


def _crossed(opened: list[str], name: str) -> list[frozenset[str]]:
    """A pair that ends, which is removed from those that are open, with each that it crosses."""
    others = []
    while (other := opened.pop()) != name:
        others.append(other)
    opened += others[::-1]
    return [frozenset((name, other)) for other in others]


def split_at_tags(text: str) -> list[str]:
    """The tags of a text and the texts between them, without empty ones."""
    parts, start = [], 0
    for match in TAG.finditer(text):
        parts += [text[start : match.start()], match[0]]
        start = match.end()
    return [part for part in (*parts, text[start:]) if part]


def tagged(pieces: Iterable[InlinePiece], source: TaggedText | None = None) -> TaggedText:
    """The text of pieces, with tags numbered in their order.

    A number whose tag is a part of the text itself, or of the text that it translates, is left out,
    so that no text is taken for a tag.
    A code whose other half is missing gets a tag of its own.

    Args:
        source: the text that it translates: a code that is there too, by its name, has its number.
    """
    pieces = list(pieces)
    taken = {match[0] for piece in pieces if piece.kind == "text" for match in _tags_in(piece.raw)}
    if source is not None:
        taken |= {match[0] for match in _tags_in(source.text)} - source.codes.keys()
    partners = partners_of(pieces)
    known = _known_numbers(pieces, partners, taken, source)
    parts: list[str] = []
    codes: dict[str, InlinePiece] = {}
    number, used, names = 0, {*known.values()}, dict[int, str]()
    for index, piece in enumerate(pieces):
        if piece.kind == "text":
            parts.append(piece.raw)
            continue
        partner = partners.get(index)
        if piece.kind == "close" and partner is not None:
            tag = f"</{names[partner]}>"
        else:
            own = known.get(index)
            if own is None:
                number += 1
                while number in used or not taken.isdisjoint(_tags_of(number)):
                    number += 1
                own = number
            is_pair = piece.kind == "open" and partner is not None
            names[index] = f"g{own}"
            tag = f"<g{own}>" if is_pair else f"<x{own}/>"
            piece = piece if is_pair else piece._replace(kind="alone")
        codes[tag] = piece
        parts.append(tag)
    return TaggedText("".join(parts), codes)


def _known_numbers(
    pieces: Sequence[InlinePiece],
    partners: Mapping[int, int],
    taken: Set[str],
    source: TaggedText | None,
) -> dict[int, int]:
    """The numbers of the codes that the source has too, each once, by their index in `pieces`."""
    numbers: dict[tuple[str, str], int] = {}
    for tag, piece in source.codes.items() if source is not None else ():
        if piece.name and piece.kind != "close":
            numbers.setdefault((piece.kind, piece.name), int(tag.strip("<gx/>")))
    known: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        kind = "open" if piece.kind == "open" and index in partners else "alone"
        if piece.kind == "close" and index in partners:
            continue
        number = numbers.pop((kind, piece.name), None)
        if number is not None and taken.isdisjoint(_tags_of(number)):
            known[index] = number
    return known


def _tags_of(number: int) -> tuple[str, str, str]:
    return f"<g{number}>", f"</g{number}>", f"<x{number}/>"


def trimmed(pieces: Sequence[InlinePiece]) -> tuple[int, int]:
    """The range of pieces without codes and blank texts around all words.

    A pair of codes is left out if both are before all words, behind them, or around them.
    """
    words = [i for i, piece in enumerate(pieces) if piece.kind == "text" and piece.raw.strip()]
    if not words:
        return len(pieces), len(pieces)
    partners = partners_of(pieces)
    start, stop = words[0], words[-1] + 1
    new: list[int] = [*range(start, stop)]
    while new:  # a pair of which one half is in the range is in it
        halves = [partners[index] for index in new if index in partners]
        first, last = min([start, *halves]), max([stop - 1, *halves])
        new = [*range(first, start), *range(stop, last + 1)]
        start, stop = first, last + 1
    return start, stop


def partners_of(pieces: Sequence[InlinePiece]) -> dict[int, int]:
    """The index of the other half of each code that has one."""
    opened: dict[str, list[int]] = {}
    partners: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        if piece.kind == "open":
            opened.setdefault(piece.pair, []).append(index)
        elif piece.kind == "close" and opened.get(piece.pair):
            first = opened[piece.pair].pop()
            partners |= {first: index, index: first}
    return partners


def _tags_in(text: str) -> Iterable[re.Match[str]]:
    return TAG.finditer(text)
