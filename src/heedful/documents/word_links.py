"""Words of a text and of its translation, and which belong together."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

from heedful.fidelity.pieces import find_pieces

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

_MOST_MATCHED = 1 << 16  # pairs of words of a text and its translation that are compared
# Scripts without blanks between words: Thai, Lao, Burmese, Khmer, kana, ideographs.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_SPACED = rf"(?![{_UNSPACED}])\w"  # the first and the last character of a word
# What a word may have inside: all but blanks, brackets, quotes and marks that separate words.
_INNER = rf"(?:[^\s{_UNSPACED}/|<>()\[\]{{}}\"“”„«»…,;:!?]|(?<=\d)[,:](?=\d))"
_UNITS = re.compile(
    rf"(?P<word>{_SPACED}(?:{_INNER}*{_SPACED})?)|(?P<run>[{_UNSPACED}]+)|(?P<mark>[^\w\s])"
)
_NAMES = re.compile(r"[^\W_]+")
_PARTS = re.compile(rf"{_NAMES.pattern}|[\W_]")  # of a word


@dataclass(frozen=True)
class TokenAlignment:
    """The alignment of the tokens of a text and of its translation.

    Attributes:
        source, target: the range of each token in the text, and in the translation; empty ranges
            are of special tokens.
        weights: (T, S): for each token of the translation its weight on each token of the text.
    """

    source: Sequence[tuple[int, int]]
    target: Sequence[tuple[int, int]]
    weights: "Float[np.ndarray, 'T S']"


class WordUnit(NamedTuple):
    """A word, a placeholder, or a mark of punctuation.

    Attributes:
        start, end: its range.
        is_word: False: a mark.
    """

    start: int
    end: int
    is_word: bool = True

    def moved(self, shift: int) -> "WordUnit":
        """The unit at another place."""
        return self._replace(start=self.start + shift, end=self.end + shift)

    def cut_at(self, places: Sequence[int]) -> list["WordUnit"]:
        """The unit in parts, which end at places from its start."""
        starts = [self.start, *(self.start + place for place in places)]
        ends = [*starts[1:], self.end]
        return [self._replace(start=a, end=b) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Links:
    """The units of a text and of its translation.

    Attributes:
        weights: (T, S): for each unit of the translation its weight on each unit of the text; None:
            of a copy of the text, each of whose units is linked with itself.
        linked: for each unit of the translation the unit of the text with the largest weight, of
            words a word, of marks an equal mark; -1: none.
        sure: False: this link is a guess.
    """

    source: Sequence[WordUnit]
    target: Sequence[WordUnit]
    weights: "Float[np.ndarray, 'T S'] | None"
    linked: Sequence[int]
    sure: Sequence[bool]

    def weight(self, rows: range, columns: Sequence[int]) -> float:
        """The sum of the weights of some units of the translation on some of the text."""
        if self.weights is None:
            return float(sum(column in rows for column in columns))
        return float(self.weights[rows.start : rows.stop, columns].sum())


def link_words(
    source: str, target: str, alignment: TokenAlignment | None, cuts: Sequence[int] = ()
) -> Links:
    """The links of a text and its translation.

    Without an alignment equal words are linked, and words between these by their order, which is a
    guess.

    Args:
        cuts: places in the text where a word is several units, if the linked word has the same
            parts (`H<sub>2</sub>O`), or the same beginning or end (`style<sup>1</sup>`).
    """
    import numpy as np

    units = units_of(source, alignment.source if alignment else ())
    target_units = units_of(target, alignment.target if alignment else ())
    words = [source[unit.start : unit.end] for unit in units]
    target_words = [target[unit.start : unit.end] for unit in target_units]
    if alignment is None and source.strip() == target and words == target_words:
        return _of_copy(units, target_units, cuts)
    if alignment is None:
        weights = _by_order(words, target_words)
        sure = [bool(row.any()) for row in (weights == 1)]
    else:
        weights = _of_units(alignment, units, target_units)
        sure = [True] * len(target_units)
    are_words = np.array([unit.is_word for unit in units], bool)
    linked = []
    for unit, word, row in zip(target_units, target_words, weights, strict=True):
        # Attention to a mark says nothing of a word.
        equal = [not unit.is_word and word == other for other in words]
        usable = np.where(are_words if unit.is_word else equal, row, -1.0)
        best = int(usable.argmax()) if len(usable) else -1
        has_weight = best >= 0 and (usable[best] > 0 or (usable[best] == 0 and not unit.is_word))
        linked.append(best if has_weight else -1)
    links = Links(units, target_units, weights, linked, sure)
    return _with_cuts(links, words, target_words, cuts) if cuts else links


def _of_copy(
    units: Sequence[WordUnit], target_units: Sequence[WordUnit], cuts: Sequence[int]
) -> Links:
    """The links of a text and a copy of it, which may be long: no model has read it."""
    inside = [*_cuts_inside(units, cuts)]
    source, target = (
        [*chain.from_iterable(map(WordUnit.cut_at, side, inside))] for side in (units, target_units)
    )
    is_short = len(units) * len(target_units) <= _MOST_MATCHED
    return Links(source, target, None, range(len(target)), [is_short] * len(target))


def _cuts_inside(units: Sequence[WordUnit], cuts: Sequence[int]) -> Iterator[list[int]]:
    """For each unit the cuts in it, as places from its start."""
    places = sorted({*cuts})
    for start, end, _ in units:
        first, stop = bisect_right(places, start), bisect_left(places, end)
        yield [place - start for place in places[first:stop]]


def _with_cuts(
    links: Links, words: Sequence[str], target_words: Sequence[str], cuts: Sequence[int]
) -> Links:
    """The links of parts of words, where a linked word has the same parts."""
    import numpy as np

    assert links.weights is not None
    source_cuts: dict[int, list[int]] = {}
    target_cuts: dict[int, Sequence[int]] = {}
    inside = [*_cuts_inside(links.source, cuts)]
    for index, own in enumerate(links.linked):
        if own >= 0 and (places := _same_cuts(words[own], target_words[index], inside[own])):
            source_cuts[own], target_cuts[index] = inside[own], places
    source = [unit.cut_at(source_cuts.get(own, ())) for own, unit in enumerate(links.source)]
    target = [unit.cut_at(target_cuts.get(own, ())) for own, unit in enumerate(links.target)]
    firsts = [0, *accumulate(map(len, source))]
    rows, columns = [*map(len, target)], [*map(len, source)]
    weights = np.repeat(np.repeat(links.weights, rows, 0), columns, 1)
    linked: list[int] = []
    for index, units in enumerate(target):
        own = links.linked[index]
        for step in range(len(units)):
            linked.append(firsts[own] + step if own >= 0 else -1)
            if len(units) > 1:  # one part of the word alone
                row = weights[len(linked) - 1, firsts[own] : firsts[own + 1]]
                row[np.arange(len(row)) != step] = 0
    sure = np.repeat(np.array(links.sure, bool), rows).tolist()
    return Links([*chain(*source)], [*chain(*target)], weights, linked, sure)


def _same_cuts(word: str, other: str, places: list[int]) -> list[int]:
    """The places in another word that cut it as some places cut a word; empty: there are none.

    The other word is the same, or has the same marks between its parts (`Ctrl+Del`), or the same
    end behind the only place, or the same beginning.
    """
    if word == other or not places:
        return places
    ends = [[part.end() for part in _PARTS.finditer(text)] for text in (word, other)]
    if _NAMES.sub("a", word) == _NAMES.sub("a", other) and {*ends[0]}.issuperset(places):
        return [ends[1][ends[0].index(place)] for place in places]
    if len(places) == 1 and (place := places[0]) < len(other):
        if other.startswith(word[:place]):
            return places
        if other.endswith(word[place:]) and len(word) - place < len(other):
            return [len(other) - len(word) + place]
    return []


def units_of(text: str, tokens: Sequence[tuple[int, int]] = ()) -> list[WordUnit]:
    """The words, placeholders and marks of a text.

    Args:
        tokens: the ranges that words of scripts without blanks consist of; none: characters.
    """
    units: list[WordUnit] = []
    place = 0
    cuts = {start for start, end in tokens if start < end}
    pieces = [piece for piece in find_pieces(text) if piece.kind != "number"]
    for start, end in [*((piece.start, piece.end) for piece in pieces), (len(text), len(text))]:
        for match in _UNITS.finditer(text, place, start):
            if match["run"] is None:
                units.append(WordUnit(*match.span(), match["word"] is not None))
            else:
                units += _cut(*match.span(), cuts)
        units += [WordUnit(start, end)] if start < end else []
        place = end
    return units


def is_unspaced(character: str) -> bool:
    """True for a character of a script without blanks between words."""
    return re.match(f"[{_UNSPACED}]", character) is not None


def _cut(start: int, end: int, cuts: set[int]) -> Iterator[WordUnit]:
    """The range of characters without blanks in words."""
    places = [place for place in range(start + 1, end) if place in cuts or not cuts]
    for first, stop in zip([start, *places], [*places, end], strict=True):
        yield WordUnit(first, stop)


def _of_units(
    alignment: TokenAlignment, units: Sequence[WordUnit], target_units: Sequence[WordUnit]
) -> "Float[np.ndarray, 'T S']":
    """The weights of units: sums over tokens of the text, means over those of the translation."""
    import numpy as np

    of_source = _shares(alignment.source, units)
    of_target = _shares(alignment.target, target_units)
    of_target = of_target / np.maximum(of_target.sum(0), 1e-9)
    return of_target.T @ alignment.weights @ of_source


def _shares(
    tokens: Sequence[tuple[int, int]], units: Sequence[WordUnit]
) -> "Float[np.ndarray, 'N U']":
    """The share of the characters of each token that each unit has."""
    import numpy as np

    ranges = np.array(tokens, np.int64).reshape(-1, 1, 2)
    own = np.array([unit[:2] for unit in units], np.int64).reshape(1, -1, 2)
    ends, starts = np.minimum(ranges[..., 1], own[..., 1]), np.maximum(ranges[..., 0], own[..., 0])
    common = np.maximum(ends - starts, 0).astype(np.float64)
    return common / np.maximum(common.sum(1, keepdims=True), 1)


def _by_order(source: Sequence[str], target: Sequence[str]) -> "Float[np.ndarray, 'T S']":
    """Weights of 1 of equal words in order, and of less of those between them by their places; of
    many words only by their places, as the time for equal ones grows by more than their square."""
    import numpy as np

    weights = np.zeros((len(target), len(source)))
    blocks = [("replace", 0, len(source), 0, len(target))]
    if weights.size <= _MOST_MATCHED:
        blocks = [*SequenceMatcher(None, source, target, autojunk=False).get_opcodes()]
    for kind, start, end, first, stop in blocks:
        for index in range(first, stop):
            if end > start:
                own = start + (index - first) * (end - start) // (stop - first)
                weights[index, own] = 1.0 if kind == "equal" else 0.5
    return weights
