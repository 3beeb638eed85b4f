"""One store of columns: sequences of ids and plain numbers, memory-mapped, in a folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer
from pydantic import TypeAdapter

from heedful.data.report import Report
from heedful.files import read_json, write_json

_DESCRIPTION = "columns.json"


@dataclass(eq=False)
class Sequences:
    """Sequences of token ids, one after the other in one array; `sequences[i]` is a view.

    Args:
        ids: all ids, uint16 or uint32.
        offsets: where each sequence begins in `ids`, and at the end where the last one ends.
    """

    ids: Integer[np.ndarray, " M"]
    offsets: Int64[np.ndarray, " N1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integer[np.ndarray, " n"]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """The length of each sequence, in tokens."""
        return np.diff(self.offsets)


Column: TypeAlias = Sequences | Int64[np.ndarray, " N"]


@dataclass(eq=False)
class Columns:
    """Named columns of equal length, with the report of how they were made.

    Args:
        info: what else belongs to them, as JSON: names of labels.
    """

    columns: Mapping[str, Column]
    report: Report
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

    def numbers(self, name: str) -> Int64[np.ndarray, " N"]:
        """A plain column."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray), name
        return column


def pack_ids(sequences: Iterable[Sequence[int]], vocab_size: int) -> Sequences:
    """Sequences in memory, in the smallest dtype that holds the vocabulary: uint16 or uint32."""
    listed = list(sequences)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    lengths = np.fromiter(map(len, listed), np.int64, len(listed))
    ids = np.fromiter(chain.from_iterable(listed), np.int64, int(lengths.sum()))
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size), vocab_size
    return Sequences(ids.astype(dtype), offsets_of(lengths))


def joined(parts: Sequence[Sequences]) -> Sequences:
    """All sequences of several, which have one dtype."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Sequences(np.concatenate([part.ids for part in parts]), offsets_of(lengths))


def offsets_of(lengths: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N1"]:
    """Where sequences of these lengths begin, laid end to end, and where the last one ends."""
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
        for file, array in arrays.items():
            np.save(directory / f"{file}.npy", array, allow_pickle=False)
    content = {"columns": list(columns.columns), "info": columns.info}
    write_json(directory / _DESCRIPTION, content | {"report": asdict(columns.report)})


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
    report = TypeAdapter(Report).validate_python(content["report"])
    return Columns(columns, report, content["info"])
