"""Masks: pieces that must be kept become single characters, which a model copies.

The characters are of Unicode's private use area. Equal pieces of a text share one. In the target a
number has two: as in the source, and with points and commas exchanged, so that the model learns
where its language does that.
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from heedful.fidelity.pieces import Kind, Piece, find_pieces, localized
from heedful.fidelity.reasons import Reason

if TYPE_CHECKING:
    from heedful.data.tokenizer import Tokenizer

SIZE = 32  # distinct pieces of a kind in a text; further ones are not masked
_FIRST: dict[Kind | str, int] = {
    "number": 0xE000,
    "localized": 0xE020,
    "placeholder": 0xE040,
    "tag": 0xE060,
}
CHARACTERS = [chr(first + index) for first in _FIRST.values() for index in range(SIZE)]
_MASK = re.compile(r"[\uE000-\uE07F]")
_NUMBERS = r"[0-9\uE000-\uE03F]"  # digits, and the masks of numbers
_BESIDE_WORDS = re.compile(r"(?<=[\uE000-\uE07F])(?=\w)|(?<=\w)(?=[\uE000-\uE07F])")
_JOINED = re.compile(rf"(?<={_NUMBERS})(?=[\uE000-\uE03F])|(?<=[\uE000-\uE03F])(?=[0-9])")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_TURKISH = frozenset("ıİğĞ")  # letters of Turkish and Azerbaijani, whose capital of i has a dot
# All up to the first letter of a sentence, and this letter, or "" at the end of the text.
_FIRST_LETTER = re.compile(r"(?:^|[.!?]\s+)[\W\d_]*+([^\W\d_]?)")


@dataclass(frozen=True)
class Keep:
    """The masks that a translator was trained with (`data.keep`).

    Attributes:
        patterns: regular expressions of placeholders beside those of `PATTERNS`.
    """

    patterns: tuple[str, ...] = ()

    def mask(
        self,
        text: str,
        pieces: Sequence[Piece] | None = None,
        terms: Sequence[tuple[int, int, str]] = (),
    ) -> "Masked":
        """Mask all pieces of a text that is translated; capitals are read as a sentence.

        Few texts of the training are in capitals, so that a model does not know their words. The
        translation is then put in capitals (`Masked.cased`).

        Args:
            pieces: of the text, where they are known.
            terms: see `mask_text`.
        """
        if pieces is None:
            pieces = [*find_pieces(text, self.patterns)]
        masked = mask_text(text, pieces, terms)
        if not _is_in_capitals(masked.text) or has_masks(text):
            return masked
        lowered = _lowered(masked.text)
        # Such as a file name, which is not recognized in capitals.
        if any(not has_masks(piece.text) for piece in find_pieces(lowered, self.patterns)):
            return masked
        sentence = _FIRST_LETTER.sub(
            lambda match: masked.text[slice(*match.span())] if match[1] else match[0], lowered
        )
        return replace(masked, text=sentence, is_in_capitals=True)


@dataclass(frozen=True)
class Masked:
    """A text with masks.

    Attributes:
        pieces: the text of each mask; of a term the one in the translation.
        is_in_capitals: the text was in capitals, and is now a sentence of equal length.
        terms: the text in the source of each mask of a term.
    """

    text: str
    pieces: dict[str, str]
    is_in_capitals: bool = False
    terms: dict[str, str] = field(default_factory=dict)

    @property
    def source_pieces(self) -> dict[str, str]:
        """The text in the source of each mask."""
        return self.pieces | self.terms

    def cased(self, output: str) -> str:
        """A translation with masks, in capitals if the text was; of equal length. Pieces of terms
        stay as they are."""
        if not self.is_in_capitals:
            return output
        parts, end = [], 0
        for piece in find_pieces(output):
            parts += [_raised(output[end : piece.start]), piece.text]
            end = piece.end
        return "".join([*parts, _raised(output[end:])])


def _is_in_capitals(text: str) -> bool:
    """True for a text of three words or more in capitals, which are not all abbreviations."""
    if not text.isupper() or any(c.lower() == c.upper() for c in text if c.isalpha()):
        return False
    lengths = sorted(map(len, _LETTERS.findall(text)))
    return len(lengths) >= 3 and (lengths[-1] >= 6 or lengths[-2] >= 4)


def _lowered(text: str) -> str:
    """Capitals in small letters; of equal length."""
    if not _TURKISH.isdisjoint(text):
        text = text.replace("I", "ı").replace("İ", "i")
    lowered = text.lower()  # which knows the last letter of Greek words
    if len(lowered) == len(text):
        return lowered
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def _raised(text: str) -> str:
    """A text in capitals; of equal length: of ß the capital that German has since 2017."""
    if not _TURKISH.isdisjoint(text):
        text = text.replace("i", "İ")
    text = text.replace("ß", "ẞ")
    return "".join(c.upper() if len(c.upper()) == 1 and c != "µ" else c for c in text)


def has_masks(text: str) -> bool:
    """True for a text that holds a character of masks itself, so that it cannot be masked."""
    return _MASK.search(text) is not None


def mask_text(
    text: str, pieces: Sequence[Piece], terms: Sequence[tuple[int, int, str]] = ()
) -> Masked:
    """Mask all pieces of a source.

    Args:
        pieces: see `find_pieces`.
        terms: further ranges that are masked, each with the text that its mask stands for; they
            hold no pieces. The masks of pieces do not depend on them.
    """
    if has_masks(text) or (not pieces and not terms):
        return Masked(text, {})
    masks = _assign(pieces, 0)
    free = [mask for mask in _of_kind("placeholder") if mask not in masks.values()]
    of_terms: dict[tuple[str, str], str] = {}
    marked = _marked(pieces, masks)
    for start, end, target in terms:
        term = text[start:end], target
        if term not in of_terms and free:
            of_terms[term] = free.pop()
        marked.append((Piece(start, end, target, "placeholder"), of_terms.get(term)))
    masked = _masked(text, sorted(marked, key=lambda pair: pair[0].start))
    return replace(masked, terms={mask: source for (source, _), mask in of_terms.items()})


def _of_kind(kind: Kind) -> list[str]:
    """All masks of a kind."""
    return [chr(_FIRST[kind] + index) for index in range(SIZE)]


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
    read, written = _marked(ours, masks), _marked(theirs, of_target)
    return _masked(src, read).text, _masked(tgt, written).text


def source_mask(character: str) -> str | None:
    """The mask of a source for one of a source or a target; None for another character."""
    return _source_mask(character) if _MASK.match(character) else None


def _source_mask(mask: str) -> str:
    """The mask of a source for one of a source or a target."""
    if _FIRST["localized"] <= ord(mask) < _FIRST["localized"] + SIZE:
        return chr(ord(mask) - _FIRST["localized"] + _FIRST["number"])
    return mask


def count_masks(text: str) -> Counter[str]:
    """The number of occurrences of each mask of a source in a text."""
    return Counter(map(_source_mask, _MASK.findall(text)))


def _count(pieces: Sequence[Piece], masks: dict[tuple[str, Kind], str]) -> Counter[str]:
    """The number of the pieces that each mask of a source replaces."""
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


def _marked(
    pieces: Sequence[Piece], masks: dict[tuple[str, Kind], str]
) -> list[tuple[Piece, str | None]]:
    """Each piece with its mask; None: it has none."""
    return [(piece, masks.get((piece.text, piece.kind))) for piece in pieces]


def _masked(text: str, marked: Sequence[tuple[Piece, str | None]]) -> Masked:
    parts, end, used = [], 0, {}
    for piece, mask in marked:
        if mask is not None:
            parts += [text[end : piece.start], mask]
            used[mask] = piece.text
            end = piece.end
    return Masked("".join([*parts, text[end:]]), used)


def unmask(text: str, pieces: dict[str, str]) -> str:
    """The text with the pieces in place of their masks; other characters stay."""

    def piece_of(match: re.Match[str]) -> str:
        """The piece of a mask."""
        mask = _source_mask(match[0])
        piece = pieces.get(mask, match[0])
        return piece if mask == match[0] else localized(piece) or piece

    return _MASK.sub(piece_of, text)


def place_masks(source: Masked, output: str) -> tuple[str, tuple[str, ...]]:
    """The output with exactly the masks of its source, and what was changed.

    Of masks too many the first ones stay. A missing one is put at its relative position, beside a
    space. A space is put between numbers that would be one.
    """
    if not source.pieces and not has_masks(output):
        return output, ()
    left = count_masks(source.text)
    reasons: list[str] = []
    kept: list[str] = []
    was_removed = False
    for character in output:
        mask = source_mask(character)
        if mask is None or left[mask]:
            if mask is not None:
                left[mask] -= 1
            if not (was_removed and character == " " and kept[-1:] in ([], [" "])):
                kept.append(character)
            was_removed = False
            continue
        was_removed = True
        name = source.pieces.get(mask)
        wrong = ("unknown_removed", {}) if name is None else ("repeated", {"piece": name})
        reasons.append(Reason(*wrong))
        if kept[-1:] == [" "]:
            kept.pop()
    for place, mask in enumerate(source.text):
        if mask in source.pieces and left[mask] > 0:
            left[mask] -= 1
            reasons.append(Reason("placed", {"piece": source.pieces[mask]}))
            kept = _placed(kept, mask, place / len(source.text))
    text = _JOINED.sub(" ", "".join(kept))
    if len(text) > len(kept):
        reasons.append(Reason("numbers_joined"))
    return text, tuple(reasons)


def separate_masks(text: str) -> str:
    """The text with a space between each mask and a letter or digit beside it."""
    return _BESIDE_WORDS.sub(" ", text)


def _placed(characters: list[str], mask: str, share: float) -> list[str]:
    """The characters with a mask at the space nearest to a share of their length."""
    wanted = share * len(characters)
    spaces = [place for place, character in enumerate(characters) if character == " "]
    place = min([0, *spaces, len(characters)], key=lambda place: abs(place - wanted))
    inserted = [" ", mask] if place else [mask, " "]
    return [*characters[:place], *inserted, *characters[place:]]


def mask_id(tokenizer: "Tokenizer", mask: str) -> int:
    """The token of a mask, in a tokenizer for which `has_mask_tokens` is true."""
    return tokenizer.encode(mask)[-1]


def has_mask_tokens(tokenizer: "Tokenizer") -> bool:
    """True if each mask is a token, which is never joined with what is beside it."""
    ids = [mask_id(tokenizer, mask) for mask in CHARACTERS]
    rows = tokenizer.encode_batch([f"a{mask}b {mask}" for mask in CHARACTERS])
    counts = [row.count(token) for row, token in zip(rows, ids, strict=True)]
    return len({*ids}) == len(CHARACTERS) and tokenizer.unk_id not in ids and {*counts} == {2}
