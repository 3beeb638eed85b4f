"""One store of columns: sequences of ids and plain numbers, memory-mapped, in a folder."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer

from heedful.data.report import Report
from heedful.errors import UserError
from heedful.files import read_json, write_directory, write_json

FORMAT = "heedful-columns-1"  # goes up when anything that is stored changes its meaning


class Sequences:
    """Sequences of token ids, one after the other in one array; `sequences[i]` is a view.

    Args:
        ids: all ids, uint16 or uint32.
        offsets: where each sequence begins in `ids`, and at the end where the last one ends.
    """

    def __init__(self, ids: Integer[np.ndarray, " M"], offsets: Int64[np.ndarray, " N1"]) -> None:
        self.ids = ids
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integer[np.ndarray, " n"]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """The length of each sequence, in tokens."""
        return np.diff(self.offsets)


Column: TypeAlias = Sequences | Int64[np.ndarray, " N"]


class Columns:
    """Named columns of equal length, with the report of how they were made.

    Args:
        info: what else belongs to them, as JSON: names of labels.
    """

    def __init__(
        self, columns: Mapping[str, Column], report: Report, info: Mapping[str, Any] | None = None
    ) -> None:
        self.columns = dict(columns)
        self.report = report
        self.info = dict(info or {})
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
    """Write columns into a folder of NumPy files, which is there whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """

    def fill(beside: Path) -> None:
        kinds = {}
        for name, column in columns.columns.items():
            kinds[name] = "sequences" if isinstance(column, Sequences) else "numbers"
            arrays = (
                {f"{name}.ids": column.ids, f"{name}.offsets": column.offsets}
                if isinstance(column, Sequences)
                else {name: column}
            )
            for file, array in arrays.items():
                np.save(beside / f"{file}.npy", array, allow_pickle=False)
        content = {"format": FORMAT, "columns": kinds, "info": columns.info}
        write_json(beside / "columns.json", content | {"report": columns.report.content()})

    write_directory(directory, fill)


def open_columns(directory: Path) -> Columns:
    """Open what `write_columns` wrote; the ids stay on disk until they are looked at.

    Raises:
        UserError: a file is missing or damaged, or they are not of one store.
    """
    content = read_json(directory / "columns.json")
    broken = UserError(f"{directory} is damaged or of another version of heedful; prepare it again")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise broken
    try:
        columns = {
            name: _opened(directory, name, kind) for name, kind in content["columns"].items()
        }
        report = Report.of(content["report"])
    except (KeyError, TypeError, AttributeError):
        raise broken from None
    if {len(column) for column in columns.values()} != {report.num_kept}:
        raise broken
    return Columns(columns, report, content["info"])


def _opened(directory: Path, name: str, kind: str) -> Column:
    if kind == "numbers":
        return _mapped(directory / f"{name}.npy", (np.int64,))
    ids = _mapped(directory / f"{name}.ids.npy", (np.uint16, np.uint32))
    offsets = _mapped(directory / f"{name}.offsets.npy", (np.int64,))
    ends = (0, len(ids))
    if not len(offsets) or (offsets[0], offsets[-1]) != ends or (np.diff(offsets) < 0).any():
        raise UserError(f"{directory}: the ids and offsets of {name} differ; prepare it again")
    return Sequences(ids, offsets)


def _mapped(path: Path, dtypes: Sequence[type]) -> np.ndarray:
    """A NumPy file of one of the types as an array that stays on disk until it is looked at."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; prepare it again"
        ) from None
    except (ValueError, EOFError, SyntaxError):  # no NumPy file, or cut short
        array = None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in dtypes:
        raise UserError(f"{path} is damaged or not a column; prepare it again")
    return array
