"""Noise in the texts of training pairs: case, the stop at the end, typing errors.

As the modifiers of OpusTrainer (Bogoychev et al. 2023, "OpusCleaner and OpusTrainer", sec. 4.2).
Placeholders, tags, addresses and masks stay as they are.
"""

import random
import re
from collections.abc import Callable

from heedful.data.language_tags import language_of
from heedful.fidelity.pieces import find_pieces

_TURKIC = ("tr", "az")  # whose i keeps its dot in upper case, and ı has none
_DOTTED = str.maketrans({"i": "İ", "ı": "I"})
_TITLE_WORD = re.compile(r"[^\W\d_]\w*(?:['’]\w+)*")
_STOPS = ".!?…。！？।؟"
_LETTERS = re.compile(r"[^\W\d_]{4,}")
_TYPO_SHARE = 0.1  # of the words of four letters or more


def upper_case(text: str, language: str | None = None) -> str:
    """A text in capitals (`ß` as SS); in Turkish and Azerbaijani i is İ."""
    return _apart_from_pieces(text, lambda part: _upper(part, language))


def title_case(text: str, language: str | None = None) -> str:
    """A text whose words begin with capitals; their other letters are unchanged."""

    def titled(match: re.Match[str]) -> str:
        """A word with its first letter as a title has it, so that ß is Ss."""
        first, rest = match[0][0], match[0][1:]
        return (_upper(first, language) if first in "iı" else first.title()) + rest

    return _apart_from_pieces(text, lambda part: _TITLE_WORD.sub(titled, part))


def without_stops(src: str, tgt: str) -> tuple[str, str]:
    """A pair without the marks that end both sides; unchanged if a side has none, or no words."""
    cut = [_without_stop(text) for text in (src, tgt)]
    if cut[0] is None or cut[1] is None:
        return src, tgt
    return cut[0], cut[1]


def with_typos(text: str, rng: random.Random) -> str:
    """A text in which letters of a tenth of the words, at least of one, are typed wrongly.

    Two letters are exchanged, or one is left out or typed twice; first letters stay.
    """
    words = [
        (start + match.start(), match[0])
        for start, part in _between_pieces(text)
        for match in _LETTERS.finditer(part)
    ]
    if not words:
        return text
    chosen = rng.sample(words, max(1, round(_TYPO_SHARE * len(words))))
    for start, word in sorted(chosen, reverse=True):
        place = start + rng.randrange(1, len(word) - 1)
        pair = text[place : place + 2]
        typed = rng.choice((pair[::-1], pair[1], pair[0] + pair))
        text = text[:place] + typed + text[place + 2 :]
    return text


def _upper(text: str, language: str | None) -> str:
    if language is not None and language_of(language) in _TURKIC:
        text = text.translate(_DOTTED)
    return text.upper()


def _without_stop(text: str) -> str | None:
    """A text without the marks at its end; None: it has none, or nothing else."""
    whole = text.rstrip()
    bare = whole.rstrip(_STOPS)
    start = len(bare.rstrip())
    if bare == whole or not any(map(str.isalnum, text[:start])):
        return None
    if any(piece.end > start for piece in find_pieces(text)):
        return None
    return text[:start]


def _between_pieces(text: str) -> list[tuple[int, str]]:
    """The parts of a text between its pieces, with their places."""
    parts, place = [], 0
    for piece in find_pieces(text):
        parts.append((place, text[place : piece.start]))
        place = piece.end
    return [*parts, (place, text[place:])]


def _apart_from_pieces(text: str, change: Callable[[str], str]) -> str:
    """A text whose parts between pieces are changed."""
    parts, end = [], 0
    for start, part in _between_pieces(text):
        parts += [text[end:start], change(part)]
        end = start + len(part)
    return "".join(parts)
