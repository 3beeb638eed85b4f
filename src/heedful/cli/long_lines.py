"""Lines that are too long for a model: their sentences are translated one by one."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from heedful.documents.sentences import SplitText
from heedful.documents.translating import fits_model

if TYPE_CHECKING:
    from heedful.pipelines import Translator
    from heedful.pipelines.generations import Generation


class LongLines:
    """Splits lines that a translator does not read, and joins their translations.

    A line with a single word that is too long is not split.

    Attributes:
        num_split: lines that were split.
    """

    def __init__(self, translator: "Translator", source: str | None, target: str | None) -> None:
        self._fits = fits_model(translator)
        self._languages = source or translator.metadata.src_language, target
        self._waiting: deque[SplitText | None] = deque()  # of each line; None: it is whole
        self._parts: list[Generation] = []
        self.num_split = 0

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
                rows += [line] if split is None or is_whole else split.rows
                self.num_split += not is_whole
            yield rows

    def joined(self, output: "Generation") -> str | None:
        """The translation of a line with the output of its last part; None before it."""
        split = self._waiting[0]
        if split is None:
            self._waiting.popleft()
            return output.text
        self._parts.append(output)
        if len(self._parts) < len(split.rows):
            return None
        self._waiting.popleft()
        parts, self._parts = self._parts, []
        texts = [part.text for part in parts]
        return split.joined(texts, *self._languages) if any(map(str.strip, texts)) else ""
