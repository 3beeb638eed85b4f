"""Columns of token ids and of numbers: in memory, memory-mapped, and written to a folder.

A folder is written chunk by chunk; an interrupted writer continues at its last commit.
"""

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from heedful.data.reports import DataReport
from heedful.files import read_json, read_object, write_json

DESCRIPTION = "columns.json"  # of the columns of a folder
PROGRESS = "progress.json"  # of a writer that has not finished
# An epoch may read a row several times. Its copy k, from 0, has the index row + k · COPY, by which
# random numbers of the copies differ; tokens and numbers are those of the row.
COPY = 1 << 36


@dataclass(eq=False)
class Sequences:
    """N sequences of token ids, concatenated in one array; `sequences[i]` is a view of it.

    Args:
        ids: (M,), all ids, uint16 or uint32.
        offsets: (N + 1,), the index in `ids` at which each sequence begins, then the length of
            `ids`.
    """

    ids: NDArray[np.integer[Any]]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.integer[Any]]:
        row = index % COPY
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(N,), the length of each sequence, in tokens; in memory, unlike mapped offsets."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: NDArray[np.integer[Any]] | slice) -> NDArray[np.int64]:
        """The lengths of some sequences, in tokens; reads no other offsets."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1
            return np.diff(self.offsets[start : max(start, stop) + 1])
        rows = rows_of(rows)
        return self.offsets[rows + 1] - self.offsets[rows]

    def take(self, indices: NDArray[np.integer[Any]]) -> "Sequences":
        """The sequences at `indices`, in that order, in new arrays."""
        indices = rows_of(indices)
        lengths = self.lengths_of(indices)
        offsets = offsets_from_lengths(lengths)
        shift = np.repeat(self.offsets[indices] - offsets[:-1], lengths)
        return Sequences(self.ids[shift + np.arange(offsets[-1])], offsets)

    def joined(self, borders: NDArray[np.integer[Any]]) -> "Sequences":
        """Consecutive sequences as one each: g has those from `borders[g]` to `borders[g + 1]`."""
        return Sequences(self.ids, self.offsets[borders])


class CorpusRange(NamedTuple):
    """The rows of a corpus: contiguous, from `start` up to `end`."""

    name: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.end - self.start


Column: TypeAlias = Sequences | NDArray[np.int64] | NDArray[np.float64]


@dataclass(eq=False)
class Columns:
    """Named columns of equal length, with the statistics of the rows that they were made from.

    Args:
        info: further data to store with the columns, as JSON, such as the names of labels;
            "corpora" lists the ranges of the corpora (name, first row, end) of data with several.
    """

    columns: Mapping[str, Column]
    report: DataReport
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len({len(column) for column in self.columns.values()}) == 1, self.columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def corpora(self) -> list[CorpusRange]:
        """The ranges of the corpora, in order; empty for data without `data.corpora`."""
        return [CorpusRange(*entry) for entry in self.info.get("corpora", ())]

    def sequences(self, name: str) -> Sequences:
        """The column of sequences called `name`."""
        column = self.columns[name]
        assert isinstance(column, Sequences), name
        return column

    def numbers(self, name: str) -> NDArray[np.int64]:
        """The column of integers (N,) called `name`."""
        column: Any = self.columns[name]
        assert isinstance(column, np.ndarray), name
        return column

    def values(self, name: str) -> NDArray[np.float64]:
        """The column of numbers (N,) called `name`, not of integers."""
        column: Any = self.columns[name]
        assert isinstance(column, np.ndarray), name
        return column

    def numbers_of(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """(B,), the numbers of some rows of the column called `name`."""
        return self.numbers(name)[rows_of(rows)]


def rows_of(indices: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(B,), the rows of some indices, of which those of copies are above `COPY`."""
    return np.asarray(indices, np.int64) & (COPY - 1)


