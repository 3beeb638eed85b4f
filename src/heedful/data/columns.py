"""Columns of token ids and of numbers: in memory, as memory-mapped files, and their statistics."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from heedful.files import read_json

DESCRIPTION = "columns.json"  # of the columns of a folder
_SIDES = {"src": "source", "tgt": "target"}
# An epoch may read a row several times. Its copy k, from 0, has the index row + k · COPY, by which
# random numbers of the copies differ; tokens and numbers are those of the row.
COPY = 1 << 36


@dataclass(eq=False)
class Sequences:
    """N sequences of token ids, concatenated in one array; `sequences[i]` is a view of it.

    Args:
        ids: (M,), all ids, uint16 or uint32.
        offsets: (N + 1,), the index in `ids` at which each sequence begins, then the length of
            `ids`; uint32 or int64.
    """

    ids: NDArray[np.integer[Any]]
    offsets: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.integer[Any]]:
        row = index % COPY
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(N,), the length of each sequence, in tokens; in memory, unlike mapped offsets."""
        return np.diff(self.offsets).astype(np.int64, copy=False)

    def lengths_of(self, rows: NDArray[np.integer[Any]] | slice) -> NDArray[np.int64]:
        """The lengths of some sequences, in tokens; reads no other offsets."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1
            return np.diff(self.offsets[start : max(start, stop) + 1]).astype(np.int64, copy=False)
        rows = rows_of(rows)
        return self.offsets[rows + 1].astype(np.int64) - self.offsets[rows].astype(np.int64)

    def take(self, indices: NDArray[np.integer[Any]]) -> "Sequences":
        """The sequences at `indices`, in that order, in new arrays."""
        indices = rows_of(indices)
        lengths = self.lengths_of(indices)
        offsets = offsets_from_lengths(lengths)
        shift = np.repeat(self.offsets[indices].astype(np.int64) - offsets[:-1], lengths)
        return Sequences(self.ids[shift + np.arange(offsets[-1])], offsets)

    def joined(self, borders: NDArray[np.integer[Any]]) -> "Sequences":
        """Consecutive sequences as one each: g has those from `borders[g]` to `borders[g + 1]`."""
        return Sequences(self.ids, self.offsets[borders])


@dataclass(frozen=True)
class Counts:
    """The size of a text in the units by which a loss may be divided.

    Characters (code points) and bytes (UTF-8) are counted before the tokenizer normalizes the text.
    A total loss of L nats over all of them is L / (ln 2 · characters) bits per character, and
    likewise per byte.
    """

    characters: int = 0
    bytes: int = 0
    tokens: int = 0  # without special tokens
    unknown: int = 0  # unknown tokens

    def plus(self, other: "Counts") -> "Counts":
        """The sums of two counts."""
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class DataReport:
    """Statistics of a data set: rows that were read, kept, dropped and truncated.

    Args:
        num_lines: lines that were read.
        num_kept: rows that remain.
        num_empty: rows dropped because a column was empty or held only unknown tokens.
        num_dropped: rows dropped because a sequence was too long.
        num_truncated: rows with a truncated sequence.
        num_filtered: training rows dropped by filters.
        num_held_out: training rows dropped because their source is in a held-out set too.
        num_headers: first lines of files, with names of columns, that are no rows.
        noun: the word for a row in messages: "texts" or "pairs".
        empty: for each column of text, the number of rows dropped because it was empty.
        counts: for each column of ids, the size of the rows that remain.
    """

    num_lines: int
    num_kept: int
    num_empty: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    num_held_out: int = 0
    num_filtered: int = 0
    num_headers: int = 0
    noun: str = "texts"
    empty: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def plus(self, other: "DataReport") -> "DataReport":
        """The sums of two reports on rows of the same columns."""
        numbers = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name.startswith("num_")
        }
        empty = {name: self.empty.get(name, 0) + n for name, n in other.empty.items()}
        counts = {name: n.plus(self.counts.get(name, Counts())) for name, n in other.counts.items()}
        return replace(self, **numbers, empty=empty, counts=counts)

    def summary(self) -> str:
        """The statistics as one line of text."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} {self.noun} kept"]
        if self.num_headers:
            named = f"{self.num_headers} with names of columns left out"
            parts.append(f"{named} (header=false keeps it)")
        if self.num_empty:
            sides = [f"{_SIDES[c]} {n:,}" for c, n in self.empty.items() if c in _SIDES]
            by_side = f" ({', '.join(sides)})" if sides else ""
            parts.append(f"{self.num_empty:,} dropped as empty{by_side}")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_filtered:
            parts.append(f"{self.num_filtered:,} dropped by filters")
        if self.num_held_out:
            parts.append(f"{self.num_held_out:,} dropped as also held out")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated to the maximum length")
        if any(counts.tokens for counts in self.counts.values()):
            shares = [
                f"{_SIDES[c] + ' ' if c in _SIDES else ''}{n.unknown:,}"
                f" ({n.unknown / max(n.tokens, 1):.2%})"
                for c, n in self.counts.items()
            ]
            parts.append(f"unknown tokens: {', '.join(shares)}")
        return "; ".join(parts)


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
        return np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    columns: dict[str, Column] = {
        name: mapped(name)
        if (directory / f"{name}.npy").exists()
        else Sequences(mapped(f"{name}.ids"), mapped(f"{name}.offsets"))
        for name in content["columns"]
    }
    report = TypeAdapter(DataReport).validate_python(content["report"])
    return Columns(columns, report, content["info"])
