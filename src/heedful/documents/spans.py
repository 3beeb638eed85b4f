"""Documents of text whose segments are replaced in place: plain text and markup."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from heedful.data.inline import InlinePiece, tagged, trimmed
from heedful.documents.segments import Document, Encoded, Segment, line_starts, splice


@dataclass
class Span:
    """The range of a segment in the text of the file."""

    segment: Segment
    start: int
    end: int


class SpanDocument(Document):
    """A text whose segments are ranges of it.

    Attributes:
        text: of the whole file.
    """

    _errors = "strict"  # for characters that the file's encoding has no code for

    def __init__(
        self,
        data: bytes,
        name: str,
        languages: tuple[str | None, str | None] = (None, None),
        encoding: str | None = None,
    ) -> None:
        super().__init__(name, languages)
        self._file = Encoded.of(data, name, encoding)
        self.text = self._file.text
        self._line_starts = line_starts(self.text)
        self._spans: list[Span] = []
        self._find()

    @abstractmethod
    def _find(self) -> None:
        """Add the segments of the text."""

    def _line(self, place: int) -> int:
        """The number of the line at a place, from 1."""
        return bisect_right(self._line_starts, place)

    def _add_pieces(self, pieces: Sequence[InlinePiece], start: int, sizes: Sequence[int]) -> None:
        """Add a segment of consecutive pieces, if it has words.

        Args:
            start: where the first piece begins.
            sizes: of each piece in the text of the file.
        """
        first, stop = trimmed(pieces)
        codes = tagged(pieces[first:stop])
        if not any(piece.kind == "text" and _has_words(piece.raw) for piece in pieces[first:stop]):
            return
        start += sum(sizes[:first])
        end = start + sum(sizes[first:stop])
        segment = Segment(codes.text, self._line(start), codes=codes)
        self._spans.append(Span(self.add(segment), start, end))

    def _written(self, text: str) -> str:
        """A text between codes as it is in the file."""
        return text

    def _rendered(self, span: Span, text: str) -> str:
        """A translation as it is written into the file."""
        codes = span.segment.codes
        assert codes is not None
        pieces = [
            piece._replace(raw=self._written(piece.raw)) if piece.kind == "text" else piece
            for piece in codes.restored(text)
        ]
        return self._joined(pieces, span)

    def _joined(self, pieces: Sequence[InlinePiece], span: Span) -> str:
        """The texts, as they are in the file, and codes of a segment together."""
        return "".join(piece.raw for piece in pieces)

    def _language_edits(self) -> list[tuple[int, int, str]]:
        """Changes of what names the language of the text, beside translations."""
        return []

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`."""
        edits = [
            (span.start, span.end, self._rendered(span, span.segment.result.text))
            for span in self._spans
            if span.segment.result is not None and span.segment.result.text != span.segment.text
        ]
        edits += self._language_edits() if edits else []
        return self._file.encode(splice(self.text, edits), self.name, self._errors)


def _has_words(text: str) -> bool:
    return any(map(str.isalnum, text))
