"""Lines that are too long for a model: their sentences are translated one by one."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from heedful.documents.sentences import SplitText
from heedful.documents.translating import fits_model

if TYPE_CHECKING:
    from heedful.pipelines import Translator
    from heedful.pipelines.generations import Generation


class Line(NamedTuple):
    """The translation of a line, and the outputs of its parts."""

    text: str
    parts: "list[Generation]"

    @property
    def is_cut(self) -> bool:
        """The translation of a part at least was cut off by the length limit."""
        return any(part.is_cut for part in self.parts)

    @property
    def is_to_review(self) -> bool:
        """There is a reason for a review of a part at least."""
        return any(part.reasons for part in self.parts)


class LongLines:
    """Splits lines that a translator does not read, and joins their translations.

    A line with a single word that is too long is not split.

    Attributes:
        num_split: lines that were split.
        num_blank: parts of these without a translation.
        numbers: of the line that each row of `split` is of, from 1.
    """

    def __init__(
        self,
        translator: "Translator",
        source: str | None,
        target: str | None,
        *,
        keep: bool = True,
    ) -> None:
        """
        Args:
            source, target: the languages.
            keep: as of `fits_model`.
        """
        self._fits = fits_model(translator, keep=keep)
        self._languages = source or translator.metadata.src_language, target
        self._waiting: deque[SplitText | None] = deque()  # of each line; None: it is whole
        self._parts: list[Generation] = []
        self.num_split = self.num_blank = self._num_lines = 0
        self.numbers: list[int] = []

    def split(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """The chunks with the parts of long lines in place of these."""
        for chunk in chunks:
            rows: list[str] = []
            for line in chunk:
                split = (
                    None if self._fits(line) else SplitText(line, self._fits, self._languages[0])
                )
                is_whole = split is None or split.num_unfit > 0 or not split.rows
                self._waiting.append(None if is_whole else split)
                parts = [line] if split is None or is_whole else split.rows
                rows += parts
                self._num_lines += 1
                self.numbers += [self._num_lines] * len(parts)
                self.num_split += not is_whole
            yield rows

    def joined(self, output: "Generation") -> Line | None:
        """The translation of a line with the output of its last part; None before it."""
        split = self._waiting[0]
        self._parts.append(output)
        if split is not None and len(self._parts) < len(split.rows):
            return None
        self._waiting.popleft()
        parts, self._parts = self._parts, []
        text = output.text if split is None else self._text(split, [part.text for part in parts])
        return Line(text, parts)

    def _text(self, split: SplitText, texts: list[str]) -> str:
        """A line of the translations of its parts."""
        blank = sum(not text.strip() for text in texts)
        self.num_blank += blank
        return "" if blank == len(texts) else split.joined(texts, *self._languages)
