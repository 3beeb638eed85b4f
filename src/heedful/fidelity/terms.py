"""Glossaries: terms of a source, and how their translations write them.

A term is found as whole words. One in lower case is also found with capitals; one with capitals,
such as an abbreviation, is found as it is. Where terms overlap, the longest one that begins first
counts. Both sides may have alternatives, such as inflected forms.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from heedful.errors import UserError, format_names
from heedful.fidelity.pieces import find_pieces

_SEPARATOR = "|"
# Words; a character of a script without spaces is a word of its own, and so is an underscore before
# a word, which marks its letter (an accelerator).
_OF_OWN = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"(?<!\w)_(?=[^\W_])|[{_OF_OWN}]|[^\W{_OF_OWN}]+|\S")


@dataclass(frozen=True)
class Term:
    """An entry of a glossary.

    Attributes:
        sources, targets: alternatives; a translation has to have one of the targets.
        line: of the file, from 1; of a mapping the number of the entry.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    line: int


class Found(NamedTuple):
    """A term in a text, from its first character to that after its last one."""

    start: int
    end: int
    term: Term


class _Word(NamedTuple):
    text: str
    start: int
    end: int


def _words(text: str) -> list[_Word]:
    """The words and other characters of a text; marks belong to the character before them."""
    words: list[_Word] = []
    for match in _WORD.finditer(text):
        start, end = match.span()
        is_mark = unicodedata.category(text[start])[0] == "M"
        is_inside = bool(words) and words[-1].end == start
        after_mark = is_inside and unicodedata.category(text[start - 1])[0] == "M"
        if is_inside and (is_mark or (after_mark and text[start].isalpha())):
            start = words.pop().start
        words.append(_Word(unicodedata.normalize("NFC", text[start:end]), start, end))
    return words


class _Text:
    """The words of a text.

    Attributes:
        words: with their places in the text.
        folded: each word without regard to case.
        places: for each folded word its indices in `words`, ascending.
    """

    def __init__(self, text: str) -> None:
        self.words = _words(text)
        self.folded = [word.text.casefold() for word in self.words]
        self.places: dict[str, list[int]] = {}
        for place, word in enumerate(self.folded):
            self.places.setdefault(word, []).append(place)


class _Phrase(NamedTuple):
    """A form of a term: its words, as they are or without regard to case."""

    words: tuple[str, ...]
    is_exact: bool
    term: Term

    @classmethod
    def of(cls, text: str, term: Term) -> "_Phrase":
        """The phrase of a form."""
        is_exact = text != text.lower()
        words = (word.text if is_exact else word.text.casefold() for word in _words(text))
        return cls(tuple(words), is_exact, term)


class _Phrases:
    """Finds phrases in texts."""

    def __init__(self, phrases: Sequence[_Phrase]) -> None:
        # The first phrase of some words (`_Phrase.words`, `is_exact`), with its index.
        self._known: dict[tuple[tuple[str, ...], bool], tuple[int, _Phrase]] = {}
        lengths: dict[str, set[int]] = {}  # by the first word
        for index, phrase in enumerate(phrases):
            self._known.setdefault(phrase[:2], (index, phrase))
            lengths.setdefault(phrase.words[0].casefold(), set()).add(len(phrase.words))
        self._lengths = {word: sorted(own, reverse=True) for word, own in lengths.items()}

    def find(self, text: _Text) -> Iterator[Found]:
        """The phrases of a text from left to right, the longest one at each place."""
        firsts = self._lengths.keys() & text.places.keys()
        end = 0  # of the last phrase, in words
        for place in sorted(place for first in firsts for place in text.places[first]):
            if place < end:
                continue
            for size in self._lengths[text.folded[place]]:
                words = text.words[place : place + size]
                exact = tuple(word.text for word in words)
                forms = (exact, True), (tuple(text.folded[place : place + size]), False)
                found = [self._known[form] for form in forms if form in self._known]
                if len(words) == size and found:
                    _, phrase = min(found)
                    yield Found(words[0].start, words[-1].end, phrase.term)
                    end = place + size
                    break


