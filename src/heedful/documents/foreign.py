"""Texts in another language than the one that a model translates from."""

from collections.abc import Callable
from contextlib import suppress
from unicodedata import east_asian_width

from heedful import extras
from heedful.data.inline import TAG
from heedful.data.language_tags import macrolanguage_of
from heedful.documents.segments import Segment
from heedful.errors import UserError
from heedful.fidelity import Reason
from heedful.fidelity.pieces import find_pieces

# Of 9,444 English texts of LibreOffice (messages and help) and their German translations 4,470 and
# 4,974 are long enough. None is taken for another language (with 0.5 in place of 0.8: 5), and 95%
# and 87% of the other side's texts are found. Of 2,002 Chinese ones 785 are long enough, and with
# 0.9 only 5 are found, which are English.
MIN_LETTERS = 30
MIN_PROBABILITY = 0.8  # of the other language; `language_probabilities` are low for short texts
_WIDE = 3  # letters that a Chinese, Japanese or Korean character counts as


def other_language(text: str, expected: str) -> str | None:
    """The language of a text that is surely in another one than expected; else None.

    Placeholders, tags and numbers do not count. A short text is never sure.

    Args:
        expected: a macrolanguage (`macrolanguage_of`).
    """
    from heedful.data.languages import language_probabilities

    words = _words(text)
    if sum(map(_size, words)) < MIN_LETTERS:
        return None
    probabilities: dict[str, float] = {}
    for code, probability in language_probabilities(words).items():
        name = macrolanguage_of(code)
        probabilities[name] = probabilities.get(name, 0.0) + probability
    best = max(probabilities, key=lambda name: probabilities[name])
    is_sure = probabilities[best] >= MIN_PROBABILITY
    return best if best != expected and is_sure else None


def language_review(language: str | None) -> Callable[[Segment, str], list[str]]:
    """Reasons for a review of segments that are not in a language, for `translate_document`.

    There are none where no language is given, it is not known, or py3langid is not installed.
    """
    from heedful.data.languages import known_macrolanguage

    expected = None
    if language is not None and extras.missing_packages("langid") is None:
        with suppress(UserError):  # one that py3langid does not know
            expected = known_macrolanguage(language, "src_language")

    def review(segment: Segment, translation: str = "") -> list[str]:
        """The reason, or none."""
        other = None if expected is None else other_language(segment.text, expected)
        return [] if other is None else [Reason("language", {"found": other, "expected": language})]

    return review


def _size(character: str) -> int:
    """The letters that a character counts as."""
    if not character.isalpha():
        return 0
    return _WIDE if east_asian_width(character) in "WF" else 1


def _words(text: str) -> str:
    """A text without its placeholders, tags and numbers."""
    text = TAG.sub(" ", text)
    parts, place = [], 0
    for piece in find_pieces(text):
        parts.append(text[place : piece.start])
        place = piece.end
    return " ".join(" ".join([*parts, text[place:]]).split())
