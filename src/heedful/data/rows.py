"""Rows of text: in memory, and the chunks in which sources of rows are read; blank texts."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from heedful.data.reports import DataReport
from heedful.data.text_files import BlockPlace
from heedful.errors import UserError

Field: TypeAlias = int | str  # the number of a column, from 1, or the name of a column or key
TextUnit: TypeAlias = Literal["line", "paragraph", "file"]
# Returns the text of a record, whose file and line are the second argument.
TextOf: TypeAlias = Callable[[Mapping[str, Any], str], str]
FilePlaces: TypeAlias = Mapping[int, Sequence[BlockPlace]]  # of chunks, by file index

# Columns with a meaning of their own.
LABEL = "label"  # empty cells are errors, unless a row may have no label, and numbers are allowed
MESSAGES = "messages"  # conversations as JSON
CORPUS = "corpus"  # the name of each row's corpus (`data.corpora`)

_CHUNK_ROWS = 4_096  # of rows in memory
# Control characters that are no whitespace, and Default_Ignorable_Code_Point of Unicode (soft
# hyphens, joiners, zero-width spaces, byte order marks, variation selectors, fillers, tags), as
# the inside of a regular expression's brackets.
INVISIBLE = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
    "\u00ad\u034f\u061c\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
INVISIBLE_CHARACTER = re.compile(f"[{INVISIBLE}]")
_BLANK = re.compile(rf"[\s{INVISIBLE}]*")


class Rows:
    """Columns of text of equal length: `rows["src"]` is a list of strings.

    Args:
        report: counts of the rows that were read and left out.
        file_names: the files that the rows were read from.
        locations: (2, N), for each row the index of its file, and its line in it, from 1.
    """

    def __init__(
        self,
        columns: Mapping[str, list[str]],
        report: DataReport | None = None,
        file_names: Sequence[str] = (),
        locations: NDArray[np.int64] | None = None,
    ) -> None:
        self.columns = dict(columns)
        count = len(next(iter(self.columns.values())))
        assert all(len(texts) == count for texts in self.columns.values())
        noun = "pairs" if "tgt" in columns else "chats" if MESSAGES in columns else "texts"
        self.report = DataReport(count, count, noun=noun) if report is None else report
        self.file_names = tuple(file_names)
        self.locations = locations

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> list[str]:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def location(self, index: int) -> str:
        """The file and line of row `index` (from 0), for messages."""
        if self.locations is None:
            return f"{self.report.noun.removesuffix('s')} {index + 1}"
        file_index, line = self.locations[:, index]
        return f"{self.file_names[file_index]}, line {line}"

    def select(self, indices: NDArray[np.integer[Any]]) -> "Rows":
        """The rows at `indices`, in that order."""
        selected = indices.tolist()
        columns = {name: [texts[i] for i in selected] for name, texts in self.columns.items()}
        locations = None if self.locations is None else self.locations[:, indices]
        return Rows(columns, None, self.file_names, locations)

    def filtered(self, indices: NDArray[np.integer[Any]]) -> "Rows":
        """`select` for filters, with a report that counts the rows that are left out."""
        rows = self.select(indices)
        num_filtered = self.report.num_filtered + len(self) - len(rows)
        rows.report = replace(self.report, num_kept=len(rows), num_filtered=num_filtered)
        return rows

    def hashes(self, columns: Sequence[str] | None = None) -> NDArray[np.uint64]:
        """(N,), a hash of some columns of each row; None: all but the name of the corpus."""
        names = [n for n in self.columns if n != CORPUS] if columns is None else columns
        return hash_cells([self.columns[name] for name in names])

    def of_corpus(self, name: str) -> "Rows":
        """The rows with the name of their corpus in the column `CORPUS`."""
        columns = {**self.columns, CORPUS: [name] * len(self)}
        return Rows(columns, self.report, self.file_names, self.locations)

    @classmethod
    def of_lines(
        cls, columns: Mapping[str, list[str]], file: str, first: int, *, num_headers: int = 0
    ) -> "Rows":
        """Rows of one line of a file each.

        Args:
            file: its name.
            first: the number of the first line.
            num_headers: lines before it with names of columns: 0 or 1.
        """
        rows = cls(columns, None, (file,))
        lines = np.arange(first, first + len(rows))
        rows.locations = np.stack([np.zeros_like(lines), lines])
        num_lines = len(rows) + num_headers
        rows.report = replace(rows.report, num_lines=num_lines, num_headers=num_headers)
        return rows

    @classmethod
    def concatenate(cls, groups: Sequence["Rows"]) -> "Rows":
        """The rows of all groups, which have the same columns, in order."""
        columns = {name: [t for rows in groups for t in rows[name]] for name in groups[0].columns}
        report = reduce(DataReport.plus, (rows.report for rows in groups))
        if any(rows.locations is None for rows in groups):
            return cls(columns, report)
        numbers: dict[str, int] = {}  # of the files
        locations = []
        for rows in groups:
            assert rows.locations is not None
            of_group = [numbers.setdefault(name, len(numbers)) for name in rows.file_names]
            shifted = np.array(of_group or [0], dtype=np.int64)[rows.locations[0]]
            locations.append(np.stack([shifted, rows.locations[1]]))
        return cls(columns, report, list(numbers), np.concatenate(locations, axis=1))

    @property
    def num_bytes(self) -> int:
        """The size of the texts in characters: what progress counts for rows in memory."""
        return sum(len(text) for texts in self.columns.values() for text in texts)

    def chunks(self, places: FilePlaces | None = None) -> Iterator["Chunk"]:
        """The rows in chunks, as those of a `RowSource`."""
        for start in range(0, max(1, len(self)), _CHUNK_ROWS):
            block = self.select(np.arange(start, min(start + _CHUNK_ROWS, len(self))))
            yield Chunk(block, same_rows)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a `RowSource`, read but not parsed; it can be sent to another process.

    Attributes:
        block: what was read: a `LineBlock`, a `TableBatch` or `Rows`.
        parse_block: returns the rows of the block; raises UserError for a wrong one.
        place: of its lines in plain files, for `RowSource.chunks`; None: it has none.
        file_index: the index of the file, or of the group of line-parallel files, among those read.
        corpus: the name of the rows' corpus; "": none.
        kept: after a first pass (`heedful.data.scan`): the rows that filters keep, as bits in
            hexadecimal; None: all.
        first: likewise, the index of the first of these rows among all that are kept.
    """

    block: Any
    parse_block: Callable[[Any], Rows]
    place: BlockPlace | None = None
    file_index: int = 0
    corpus: str = ""
    kept: str | None = None
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that the chunk ends after the chunk before it, about."""
        return int(self.block.num_bytes)

    @property
    def num_rows(self) -> int:
        """The number of rows, or of lines, that were read."""
        return len(self.block) if isinstance(self.block, Rows) else int(self.block.num_rows)

    @property
    def first_line(self) -> int:
        """The number of the first line, or row of a table, in the file, from 1."""
        return int(self.block.first)

    def slice(self, start: int, stop: int) -> "Chunk":
        """The lines or rows of a table from `start` to before `stop`."""
        return replace(self, block=self.block.slice(start, stop), place=None)

    def parse(self) -> Rows:
        """The rows, with counts in `report`; raises UserError for a wrong row."""
        rows = self.parse_block(self.block)
        if self.kept is None:
            return rows
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.kept), np.uint8), count=len(rows))
        return rows.filtered(np.flatnonzero(bits))


@runtime_checkable
class RowSource(Protocol):
    """Rows of text that are read in chunks, as often as needed and the same each time."""

    @property
    def num_bytes(self) -> int:
        """The sum of the `num_bytes` of all chunks, about."""

    def chunks(self, places: FilePlaces | None = None) -> Iterator[Chunk]:
        """The rows in order, in chunks that depend on the content alone; at least one a file.

        Args:
            places: by `Chunk.file_index`, those of all its chunks, which an earlier call has
                found: the files are then read by `Chunk.parse` alone.
        """


def collect(source: RowSource) -> Rows:
    """All rows of a source in memory; raises UserError as `read_rows`."""
    counter, groups = ReadCounter(), []
    for chunk in source.chunks():
        rows = chunk.parse()
        counter.add(chunk.file_index, rows.report, *rows.file_names[:1])
        groups.append(rows)
    rows = Rows.concatenate(groups)
    counter.check()
    assert counter.total is not None
    rows.report = counter.total
    return rows


@dataclass
class ReadCounter:
    """Sums the reports of chunks, in order.

    Attributes:
        total: of all chunks so far.
        file_index, name, file_report: of the last file.
    """

    total: DataReport | None = None
    file_index: int = -1
    name: str = ""
    file_report: DataReport | None = None

    def add(self, file_index: int, report: DataReport, name: str = "") -> None:
        """Count a chunk of the file with this index and name; the file before is complete."""
        if self.file_report is not None and file_index == self.file_index:
            self.file_report = self.file_report.plus(report)
        else:
            self.check()
            self.file_index, self.name, self.file_report = file_index, name, report
        self.total = report if self.total is None else self.total.plus(report)

    def check(self) -> None:
        """Raise UserError if the last file, which is complete, has no rows."""
        report = self.file_report
        if report is None or report.num_kept or not self.name:
            return
        noun = report.noun
        kind = {"pairs": "pair with text on both sides"}.get(noun, noun.removesuffix("s"))
        labeled = "labeled " * (LABEL in report.empty)
        # Of translators' files messages and units are counted, not lines.
        why = ", ".join(f"{what} {count:,}" for what, count in report.left_out.items())
        counted = f"{report.num_lines:,} units ({why})" if why else f"{report.num_lines} lines"
        raise UserError(
            f"{self.name} is empty: it holds no {labeled}{kind} in {counted}; leave it out, or "
            "name another file"
        )


def hash_cells(columns: Sequence[list[str]]) -> NDArray[np.uint64]:
    """(N,), a hash of the N cells of all columns at each index."""
    digests = (
        hashlib.blake2b(json.dumps(cells).encode(), digest_size=8).digest()
        for cells in zip(*columns, strict=True)
    )
    return np.frombuffer(b"".join(digests), np.uint64)


def same_rows(rows: Rows) -> Rows:
    """`Chunk.parse_block` of rows."""
    return rows


def is_blank(text: str) -> bool:
    """True if nothing of a text is displayed: it has only whitespace and invisible characters."""
    return _BLANK.fullmatch(text) is not None


def without_invisible(text: str) -> str:
    """The text without its invisible characters."""
    return INVISIBLE_CHARACTER.sub("", text)
