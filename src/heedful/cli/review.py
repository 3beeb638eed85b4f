"""`heedful translate --review FILE`: a table of translations, the worst ones first."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heedful.errors import UserError
from heedful.fidelity import Reason, differences
from heedful.fidelity.quality import quality
from heedful.files import check_writable, write_lines

if TYPE_CHECKING:
    from heedful.documents import Document
    from heedful.pipelines.generations import Generation

_COLUMNS = ("line", "quality", "reasons", "source", "output")
_Row = tuple[float | None, str, int, Sequence[str], str, str]


class ReviewTable:
    """Rows of translations, written to a table with tabs when all are known.

    Raises:
        UserError: the file cannot be written, or is one of `others`, or a document in one of them.
    """

    def __init__(self, path: Path, others: Sequence[Path | None]) -> None:
        from heedful.documents import document_format

        check_writable(path)
        given = [other.resolve() for other in others if other is not None]
        places = [path.resolve(), *(path.resolve().parents if document_format(path) else ())]
        if not {*places}.isdisjoint(given):
            problem = "a document in a folder"
            if places[0] in given:
                problem = "the input or the output"
            raise UserError(f"--review {path} is {problem}; name another file")
        self._path = path
        self._sources: deque[str] = deque()
        self._number = 0
        self._rows: list[_Row] = []

    def check_new(self) -> None:
        """Raise UserError if the file exists: that of an earlier command, which is continued."""
        if self._path.exists():
            raise UserError(
                f"--review {self._path} may have the translations that are there already, and "
                "would be replaced; name another file"
            )

    def remember(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """The chunks, whose lines are kept until `add`."""
        for chunk in chunks:
            self._sources += chunk
            yield chunk

    def add(self, text: str, outputs: Sequence["Generation"]) -> None:
        """The next line's translation, from the outputs of its parts."""
        source = self._sources.popleft()
        self._number += 1
        if not source.strip():
            return
        value: float = 0.0
        reasons: list[str] = [Reason("blank")]
        if text.strip():
            reasons = [reason for output in outputs for reason in output.reasons]
            reasons += differences(source, text)
            if any(output.is_cut for output in outputs):
                reasons.append(Reason("cut"))
            if blank := sum(not output.text.strip() for output in outputs):
                reasons.append(Reason("parts_blank", {"count": blank}))
            probability = min(output.probability for output in outputs)
            value = quality(probability, has_reasons=bool(reasons))
        self._rows.append((value, "", self._number, [*dict.fromkeys(reasons)], source, text))

    def add_document(self, document: "Document", name: str) -> None:
        """The translations of a document's segments; `name` is its place in a folder, or empty.

        Those of a memory have no quality, and are only in the table with reasons.
        """
        for segment in document.segments:
            result, at = segment.result, (name, segment.line)
            if segment.is_blank:
                self._rows.append((0.0, *at, segment.reasons, segment.text, ""))
            elif result is not None and (result.quality is not None or result.reasons):
                row = segment.reasons, segment.text, result.text
                self._rows.append((result.quality, *at, *row))

    def forget(self, name: str) -> None:
        """Remove the translations of a file of a folder, which was not written."""
        self._rows = [row for row in self._rows if row[1] != name]

    def __len__(self) -> int:
        return len(self._rows)

    def write(self) -> None:
        """Write the table, the lowest quality first."""
        lines = ["\t".join(_COLUMNS)]
        for value, name, line, reasons, source, text in sorted(self._rows, key=_order):
            place = f"{name}:{line}" if name else str(line)
            shown = "" if value is None else f"{value:.1f}"
            cells = (place, shown, "; ".join(reasons), source, text)
            lines.append("\t".join(" ".join(cell.split()) for cell in cells))
        write_lines(self._path, lines)


def _order(row: _Row) -> tuple[float, str, int]:
    """The quality and the place of a row; without a quality it goes first."""
    return (-1.0 if row[0] is None else row[0]), row[1], row[2]