class SequencesBuilder:
    """Builds `Sequences` from sequences that are added one by one; four bytes per id meanwhile."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._ids, self._lengths = vocab_size, array("I"), array("q")

    def add(self, ids: Sequence[int]) -> None:
        """Append a sequence."""
        self._ids.extend(ids)
        self._lengths.append(len(ids))

    def build(self) -> Sequences:
        """All added sequences, in the type of `ids_dtype`."""
        ids = np.array(self._ids, np.uint32)
        assert ids.max(initial=0) < self._vocab_size, self._vocab_size
        return Sequences(
            ids.astype(ids_dtype(self._vocab_size), copy=False),
            offsets_from_lengths(np.array(self._lengths, np.int64)),
        )


def ids_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The type of stored ids: uint16 if the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def pack_ids(sequences: Iterable[Sequence[int]], vocab_size: int) -> Sequences:
    """`Sequences` of some lists of ids, in memory."""
    builder = SequencesBuilder(vocab_size)
    for ids in sequences:
        builder.add(ids)
    return builder.build()


def offsets_from_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N + 1,), `Sequences.offsets` of N sequences of these lengths: 0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def open_columns(directory: Path) -> Columns:
    """Open a folder that a `ColumnsWriter` wrote; its arrays are memory-mapped."""
    content = read_json(directory / DESCRIPTION)

    def mapped(name: str) -> np.ndarray:
        dtype, size = content["arrays"][name]
        if not size:  # no memory can be mapped for it
            return np.zeros(0, dtype)
        return np.memmap(directory / f"{name}.bin", dtype, "r", shape=(size,))

    columns: dict[str, Column] = {
        name: mapped(name)
        if name in content["arrays"]
        else Sequences(mapped(f"{name}.ids"), mapped(f"{name}.offsets"))
        for name in content["columns"]
    }
    report = TypeAdapter(DataReport).validate_python(content["report"])
    return Columns(columns, report, content["info"])


def write_columns(directory: Path, columns: Columns) -> None:
    """Write columns into a new folder, which `open_columns` opens."""
    writer = ColumnsWriter(directory)
    writer.append(columns)
    writer.complete(columns.report, columns.info)


@dataclass
class _Array:
    """The file of an array of one dimension that grows; `size` is the number of its items."""

    handle: BinaryIO
    dtype: np.dtype[Any]
    size: int = 0


class ColumnsWriter:
    """Writes columns that are appended in chunks, in any number of sessions.

    The files do not depend on the borders of the chunks. Nothing but the last one is in memory.

    Args:
        directory: a folder that is new, or that an unfinished writer has left: then everything
            after its last `commit` is dropped.

    Attributes:
        position: the number of the last commit; 0 at the start.
        report: the sums of the reports of all chunks.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.position = directory, 0
        self.report: DataReport | None = None
        self._names: list[str] = []
        self._corpora: dict[str, int] = {}  # rows by corpus, in order
        self._arrays: dict[str, _Array] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / PROGRESS).is_file():
            self._resume(read_object(directory / PROGRESS))

    def append(self, columns: Columns) -> None:
        """Append rows of the same columns."""
        self._names = list(columns.columns)
        arrays: dict[str, NDArray[Any]] = {}
        for name, column in columns.columns.items():
            if not isinstance(column, Sequences):
                arrays[name] = column
                continue
            offsets = offsets_from_lengths(column.lengths_of(slice(None)))
            if before := self._arrays.get(f"{name}.ids"):
                offsets = offsets[1:] + before.size
            arrays |= {f"{name}.ids": column.ids, f"{name}.offsets": offsets}
        for name, values in arrays.items():
            if name not in self._arrays:
                handle = (self.directory / f"{name}.bin").open("wb")
                self._arrays[name] = _Array(handle, values.dtype)
            stored = self._arrays[name]
            assert values.dtype == stored.dtype, (values.dtype, stored.dtype)
            stored.handle.write(np.ascontiguousarray(values).data)
            stored.size += len(values)
        for corpus in columns.corpora:
            self._corpora[corpus.name] = self._corpora.get(corpus.name, 0) + corpus.size
        report = columns.report
        self.report = report if self.report is None else self.report.plus(report)

    @property
    def corpora(self) -> list[CorpusRange]:
        """The ranges of the corpora of all rows, in order."""
        ends = accumulate(self._corpora.values())
        pairs = zip(self._corpora.items(), ends, strict=True)
        return [CorpusRange(name, end - size, end) for (name, size), end in pairs]

    def commit(self, position: int) -> None:
        """Make everything that was appended durable, as the result of the work up to `position`."""
        for stored in self._arrays.values():
            stored.handle.flush()
            os.fsync(stored.handle.fileno())
        self.position = position
        content = {
            "position": position,
            "columns": self._names,
            "corpora": self._corpora,
            "arrays": self._sizes(),
            "report": None if self.report is None else asdict(self.report),
        }
        write_json(self.directory / PROGRESS, content)

    def complete(self, report: DataReport, info: Mapping[str, Any]) -> None:
        """Complete the folder.

        Args:
            report: to store with the columns.
            info: as in `Columns`; the ranges of corpora are added.
        """
        for stored in self._arrays.values():
            stored.handle.close()
        if self._corpora:
            info = {**info, "corpora": self.corpora}
        content = {
            "columns": self._names,
            "arrays": self._sizes(),
            "info": info,
            "report": asdict(report),
        }
        write_json(self.directory / DESCRIPTION, content)
        (self.directory / PROGRESS).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files of an unfinished folder."""
        for stored in self._arrays.values():
            with suppress(OSError):
                stored.handle.close()

    def _sizes(self) -> dict[str, tuple[str, int]]:
        """The type and the number of items of each array."""
        return {name: (stored.dtype.str, stored.size) for name, stored in self._arrays.items()}

    def _resume(self, progress: Mapping[str, Any]) -> None:
        self.position, self._names = progress["position"], progress["columns"]
        self._corpora = dict(progress["corpora"])
        if progress["report"] is not None:
            self.report = TypeAdapter(DataReport).validate_python(progress["report"])
        for name, (dtype, size) in progress["arrays"].items():
            handle = (self.directory / f"{name}.bin").open("r+b")
            handle.truncate(size * np.dtype(dtype).itemsize)
            handle.seek(0, os.SEEK_END)
            self._arrays[name] = _Array(handle, np.dtype(dtype), size)
