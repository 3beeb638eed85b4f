"""Plain text (.txt): each line is a segment, blank lines and line ends are kept."""

import re
from itertools import pairwise

from heedful.data.inline import InlinePiece
from heedful.documents.spans import SpanDocument


class PlainDocument(SpanDocument):
    """Lines of text."""

    def _find(self) -> None:
        for start, end in pairwise([*self._line_starts, len(self.text)]):
            line = self.text[start:end].rstrip("\r\n")
            if core := line.strip():
                self._add_pieces([InlinePiece("text", core)], start + line.index(core), [len(core)])

    def _written(self, text: str) -> str:
        return re.sub(r"\s*[\r\n]\s*", " ", text)
