"""A segment whose sentences are translated without tags, which are then put back."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from heedful.data.inline import TAG, TaggedText
from heedful.documents.parts import Part, Placed
from heedful.documents.projection import with_tags
from heedful.documents.removed_tags import without_tags
from heedful.documents.segments import Segment
from heedful.documents.sentences import Fits, SplitText
from heedful.documents.word_links import TokenAlignment

_MOST_CROSSING = 100  # pairs of tags of a text that cross others: each is compared with all


class SplitSegment:
    """The sentences of a segment, without its tags.

    Attributes:
        rows: as of `SplitText`.
        cut_rows: rows with tags between their words, whose alignments are needed.
        num_unfit: as of `SplitText`.
    """

    def __init__(
        self,
        segment: Segment,
        fits: Fits,
        languages: tuple[str | None, str | None],
        *,
        by_sentence: bool = True,
        keeps_words: bool = False,
    ) -> None:
        """
        Args:
            fits, by_sentence: as of `SplitText`.
            keeps_words: as of `without_tags`.
        """
        self._codes = segment.codes or TaggedText(segment.text, {})
        self._source = without_tags(self._codes, keeps_words=keeps_words)
        self._text = SplitText(self._source.text, fits, languages[0], by_sentence=by_sentence)
        self._languages = languages
        self.rows, self.num_unfit = self._text.rows, self._text.num_unfit
        starts = [tag.start for tag in self._source.tags]  # in order
        self.cut_rows = []
        for row, (start, end) in zip(self._text.rows, self._text.places, strict=True):
            first = bisect_right(starts, start)
            if first < len(starts) and starts[first] < end:
                self.cut_rows.append(row)

    def joined(
        self, translations: Sequence[str], alignments: Mapping[str, TokenAlignment | None]
    ) -> Placed:
        """The text with its tags and with other parts in place of `rows`; a blank one is left out.

        A text with many pairs of tags that cross others stays as it is.

        Args:
            alignments: of `cut_rows` with their translations, as far as they are known.
        """
        names = {tag.name for tag in self._source.tags}
        outputs = [_without_names(new, names) for new in translations]
        changed = {
            row
            for row, new, output in zip(self.rows, translations, outputs, strict=True)
            if new != output
        }
        kept = [new if new.strip() else row for row, new in zip(self.rows, outputs, strict=True)]
        num_blank = sum(not new.strip() for new in outputs)
        parts = self._text.parts(kept, *self._languages)
        if not self._source.tags:
            return Placed("".join(new for _, new in parts), num_blank=num_blank)
        aligned = [
            Part(old, new, None if old in changed else alignments.get(old)) for old, new in parts
        ]
        if len(self._source.crossing) > _MOST_CROSSING:
            return Placed(self._codes.text, (" ".join(self._source.text.split()),))
        placed = with_tags(self._codes, self._source, aligned)
        return replace(placed, has_removed=bool(changed), num_blank=num_blank)


def _without_names(output: str, names: Collection[str]) -> str:
    """A translation without what has the name of a tag of the text, as models write some."""
    while found := [match for match in TAG.finditer(output) if match[0] in names]:
        before, after = output[: found[0].start()], output[found[0].end() :]
        is_between = not before or before.endswith(" ")  # two blanks would be left, or a first one
        output = before + (after.removeprefix(" ") if is_between else after)
    return output
