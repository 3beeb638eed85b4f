"""Masks: pieces that must be kept become single characters, which a model copies.

The characters are of Unicode's private use area. Equal pieces of a text share one. In the target a
number has two: as in the source, and with points and commas exchanged, so that the model learns
where its language does that.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.fidelity.pieces import Kind, Piece, find_pieces, localized

SIZE = 32  # distinct pieces of a kind in a text; further ones are not masked
_FIRST: dict[Kind | str, int] = {
    "number": 0xE000,
    "localized": 0xE020,
    "placeholder": 0xE040,
    "tag": 0xE060,
}
CHARACTERS = [chr(first + index) for first in _FIRST.values() for index in range(SIZE)]
_MASKS = frozenset(CHARACTERS)


@dataclass(frozen=True)
class Masked:
    """A text with masks.

    Attributes:
        pieces: the text of each mask.
    """

    text: str
    pieces: dict[str, str]


def has_masks(text: str) -> bool:
    """True for a text that holds a character of masks itself, so that it cannot be masked."""
    return not _MASKS.isdisjoint(text)


def mask_text(text: str, extra: tuple[str, ...] = ()) -> Masked:
    """Mask all pieces of a source."""
    if has_masks(text):
        return Masked(text, {})
    pieces = list(find_pieces(text, extra))
    return _masked(text, pieces, _assign(pieces, 0))


def mask_pair(src: str, tgt: str, extra: tuple[str, ...] = ()) -> tuple[str, str]:
    """Mask the pieces that both sides of a training pair have equally often.

    Masks are numbered from an offset that depends on the text, so that all of them are trained.
    """
    if has_masks(src) or has_masks(tgt):
        return src, tgt
    ours, theirs = list(find_pieces(src, extra)), list(find_pieces(tgt, extra))
    offset = zlib.crc32(src.encode()) % SIZE
    masks = _assign(ours, offset)
    of_target = dict(masks)
    for (text, kind), mask in masks.items():
        other = localized(text) if kind == "number" else None
        if other is not None and (other, kind) not in masks:
            of_target[other, kind] = chr(ord(mask) - _FIRST["number"] + _FIRST["localized"])

    on_both = {
        mask
        for mask, number in _count(ours, masks).items()
        if _count(theirs, of_target)[mask] == number
    }
    masks = {key: mask for key, mask in masks.items() if mask in on_both}
    of_target = {key: mask for key, mask in of_target.items() if source_mask(mask) in on_both}
    return _masked(src, ours, masks).text, _masked(tgt, theirs, of_target).text


def source_mask(character: str) -> str | None:
    """The mask of a source for one of a source or a target; None for another character."""
    if character not in _MASKS:
        return None
    if _FIRST["localized"] <= ord(character) < _FIRST["localized"] + SIZE:
        return chr(ord(character) - _FIRST["localized"] + _FIRST["number"])
    return character


def count_masks(text: str) -> Counter[str]:
    """How often each mask of a source occurs in a text."""
    return Counter(mask for mask in map(source_mask, text) if mask is not None)


def _count(pieces: Sequence[Piece], masks: dict[tuple[str, Kind], str]) -> Counter[str]:
    """How often each mask of a source stands for one of the pieces."""
    of_pieces = (masks.get((piece.text, piece.kind), "") for piece in pieces)
    return count_masks("".join(of_pieces))


def _assign(pieces: Sequence[Piece], offset: int) -> dict[tuple[str, Kind], str]:
    """A mask for each distinct piece, by text and kind."""
    masks: dict[tuple[str, Kind], str] = {}
    numbers = dict.fromkeys(_FIRST, 0)
    for piece in pieces:
        key = piece.text, piece.kind
        if key not in masks and numbers[piece.kind] < SIZE:
            index = (offset + numbers[piece.kind]) % SIZE
            masks[key] = chr(_FIRST[piece.kind] + index)
            numbers[piece.kind] += 1
    return masks


def _masked(text: str, pieces: Sequence[Piece], masks: dict[tuple[str, Kind], str]) -> Masked:
    parts, end, used = [], 0, {}
    for piece in pieces:
        mask = masks.get((piece.text, piece.kind))
        if mask is not None:
            parts += [text[end : piece.start], mask]
            used[mask] = piece.text
            end = piece.end
    return Masked("".join([*parts, text[end:]]), used)


def unmask(text: str, pieces: dict[str, str]) -> str:
    """The text with the pieces in place of their masks; masks without a piece are removed."""

    parts = []
    for character in text:
        mask = source_mask(character)
        if mask is None:
            parts.append(character)
        else:
            piece = pieces.get(mask, "")
            parts.append(piece if mask == character else localized(piece) or piece)
    return "".join(parts)