class Glossary:
    """Terms that translations have to write in given words.

    Attributes:
        name: of the file, for messages.
        left_out: terms whose translations a model cannot write; they are not required.
        checked_for: the tokenizer that has tokens for all translations; None: it is not known.
    """

    checked_for: object = None

    def __init__(
        self,
        terms: Sequence[Term],
        name: str = "the glossary",
        left_out: Sequence[Term] = (),
    ) -> None:
        self.name, self.terms, self.left_out = name, tuple(terms), tuple(left_out)
        self._left_out = frozenset(left_out)
        known: dict[tuple[tuple[str, ...], bool], Term] = {}
        phrases: list[_Phrase] = []
        for term in (*terms, *left_out):
            for source in term.sources:
                phrase = _Phrase.of(source, term)
                first = known.setdefault(phrase[:2], term)
                if first.targets != term.targets:
                    raise self.error(
                        term,
                        f"{source!r} has another target than in line {first.line}; write both "
                        f"in one line, with {_SEPARATOR} between them, or leave one out",
                    )
                phrases.append(phrase)
        self._sources = _Phrases(phrases)
        self._targets: dict[tuple[str, ...], _Phrases] = {}

    def error(self, term: Term, problem: str) -> UserError:
        """The error of a wrong term, with the line that it is in."""
        return UserError(f"{self.name}, line {term.line}: {problem}")

    def without(self, translations: Collection[str]) -> "Glossary":
        """The glossary without some translations; terms that have no others are left out."""
        terms, left_out = list[Term](), [*self.left_out]
        for term in self.terms:
            targets = tuple(target for target in term.targets if target not in translations)
            if targets:
                terms.append(replace(term, targets=targets))
            else:
                left_out.append(term)
        return Glossary(terms, self.name, left_out)

    def first_with(self, text: str) -> Term | None:
        """The first term that has a text in one of its translations; None: there is none."""
        return next((term for term in self.terms if any(text in t for t in term.targets)), None)

    def left_out_note(self) -> str:
        """Which terms are left out; "" for none."""
        if not self.left_out:
            return ""
        noun = "1 term is" if len(self.left_out) == 1 else f"{len(self.left_out):,} terms are"
        listed = [f"{term.targets[0]!r} in line {term.line}" for term in self.left_out]
        return (
            f"{self.name}: {noun} left out, as the model's vocabulary cannot write "
            f"{format_names(listed, str, most=3)}"
        )

    def find(self, text: str, extra: tuple[str, ...] = ()) -> list[Found]:
        """The terms of a source, in order, but those left out; none is a part of a placeholder, a
        tag or a number.

        Args:
            extra: further placeholders, as of `find_pieces`.
        """
        return [one for one in self._find(text, extra) if one.term not in self._left_out]

    def find_left_out(self, text: str, extra: tuple[str, ...] = ()) -> list[Term]:
        """The terms of a source that are left out, each once; `extra` as of `find`."""
        found = (one.term for one in self._find(text, extra))
        return [*dict.fromkeys(term for term in found if term in self._left_out)]

    def _find(self, text: str, extra: tuple[str, ...]) -> list[Found]:
        found = [*self._sources.find(_Text(text))]
        if not found:
            return found
        pieces = [*find_pieces(text, extra)]
        starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]

        def is_apart(one: Found) -> bool:
            """True if each piece is a part of the term, or outside of it: neither the piece that
            goes on at its beginning nor the last one in it crosses an edge."""
            first, stop = bisect_right(ends, one.start), bisect_left(starts, one.end)
            return first == stop or (one.start <= starts[first] and ends[stop - 1] <= one.end)

        return [one for one in found if is_apart(one)]

    def missing(self, found: Sequence[Found], output: str) -> list[Term]:
        """The terms of a source that its translation has less often."""
        wanted = Counter(one.term.targets for one in found)
        text = _Text(output)
        lacking = {
            targets
            for targets, number in wanted.items()
            if sum(1 for _ in self._phrases_of(targets).find(text)) < number
        }
        return [*dict.fromkeys(one.term for one in found if one.term.targets in lacking)]

    def _phrases_of(self, targets: tuple[str, ...]) -> _Phrases:
        if targets not in self._targets:
            term = Term((), targets, 0)
            self._targets[targets] = _Phrases([_Phrase.of(text, term) for text in targets])
        return self._targets[targets]


def term_of(source: str, target: str, line: int, name: str) -> Term:
    """The term of two columns; raises UserError for an empty side or alternative."""
    sides = []
    for side, text in (("term", source), ("translation", target)):
        forms = tuple(dict.fromkeys(form.strip() for form in text.split(_SEPARATOR)))
        if not all(_words(form) for form in forms):
            raise UserError(
                f"{name}, line {line}: the {side} {text.strip()!r} is empty, or one of its "
                f"alternatives ({_SEPARATOR}); write it, or remove the line"
            )
        sides.append(forms)
    return Term(sides[0], sides[1], line)
