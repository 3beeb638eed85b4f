"""Tags of a text put into its translation, by the alignment of words.

A model reads and writes texts without tags. A pair of tags then goes around the run of words of the
translation that attend most to the words between them, a single tag behind the word that is aligned
with the word before it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from heedful.data.inline import TaggedText
from heedful.documents.parts import Part, Placed
from heedful.documents.removed_tags import Pair, Tag, Untagged
from heedful.documents.word_links import Links, WordUnit, link_words

_APART = tuple("?!:;%«»‹›")  # that French writes with a blank


def with_tags(codes: TaggedText, source: Untagged, parts: Sequence[Part]) -> Placed:
    """The translation of a text, with its tags.

    All tags are there once, and pairs are nested as in the text. A pair has a word or more between
    its tags, if it has one in the text and the translation has enough of them.

    Args:
        source: `without_tags(codes)`.
        parts: joined they are the text and its translation, without tags.
    """
    if all(part.source == part.target for part in parts):
        return Placed(codes.text)
    return _Projection(source, parts).placed()


@dataclass(frozen=True)
class _Block:
    """A part with its places: in the text, in the translation, and in the lists of their units.

    Attributes:
        start, end: in the text.
        target_start, target_end: in the translation, without blanks around.
        shift: of a copied part: from a place in the text to that in the translation.
        units, target_units: the first of its units and that after its last one, of each side.
    """

    part: Part
    start: int
    end: int
    target_start: int
    target_end: int
    shift: int
    units: tuple[int, int]
    target_units: tuple[int, int]
    links: Links


class _Run(NamedTuple):
    """Units of a translation, from the first to the last one; not `is_sure`: a guess."""

    first: int
    last: int
    is_sure: bool


class _Places(NamedTuple):
    """The places of the tags of a pair."""

    start: int
    end: int


class _Projection:
    """The places of the tags of one text in its translation."""

    def __init__(self, source: Untagged, parts: Sequence[Part]) -> None:
        self._source, self._tags = source, source.tags
        self._target = "".join(part.target for part in parts)
        self._blocks: list[_Block] = []
        self._units: list[WordUnit] = []
        self._target_units: list[WordUnit] = []
        self._linked: list[int] = []  # the unit of the text of each unit of the translation, or -1
        self._sure: list[bool] = []
        self._add_blocks(parts)
        self._ends = [block.end for block in self._blocks]
        self._unit_starts = [unit.start for unit in self._units]
        self._unit_ends = [unit.end for unit in self._units]
        # The innermost pair that a unit of the translation is in, and that which it should be in.
        self._owner: list[Pair | None] = [None] * len(self._target_units)
        self._inner: dict[int, Pair] = {}
        for pair in source.pairs:
            self._inner |= dict.fromkeys(self._enclosed(pair), pair)
        self._places: dict[Pair, _Places] = {}
        # Of pairs within one: the places of their ends, in order.
        self._edges: dict[Pair | None, tuple[list[int], list[int]]] = {}
        self._unsure: list[str] = []

    def _add_blocks(self, parts: Sequence[Part]) -> None:
        start = target_start = 0
        places = [tag.start for tag in self._tags]
        for part in parts:
            lead, size = _core(part.target)
            alignment = None if part.is_copied else part.alignment
            stop = bisect_left(places, start + len(part.source))
            cuts = [place - start for place in places[bisect_right(places, start) : stop]]
            links = link_words(part.source, part.target.strip(), alignment, cuts)
            first, target_first = len(self._units), len(self._target_units)
            self._units += [unit.moved(start) for unit in links.source]
            self._target_units += [unit.moved(target_start + lead) for unit in links.target]
            self._linked += [first + index if index >= 0 else -1 for index in links.linked]
            self._sure += links.sure
            self._blocks.append(
                _Block(
                    part,
                    start,
                    start + len(part.source),
                    target_start + lead,
                    target_start + lead + size,
                    target_start + lead - start - _core(part.source)[0],
                    (first, len(self._units)),
                    (target_first, len(self._target_units)),
                    links,
                )
            )
            start, target_start = start + len(part.source), target_start + len(part.target)

    def placed(self) -> Placed:
        """The translation with all tags."""
        groups: dict[int, list[int]] = {}  # by their first tag: tags that stay together
        used: set[int] = set()
        for pair in self._source.pairs:
            if pair.open not in used and not self._place(pair):
                inside = self._source.inside(pair)
                groups[pair.open] = [index for index in inside if index not in used]
                used.update(groups[pair.open])
        for index, tag in enumerate(self._tags):
            if tag.kind == "alone" and index not in used:
                groups[index] = [index]
        return Placed(self._written(groups), tuple(dict.fromkeys(self._unsure)))

    def _enclosed(self, pair: Pair) -> range:
        """The units of the text between two tags, also those that a tag is inside of."""
        start, end = (self._tags[index].start for index in pair)
        first, stop = bisect_right(self._unit_ends, start), bisect_left(self._unit_starts, end)
        return range(first, max(first, stop)) if start < end else range(first, first)

    def _place(self, pair: Pair) -> bool:
        """Find the places of a pair; False: there is no word for it."""
        enclosed = self._enclosed(pair)
        if not enclosed:
            return False
        wanted = [index for index in enclosed if self._units[index].is_word] or [*enclosed]
        blocks = self._blocks_of(enclosed)
        parent = self._source.parent(pair)

        def is_free(index: int) -> bool:
            """True for a unit of the translation that may be in the pair."""
            owner = self._owner[index]
            return owner is parent or pair.crosses(owner)

        found = self._over(pair, wanted, blocks, is_free)
        if found is None or not found.is_sure:
            start, end = (self._tags[index].start for index in pair)
            self._unsure.append(" ".join(self._source.text[start:end].split()))
        if found is None:
            return False
        before, after = range(enclosed[0], wanted[0]), range(wanted[-1] + 1, enclosed[-1] + 1)
        first = self._with_marks(found.first, before[::-1], -1, blocks[0], is_free)
        last = self._with_marks(found.last, after, 1, blocks[-1], is_free)
        for index in range(first, last + 1):
            if self._owner[index] is parent:
                self._owner[index] = pair
        start, end = self._target_units[first].start, self._target_units[last].end
        opened = self._edge(pair.open, blocks[0], start)
        closed = self._edge(pair.close, blocks[-1], end)
        self._places[pair] = self._limited(pair, _Places(opened, closed), _Places(start, end))
        return True

    def _limited(self, pair: Pair, places: _Places, units: _Places) -> _Places:
        """The places of a pair within those of the pair around it, and outside of others: a blank
        is in one of two pairs.

        Args:
            units: the places of its units.
        """
        parent = self._source.parent(pair)
        start, end = self._places.get(parent, places) if parent else places
        starts, ends = self._edges.setdefault(parent, ([], []))
        before, behind = bisect_right(ends, units.start), bisect_left(starts, units.end)
        opened = max([places.start, start, *ends[max(0, before - 1) : before]])
        closed = min([places.end, end, *starts[behind : behind + 1]])
        insort(starts, opened)
        insort(ends, closed)
        return _Places(opened, closed)

    def _blocks_of(self, units: range) -> list[_Block]:
        """The blocks of some units of the text."""
        first, last = (
            bisect_left(self._ends, self._units[index].end) for index in (units[0], units[-1])
        )
        return self._blocks[first : last + 1]

    def _over(
        self, pair: Pair, wanted: list[int], blocks: list[_Block], is_free: Callable[[int], bool]
    ) -> _Run | None:
        """The units for a pair, which may be over several parts; None: there are none."""
        if len(blocks) == 1:
            free = [index for index in range(*blocks[0].target_units) if is_free(index)]
            return self._run(pair, wanted, blocks[0], free)
        head, *_, tail = blocks
        behind = [*takewhile(is_free, reversed(range(*head.target_units)))][::-1]
        ahead = [*takewhile(is_free, range(*tail.target_units))]
        runs = []
        for block, free in ((head, behind), (tail, ahead)):
            own = [index for index in wanted if block.units[0] <= index < block.units[1]]
            runs.append(self._run(pair, own, block, free) if own else None)
        start, end = runs
        first = head.target_units[1] if start is None else start.first
        last = tail.target_units[0] - 1 if end is None else end.last
        is_sure = all(run is None or run.is_sure for run in runs)
        return _Run(first, last, is_sure) if first <= last else None

    def _run(self, pair: Pair, wanted: list[int], block: _Block, free: list[int]) -> _Run | None:
        """The run of units of a part with the largest weight on wanted ones.

        Args:
            free: units that the pair may have.
        """
        is_word = self._units[wanted[0]].is_word
        texts = set[str]() if is_word else {self._text_of(index) for index in wanted}
        usable = [
            index
            for index in free
            if self._target_units[index].is_word == is_word
            and (is_word or self._target_text_of(index) in texts)
        ]
        if not usable:
            return None
        if is_word and self._has_all_words(wanted, usable, block):
            return _Run(usable[0], usable[-1], is_sure=True)
        columns = [index - block.units[0] for index in wanted]

        def weight(first: int, last: int) -> float:
            """The weight of the units of a run on the wanted units."""
            start = block.target_units[0]
            return block.links.weight(range(first - start, last + 1 - start), columns)

        linked = [index for index in usable if wanted[0] <= self._linked[index] <= wanted[-1]]
        others = range(*block.target_units)
        if not linked and any(self._is_shared(index, pair, wanted) for index in others):
            return None
        if not linked:
            best = max(usable, key=lambda own: (not self._is_reserved(own, pair), weight(own, own)))
            return _Run(best, best, is_sure=not is_word)
        usable_gaps = {index for index in free if not self._is_reserved(index, pair)}
        runs = [[linked[0], linked[0]]]
        for index in linked[1:]:
            gap = range(runs[-1][1] + 1, index)
            is_near = sum(self._target_units[own].is_word for own in gap) <= 1
            if is_near and usable_gaps.issuperset(gap):
                runs[-1][1] = index
            else:
                runs.append([index, index])
        first, last = max(runs, key=lambda run: weight(*run))
        return _Run(first, last, is_sure=any(self._sure[first : last + 1]))

    def _has_all_words(self, wanted: list[int], usable: list[int], block: _Block) -> bool:
        """True if all words of the part are wanted, and all those of its translation usable."""
        words = sum(self._units[index].is_word for index in range(*block.units))
        theirs = sum(self._target_units[index].is_word for index in range(*block.target_units))
        return (len(wanted), len(usable)) == (words, theirs)

    def _is_shared(self, index: int, pair: Pair, wanted: list[int]) -> bool:
        """True for a unit of the translation of a word that two pairs have parts of, if the other
        one has it."""
        owner, own = self._owner[index], self._linked[index]
        if owner is None or not owner.is_beside(pair):
            return False
        return wanted[0] <= own <= wanted[-1] and own in self._enclosed(owner)

    def _is_reserved(self, index: int, pair: Pair) -> bool:
        """True for a unit of the translation that belongs to a pair beside this one."""
        other = self._inner.get(self._linked[index])
        return other is not None and other.is_beside(pair)

    def _text_of(self, index: int) -> str:
        return self._source.text[self._units[index].start : self._units[index].end]

    def _target_text_of(self, index: int) -> str:
        unit = self._target_units[index]
        return self._target[unit.start : unit.end]

    def _with_marks(
        self,
        index: int,
        marks: Sequence[int],
        step: int,
        block: _Block,
        is_free: Callable[[int], bool],
    ) -> int:
        """The last of the marks directly behind a unit; with a step of -1 before it. A blank may be
        between where one is in the text, or where French has one.

        Args:
            marks: of the text, one after the other from a word; no more are taken.
        """
        for own in marks:
            near = index + step
            if not block.target_units[0] <= near < block.target_units[1]:
                break
            if self._target_units[near].is_word or not is_free(near):
                break
            one, two = sorted((self._units[own - step], self._units[own]))
            may_be_apart = one.end < two.start or self._target_text_of(near) in _APART
            one, two = sorted((self._target_units[index], self._target_units[near]))
            if one.end < two.start and not may_be_apart:
                break
            index = near
        return index

    def _edge(self, index: int, block: _Block, place: int) -> int:
        """The place of a tag of a pair: that of its unit, or behind or before a blank there, as in
        the text."""
        tag, text = self._tags[index], self._source.text
        if block.part.is_copied and block.start <= tag.start <= block.end:
            return tag.start + block.shift
        if not block.start <= tag.start <= block.end:  # on another line than its words
            own = self._blocks[min(bisect_left(self._ends, tag.start), len(self._blocks) - 1)]
            if own.part.is_copied:
                return self._in_copy(tag, own)
        if tag.kind == "open":
            is_inside = text[tag.start : tag.start + 1] == " " and not tag.after
            return place - (is_inside and self._target.endswith(" ", 0, place))
        return place + self._num_blanks(tag, place)

    def _in_copy(self, tag: Tag, block: _Block) -> int:
        """The place of a tag in a part that is its own translation."""
        place = tag.start + block.shift
        if block.part.source == block.part.target:
            return place
        return max(block.target_start, min(place, block.target_end))

    def _num_blanks(self, tag: Tag, place: int) -> int:
        """The number of blanks at a place that are before the tag, as in the text."""
        text, count = self._source.text, 0
        while not tag.before and text.endswith(" ", 0, tag.start - count):
            if not self._target.startswith(" ", place + count):
                break
            count += 1
        return count

    def _single(self, index: int) -> int:
        """The place of a tag, or of tags, without words."""
        tag = self._tags[index]
        block = self._blocks[min(bisect_left(self._ends, tag.start), len(self._blocks) - 1)]
        if block.part.is_copied:
            place = self._in_copy(tag, block)
        elif tag.start >= block.end:
            place = block.target_end
        else:
            place = self._behind(tag, block)
        around = self._source.around(index)
        if around is None or around not in self._places:
            return place
        start, end = self._places[around]
        return max(start, min(place, end))

    def _behind(self, tag: Tag, block: _Block) -> int:
        """The place behind the word that is aligned with the word before a tag."""
        first, target_first = block.units[0], block.target_units[0]
        before = range(first, max(first, bisect_left(self._unit_starts, tag.start)))
        words = [index for index in before if self._units[index].is_word]
        weights = block.links.weights
        assert weights is not None  # the part is no copy
        for index in reversed(words):
            linked = [own for own in range(*block.target_units) if self._linked[own] == index]
            column = weights[:, index - first]
            if not linked and column.any():
                linked = [target_first + int(column.argmax())]
            if linked:
                best = max(linked, key=lambda own: float(column[own - target_first]))
                while best + 1 in linked:
                    best += 1
                marks = range(index + 1, before[-1] + 1)
                near = self._with_marks(best, marks, 1, block, lambda own: True)
                lacks_marks = near - best < before[-1] - index
                best = near
                if lacks_marks and self._units[before[-1]].end == tag.start:
                    # Behind a mark that stands alone, as in `<x1/>+<x2/>`.
                    own_marks = (
                        u for u in range(*block.target_units) if self._linked[u] == before[-1]
                    )
                    best = min(own_marks, key=lambda own: abs(own - near), default=near)
                place = self._target_units[best].end
                return place + self._num_blanks(tag, place)
        if words:
            return block.target_start
        place = block.target_start  # behind the marks that begin both
        for own, mark in zip(before, range(*block.target_units), strict=False):
            if self._text_of(own) != self._target_text_of(mark):
                break
            place = self._target_units[mark].end
        return place + self._num_blanks(tag, place)

    def _written(self, groups: Mapping[int, list[int]]) -> str:
        """The translation with its tags.

        Args:
            groups: by their first tag: those that are at one place.
        """
        lines: dict[int, list[int]] = {}  # at a place: tags that close, then those that open
        for side in (1, 0):
            for pair in sorted(self._places, key=lambda pair: pair[side]):
                lines.setdefault(self._places[pair][side], []).append(pair[side])
        last = slot = last_place = -1
        for first in sorted(groups):
            place = self._single(first)
            line = lines.setdefault(place, [])
            # A tag directly behind another one is directly behind it there, too.
            is_next = place == last_place and first == last + 1
            slot = slot + 1 if is_next else self._source.slot(line, first, self._places)
            line.insert(slot, first)
            last, last_place = max(groups[first]), place
        parts, end = [], 0
        for place in sorted(lines):
            line = [own for first in lines[place] for own in groups.get(first, [first])]
            text, after = self._target[end:place], self._target[place : place + 1]
            is_blank = any(self._tags[own].is_blank for own in line)
            if is_blank and after != " " and text.endswith(" "):
                text = text[:-1]
            parts += [text, *(self._tag(own, place) for own in line)]
            end = place + (is_blank and after == " ")
        return "".join([*parts, self._target[end:]])

    def _tag(self, index: int, place: int) -> str:
        """A tag with its blanks; one before it goes behind it where there is a blank already."""
        tag = self._tags[index]
        if tag.before and (place == 0 or self._target[place - 1] == " "):
            return f"{tag.name}{tag.before}{tag.after}"
        return f"{tag.before}{tag.name}{tag.after}"


def _core(text: str) -> tuple[int, int]:
    """The number of blanks before a text, and its length without those around it."""
    core = text.strip()
    return (len(text) - len(text.lstrip()), len(core)) if core else (0, len(text))
