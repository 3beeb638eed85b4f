"""The parts of a text that are translated one by one: lines or columns, sentences, long clauses.

Models are trained on sentences, and read a limited number of tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from heedful import extras
from heedful.data.inline import TAG
from heedful.data.language_tags import language_of
from heedful.fidelity.pieces import find_pieces

# Between lines, and between columns, whose blanks a model would write as one.
_LINE = re.compile(r"\r\n|[\n\r\v\f\x85\u2028\u2029]|\t+| {3,}")
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)
# Where a sentence is cut, the best first: behind the punctuation of clauses, or at blanks.
_CUTS = (
    re.compile(r"(?<=[;:；：])\s*|\s(?=[—–]\s)"),
    re.compile(r"(?<=[,，、،])\s*|(?<=[)\]）】」』])\s+"),
    re.compile(r"\s+"),
)
_NO_SPACES = {"zh", "ja", "th", "lo", "km", "my", "yue", "wuu"}

Fits = Callable[[str], bool]  # True for a text that a model reads


class SplitText:
    """A text whose parts are translated, between blanks that are kept.

    Attributes:
        rows: the parts to translate: sentences, or lines.
        places: of each row the place of its first character, and that after its last one.
        num_unfit: words (texts without a blank or punctuation) that do not fit; they are kept.
    """

    def __init__(
        self, text: str, fits: Fits, language: str | None = None, *, by_sentence: bool = True
    ) -> None:
        """
        Args:
            fits: longer parts are cut where this is False.
            language: by whose rules sentences end.
            by_sentence: a line is split in sentences even if it fits.
        """
        self._pieces = [*_split(text, fits, language, by_sentence)]
        self.rows = [text for text, is_row in self._pieces if is_row]
        sizes = [len(text) for text, _ in self._pieces]
        ends = [*accumulate(sizes)]
        places = zip(ends, sizes, self._pieces, strict=True)
        self.places = [(end - size, end) for end, size, (_, is_row) in places if is_row]
        self.num_unfit = sum(not is_row and not fits(text) for text, is_row in self._pieces)

    def joined(self, translations: Sequence[str], source: str | None, target: str | None) -> str:
        """The text with other parts in place of `rows`; see `parts`."""
        return "".join(new for _, new in self.parts(translations, source, target))

    def parts(
        self, translations: Sequence[str], source: str | None, target: str | None
    ) -> list[tuple[str, str]]:
        """All parts of the text, each with what it is in the translation.

        Between two sentences a blank is added or left out, as the languages write it.
        """
        if list(translations) == self.rows:
            return [(text, text) for text, _ in self._pieces]
        from_spaced, to_spaced = _has_spaces(source), _has_spaces(target)
        rest = iter(translations)
        parts: list[tuple[str, str]] = []
        after_row = False
        for index, (text, is_row) in enumerate(self._pieces):
            if is_row:
                blank = " " if after_row and to_spaced and not from_spaced else ""
                new = blank + next(rest).strip()
            else:
                is_between = after_row and any(
                    row for _, row in self._pieces[index + 1 : index + 2]
                )
                is_dropped = is_between and text == " " and from_spaced and not to_spaced
                new = "" if is_dropped else text
            parts.append((text, new))
            after_row = is_row
        return parts


def _has_spaces(language: str | None) -> bool:
    return language_of(language) not in _NO_SPACES


def _split(
    text: str, fits: Fits, language: str | None, by_sentence: bool
) -> Iterator[tuple[str, bool]]:
    """Parts, and True for those to translate; together they are the text."""
    place = 0
    for match in _LINE.finditer(text):
        yield from _split_line(text[place : match.start()], fits, language, by_sentence)
        yield match[0], False
        place = match.end()
    yield from _split_line(text[place:], fits, language, by_sentence)


def _split_line(
    line: str, fits: Fits, language: str | None, by_sentence: bool
) -> Iterator[tuple[str, bool]]:
    parts: Iterable[str] = [line]
    if by_sentence or not fits(line):
        parts = sentences(line, language)
    for part in parts:
        for shorter in [part] if fits(part) else _clauses(part, fits):
            core = _CORE.search(shorter)
            if core is None or not any(map(str.isalnum, TAG.sub("", core[0]))):
                yield from [(shorter, False)] if shorter else []
                continue
            before, after = shorter[: core.start()], shorter[core.end() :]
            yield from [(before, False)] if before else []
            yield core[0], fits(core[0])
            yield from [(after, False)] if after else []


def sentences(text: str, language: str | None) -> list[str]:
    """The sentences of a text, each with the blanks behind it; together they are the text.

    None ends in a piece that is kept, such as `<%= a. b %>`.
    """
    if not re.search(r"[^\w\s,]", text):
        return [text]
    try:
        import sentencex
    except ImportError:
        extras.require("documents", "splitting texts into sentences")
        raise

    found: list[str] = sentencex.segment(language_of(language) or "en", text)
    if "".join(found) != text:
        return [text]
    ends = [*accumulate(map(len, found))]
    if len(found) > 1:
        ends = _outside_pieces(text, ends)
    return [text[start:end] for start, end in pairwise([0, *ends])]


def _outside_pieces(text: str, places: Iterable[int]) -> list[int]:
    """The places of a text, in order, that are not within a piece that is kept."""
    pieces = [*find_pieces(text)]
    starts = [piece.start for piece in pieces]
    found = []
    for place in places:
        index = bisect_left(starts, place) - 1  # of the last piece that begins before it
        if index < 0 or pieces[index].end <= place:
            found.append(place)
    return found


def _clauses(text: str, fits: Fits) -> list[str]:
    """A text cut into parts that fit, or have no place to cut; together they are the text."""
    done: list[str] = []
    waiting = [text]
    while waiting:
        part = waiting.pop()
        cut = None if fits(part) or len(part) < 2 else _cut(part)
        if cut is None:
            done.append(part)
        else:
            waiting += [part[cut:], part[:cut]]
    return done


def _cut(text: str) -> int | None:
    """The place of the best cut, near the middle; None: there is none."""
    middle = len(text) / 2
    for pattern in _CUTS:
        ends = _outside_pieces(text, (match.end() for match in pattern.finditer(text)))
        usable = [end for end in ends if 0 < end < len(text)]
        # A cut at the edge would leave the other part as long as before.
        central = [end for end in usable if 0.1 * len(text) < end < 0.9 * len(text)]
        if best := central or (usable if pattern is _CUTS[-1] else []):
            return min(best, key=lambda end: abs(end - middle))
    return None
