"""The text of a segment without its tags, and the places of these."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heedful.data.inline import Kind, TaggedText, split_at_tags
from heedful.documents.word_links import is_unspaced

_CLOSING = tuple(",.;:!?)]}…、。，；：！？）")  # which have no blank before them

_OPENING = " \t\n([{\"'“„«‘‚"  # before a word
_ENDING = " \t\n\"'”“»’" + "".join(_CLOSING)  # behind a word


@dataclass
class Tag:
    """A tag that was removed.

    Attributes:
        start: its place in the text without tags.
        before, after: a blank that was removed with it, as it stood between two.
        is_blank: a blank was put in its place, as it stood between two words.
    """

    name: str
    kind: Kind
    start: int
    before: str = ""
    after: str = ""
    is_blank: bool = False


class Pair(NamedTuple):
    """The indices of the tags of a pair among all tags of a text."""

    open: int
    close: int

    def crosses(self, other: "Pair | None") -> bool:
        """True if just one tag of the other is between the tags of this pair."""
        if other is None:
            return False
        return (self.open < other.open < self.close) != (self.open < other.close < self.close)

    def is_beside(self, other: "Pair") -> bool:
        """True if one pair ends before the other begins."""
        return self.close < other.open or other.close < self.open

    def encloses(self, other: "Pair") -> bool:
        """True if both tags of the other are between those of this pair."""
        return self.open < other.open and other.close < self.close


class Untagged:
    """A text without tags.

    Attributes:
        tags: in order.
        pairs: of the tags, by their first one; a pair that encloses another is before it.
        crossing: those that cross another one.
    """

    def __init__(self, text: str, tags: Sequence[Tag]) -> None:
        self.text, self.tags = text, tags
        opened = {tag.name[1:-1]: index for index, tag in enumerate(tags) if tag.kind == "open"}
        self.pairs = sorted(
            Pair(opened[tag.name[2:-1]], index)
            for index, tag in enumerate(tags)
            if tag.kind == "close"
        )
        self.pair_of = {index: pair for pair in self.pairs for index in pair}
        self._around: list[Pair | None] = []
        opened_pairs: list[Pair] = []
        is_nested = True
        for index, tag in enumerate(tags):
            pair = self.pair_of.get(index)
            if pair is not None and tag.kind == "close":
                if opened_pairs[-1] == pair:
                    opened_pairs.pop()
                else:
                    opened_pairs.remove(pair)
                    is_nested = False
            outer = (own for own in reversed(opened_pairs) if pair is None or own.encloses(pair))
            self._around.append(next(outer, None))
            if pair is not None and tag.kind == "open":
                opened_pairs.append(pair)
        self.crossing = [] if is_nested else [*_crossing(self.pairs)]

    def around(self, index: int) -> Pair | None:
        """The innermost pair around a tag; of an opening one that which encloses its pair."""
        return self._around[index]

    def parent(self, pair: Pair) -> Pair | None:
        """The innermost pair that encloses another."""
        return self._around[pair.open]

    def inside(self, pair: Pair) -> list[int]:
        """The tags of a pair and those between them, but halves of pairs that cross it."""
        halves = {index for other in self.crossing if pair.crosses(other) for index in other}
        return [index for index in range(pair.open, pair.close + 1) if index not in halves]

    def slot(self, line: Sequence[int], index: int, placed: Collection[Pair]) -> int:
        """The position for a tag without words, and those with it, in the tags at their place.

        It is inside the pairs around them, outside of others, and behind the tags before them.

        Args:
            placed: pairs that have words.
        """
        slot = 0
        for number, own in enumerate(line):
            pair = self.pair_of.get(own)
            if pair is None or pair not in placed:
                is_before = True
            elif own == pair.close:
                is_before = not pair.open < index < pair.close
                if not is_before:
                    return slot
            else:
                is_before = pair.open < index < pair.close
            if not is_before:
                break
            slot = number + 1
        return slot


def without_tags(codes: TaggedText, *, keeps_words: bool = False) -> Untagged:
    """The text without tags.

    Where tags stand between two blanks, or between a blank and a closing mark, a blank is removed
    with them; where a tag such as a line break stands between two words, a blank takes its place.

    Args:
        keeps_words: single tags that stand as a word, such as code or a picture, stay in the text.
    """
    content = split_at_tags(codes.text)
    words = _word_tags(codes, content) if keeps_words else set[int]()
    parts: list[str] = []
    tags: list[Tag] = []
    length = num_before = 0  # tags before the last text
    for index, part in enumerate(content):
        code = codes.codes.get(part)
        if code is not None and index not in words:
            tags.append(Tag(part, code.kind, length))
            continue
        if group := tags[num_before:]:
            before = parts.pop() if parts else ""
            old, part = _joined(before, group, part)
            length += len(old) - len(before)
            parts.append(old)
        num_before = len(tags)
        parts.append(part)
        length += len(part)
    return Untagged("".join(parts), tags)


def _word_tags(codes: TaggedText, content: Sequence[str]) -> set[int]:
    """The indices of single tags between blanks, brackets, quotes and marks, as words are."""
    found: set[int] = set()
    before, group = "", list[int]()
    for index, part in enumerate([*content, ""]):
        code = codes.codes.get(part)
        if code is not None:
            group += [index] if code.kind == "alone" else []
            continue
        is_word = not before[-1:].strip(_OPENING) and not part[:1].strip(_ENDING)
        if len(group) == 1 and is_word:
            found.update(group)
        before, group = part, []
    return found


def _joined(before: str, group: Sequence[Tag], behind: str) -> tuple[str, str]:
    """The texts before and behind tags as they are without these."""
    opened = _first_open(group)
    single = next((tag for tag in group if tag.kind == "alone"), None)
    # Of several blanks, as in `pre`, and of those that begin a line, each has a meaning.
    is_one = before.endswith(" ") and not before[:-1].endswith((" ", "\n"))
    if is_one and behind.startswith(" "):
        if opened is None:  # they belong to the word before them
            group[0].before = " "
            _move(group, -1)
        else:
            group[-1].after = " "
        return before, behind[1:]
    if before.endswith(" ") and behind.startswith(_CLOSING):
        if single is not None and opened is None:
            group[0].before = " "
            _move(group, -1)
            return before[:-1], behind
    elif single is not None and _are_apart(before[-1:], behind[:1]):
        single.is_blank = True
        _move(group[len(group) if opened is None else opened :], 1)
        return before, f" {behind}"
    return before, behind


def _move(tags: Sequence[Tag], shift: int) -> None:
    for tag in tags:
        tag.start += shift


def _are_apart(before: str, behind: str) -> bool:
    """True for the end of a word, or of a clause, and a word that begins without a blank."""
    is_end = before.isalnum() or before in _CLOSING
    return is_end and behind.isalnum() and not (is_unspaced(before) or is_unspaced(behind))


def _first_open(group: Sequence[Tag]) -> int | None:
    """The first tag that opens a pair which is not closed among these."""
    closed = {tag.name[2:-1] for tag in group if tag.kind == "close"}
    places = (
        index
        for index, tag in enumerate(group)
        if tag.kind == "open" and tag.name[1:-1] not in closed
    )
    return next(places, None)


def _crossing(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The pairs that cross another one; `pairs` are sorted."""
    opened: list[Pair] = []
    found: set[Pair] = set()
    for pair in pairs:
        opened = [own for own in opened if own.close > pair.open]
        found.update(one for own in opened if own.crosses(pair) for one in (own, pair))
        opened.append(pair)
    yield from sorted(found)
