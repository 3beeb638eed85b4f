"""`heedful translate --review FILE`: a table of translations, the worst ones first."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.errors import UserError
from heedful.fidelity.quality import quality
from heedful.files import check_writable, write_lines

if TYPE_CHECKING:
    from heedful.documents import Document
    from heedful.pipelines.generations import Generation

_COLUMNS = ("line", "quality", "reasons", "source", "output")
_CUT = "cut off by the length limit"
_BLANK = "without a translation"


class ReviewTable:
    """Rows of translations, written to a table with tabs when all are known.

    Raises:
        UserError: the file cannot be written, or is the input or the output.
    """

    def __init__(self, path: Path, others: Sequence[Path | None]) -> None:
        check_writable(path)
        if any(other is not None and other.resolve() == path.resolve() for other in others):
            raise UserError(f"--review {path} is the input or the output; name another file")
        self._path = path
        self._sources: deque[str] = deque()
        self._number = 0
        self._rows: list[tuple[float, str, int, Sequence[str], str, str]] = []

    def remember(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """The chunks, whose lines are kept until `add`."""
        for chunk in chunks:
            self._sources += chunk
            yield chunk

    def add(self, text: str, outputs: Sequence["Generation"]) -> None:
        """The next line's translation, from the outputs of its parts."""
        source = self._sources.popleft()
        self._number += 1
        reasons = [reason for output in outputs for reason in output.reasons]
        if any(not output.finished and output.failure is None for output in outputs):
            reasons.append(_CUT)
        if source.strip():
            self._add(self._number, min(o.probability for o in outputs), reasons, source, text)

    def add_document(self, document: "Document", name: str) -> None:
        """The translations of a document's segments; `name` is its place in a folder, or empty."""
        for segment in document.segments:
            if (result := segment.result) is not None and result.quality is not None:
                at = name, segment.line
                row = result.reasons, segment.text, result.text
                self._rows.append((result.quality, *at, *row))

    def _add(
        self, line: int, probability: float, reasons: Sequence[str], source: str, text: str
    ) -> None:
        if not text.strip() or math.isnan(probability):
            probability, reasons = 0.0, [*reasons, _BLANK]
        value = quality(probability, has_reasons=bool(reasons))
        self._rows.append((value, "", line, reasons, source, text))

    def write(self) -> None:
        """Write the table, the lowest quality first."""
        lines = ["\t".join(_COLUMNS)]
        for value, name, line, reasons, source, text in sorted(self._rows, key=lambda row: row[:3]):
            place = f"{name}:{line}" if name else str(line)
            cells = (place, f"{value:.1f}", "; ".join(reasons), source, text)
            lines.append("\t".join(" ".join(cell.split()) for cell in cells))
        write_lines(self._path, lines)
