"""One store of columns: sequences of ids and numbers, memory-mapped, and how they were made."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from heedful.files import read_json, write_json

_DESCRIPTION = "columns.json"
_SIDES = {"src": "source", "tgt": "target"}


@dataclass(eq=False)
class Sequences:
    """Sequences of token ids, one after the other in one array; `sequences[i]` is a view.

    Args:
        ids: (M): all ids, uint16 or uint32.
        offsets: (N + 1): where each sequence begins in `ids`, and where the last one ends.
    """

    ids: NDArray[np.integer[Any]]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.integer[Any]]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(N): the length of each sequence, in tokens."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.integer[Any]]) -> "Sequences":
        """Some of them, in that order, in memory."""
        lengths = self.lengths[indices]
        offsets = offsets_from_lengths(lengths)
        shift = np.repeat(self.offsets[indices] - offsets[:-1], lengths)
        return Sequences(self.ids[shift + np.arange(offsets[-1])], offsets)


@dataclass(frozen=True)
class Counts:
    """How large a text is by each measure that a loss is told in.

    Characters (code points) and bytes (UTF-8) are those of the text as it was read, before the
    tokenizer normalised it. With L the sum of the loss in nats, bits per character are
    L / ln 2 / characters, so per byte.
    """

    characters: int = 0
    bytes: int = 0
    tokens: int = 0  # of the text alone, without special tokens
    unknown: int = 0


@dataclass(frozen=True)
class DataReport:
    """The account of some rows, from reading to encoding.

    Args:
        noun: what a row is called.
        empty: by column, how often it was the cause that a row was left out.
        counts: by stored column, of the rows that were kept.
    """

    num_lines: int
    num_kept: int
    num_empty: int = 0  # rows left out because a column was empty or wholly unknown
    num_dropped: int = 0  # over-long
    num_truncated: int = 0  # over-long
    num_held_out: int = 0  # left out of the training text because they are held out too
    noun: str = "texts"
    empty: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} {self.noun} kept"]
        if self.num_empty:
            sides = [f"{_SIDES[c]} {n:,}" for c, n in self.empty.items() if c in _SIDES]
            told = f" ({', '.join(sides)})" if sides else ""
            parts.append(f"{self.num_empty:,} dropped as empty{told}")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_held_out:
            parts.append(f"{self.num_held_out:,} dropped as also held out")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to the longest allowed")
        if any(counts.tokens for counts in self.counts.values()):
            shares = [
                f"{_SIDES[c] + ' ' if c in _SIDES else ''}{n.unknown:,}"
                f" ({n.unknown / max(n.tokens, 1):.2%})"
                for c, n in self.counts.items()
            ]
            parts.append(f"unknown tokens: {', '.join(shares)}")
        return "; ".join(parts)


Column: TypeAlias = Sequences | NDArray[np.int64]


@dataclass(eq=False)
class Columns:
    """Named columns of equal length, with the report of how they were made.

    Args:
        info: what else belongs to them, as JSON: names of labels.
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

    def sequences(self, name: str) -> Sequences:
        """A column of sequences."""
        column = self.columns[name]
        assert isinstance(column, Sequences), name
        return column

    def numbers(self, name: str) -> NDArray[np.int64]:
        """A plain column (N)."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray), name
        return column


class Packer:
    """Sequences that are added one by one, kept in four bytes an id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._ids, self._lengths = vocab_size, array("I"), array("q")

    def add(self, ids: Sequence[int]) -> None:
        """One sequence more."""
        self._ids.extend(ids)
        self._lengths.append(len(ids))

    def packed(self) -> Sequences:
        """All, in the smallest dtype that holds the vocabulary: uint16 or uint32."""
        ids = np.array(self._ids, np.uint32)
        assert ids.max(initial=0) < self._vocab_size, self._vocab_size
        dtype = np.uint16 if self._vocab_size <= 2**16 else np.uint32
        return Sequences(
            ids.astype(dtype, copy=False), offsets_from_lengths(np.array(self._lengths, np.int64))
        )


def pack_ids(sequences: Iterable[Sequence[int]], vocab_size: int) -> Sequences:
    """Sequences in memory."""
    packer = Packer(vocab_size)
    for ids in sequences:
        packer.add(ids)
    return packer.packed()


def offsets_from_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N + 1): where N sequences of these lengths begin, laid end to end, and the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def write_columns(directory: Path, columns: Columns) -> None:
    """Write columns into a new folder of NumPy files, part of what `prepared` keeps whole."""
    directory.mkdir(parents=True)
    for name, column in columns.columns.items():
        arrays = (
            {f"{name}.ids": column.ids, f"{name}.offsets": column.offsets}
            if isinstance(column, Sequences)
            else {name: column}
        )
        for file, content in arrays.items():
            np.save(directory / f"{file}.npy", content, allow_pickle=False)
    _describe(directory, list(columns.columns), columns.info, columns.report)


def join_columns(directory: Path, parts: Sequence[Path], report: DataReport) -> None:
    """Write the sequences of some folders of columns, laid end to end, into a new folder.

    The files are those that `write_columns` would write of them all, with the ids of one part in
    memory at a time.
    """
    directory.mkdir(parents=True)
    names = list(open_columns(parts[0]).columns)
    for name in names:
        lengths = [open_columns(part).sequences(name).lengths for part in parts]
        offsets = offsets_from_lengths(np.concatenate(lengths))
        np.save(directory / f"{name}.offsets.npy", offsets, allow_pickle=False)
        dtype = open_columns(parts[0]).sequences(name).ids.dtype
        size = int(offsets[-1])
        ids = np.lib.format.open_memmap(directory / f"{name}.ids.npy", "w+", dtype, (size,))
        end = 0
        for part in parts:
            stored = open_columns(part).sequences(name).ids
            begin, end = end, end + len(stored)
            ids[begin:end] = stored
        ids.flush()
    _describe(directory, names, {}, report)


def _describe(
    directory: Path, names: list[str], info: Mapping[str, Any], report: DataReport
) -> None:
    described = {"columns": names, "info": info, "report": asdict(report)}
    write_json(directory / _DESCRIPTION, described)


def open_columns(directory: Path) -> Columns:
    """Open what `write_columns` wrote; the ids stay on disk until they are looked at."""
    content = read_json(directory / _DESCRIPTION)

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
