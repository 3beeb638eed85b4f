"""Columns written to a folder part by part; an interrupted writer continues at its last commit."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import TypeAdapter

from heedful.data.columns import DESCRIPTION, Columns, CorpusRange, DataReport, Sequences
from heedful.files import read_object, write_json

PROGRESS = "progress.json"  # of a writer that has not finished
_HEADER = 128  # bytes of the header of a NumPy file with a one-dimensional array
_BLOCK = 1 << 20  # lengths in memory while offsets are computed


def write_columns(directory: Path, columns: Columns) -> None:
    """Write columns into a new folder of NumPy files; `open_columns` opens it."""
    writer = ColumnsWriter(directory)
    writer.append(columns)
    writer.complete(columns.report, columns.info)


@dataclass
class _File:
    """An array of one dimension that grows; `size` is the number of its items."""

    handle: BinaryIO
    dtype: np.dtype[Any]
    size: int = 0
    header: int = _HEADER

    def append(self, array: NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        assert array.dtype == self.dtype, (array.dtype, self.dtype)
        self.handle.write(array.data)
        self.size += len(array)


class ColumnsWriter:
    """Writes columns that are appended in parts, in any number of sessions.

    The files do not depend on the borders of the parts. Nothing but the last part is in memory.

    Args:
        directory: a folder that is new, or that an unfinished writer has left: then everything
            after its last `commit` is dropped.

    Attributes:
        position: the number of the last commit; 0 at the start.
        report: the sums of the reports of all parts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.position = directory, 0
        self.report: DataReport | None = None
        self._names: list[str] = []
        self._corpora: dict[str, int] = {}  # rows by corpus, in order
        self._files: dict[str, _File] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / PROGRESS).is_file():
            self._resume(read_object(directory / PROGRESS))

    def append(self, columns: Columns) -> None:
        """Append rows of the same columns."""
        self._names = list(columns.columns)
        for name, column in columns.columns.items():
            if isinstance(column, Sequences):
                self._append(f"{name}.ids.npy", column.ids)
                lengths = column.lengths_of(slice(None)).astype(np.uint32)
                self._append(f"{name}.lengths", lengths, header=0)
            else:
                self._append(f"{name}.npy", column)
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
        for file in self._files.values():
            file.handle.flush()
            os.fsync(file.handle.fileno())
        self.position = position
        files = {name: [f.dtype.str, f.size, f.header] for name, f in self._files.items()}
        content = {
            "position": position,
            "columns": self._names,
            "corpora": self._corpora,
            "files": files,
            "report": None if self.report is None else asdict(self.report),
        }
        write_json(self.directory / PROGRESS, content)

    def complete(self, report: DataReport, info: Mapping[str, Any]) -> None:
        """Complete the folder.

        Args:
            report: to store with the columns.
            info: as in `Columns`; the ranges of corpora are added.
        """
        for name, file in self._files.items():
            if file.header:
                file.handle.seek(0)
                _write_header(file.handle, file.dtype, file.size)
            file.handle.close()
            if not file.header:
                lengths = self.directory / name
                _write_offsets(lengths, lengths.with_suffix(".offsets.npy"), file.size)
                lengths.unlink()
        if self._corpora:
            info = {**info, "corpora": self.corpora}
        description = {"columns": self._names, "info": info, "report": asdict(report)}
        write_json(self.directory / DESCRIPTION, description)
        (self.directory / PROGRESS).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files of an unfinished folder."""
        for file in self._files.values():
            with suppress(OSError):
                file.handle.close()

    def _append(self, name: str, array: NDArray[Any], *, header: int = _HEADER) -> None:
        file = self._files.get(name)
        if file is None:
            handle = (self.directory / name).open("wb")
            handle.write(b"\0" * header)
            file = self._files[name] = _File(handle, array.dtype, header=header)
        file.append(array)

    def _resume(self, progress: Mapping[str, Any]) -> None:
        self.position, self._names = progress["position"], progress["columns"]
        self._corpora = dict(progress["corpora"])
        if progress["report"] is not None:
            self.report = TypeAdapter(DataReport).validate_python(progress["report"])
        for name, (dtype, size, header) in progress["files"].items():
            handle = (self.directory / name).open("r+b")
            file = _File(handle, np.dtype(dtype), size, header)
            handle.truncate(header + size * file.dtype.itemsize)
            handle.seek(0, os.SEEK_END)
            self._files[name] = file


def _write_header(handle: BinaryIO, dtype: np.dtype[Any], size: int) -> None:
    start = handle.tell()
    description = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    npy.write_array_header_1_0(handle, description)
    assert handle.tell() - start == _HEADER, handle.tell()


def _write_offsets(lengths: Path, path: Path, count: int) -> None:
    """Write the running sums of lengths as a NumPy file: uint32 if they fit, else int64."""
    total = sum(int(block.sum()) for block in _blocks(lengths))
    dtype = np.dtype(np.uint32 if total < 2**32 else np.int64)
    with path.open("wb") as file:
        _write_header(file, dtype, count + 1)
        file.write(np.zeros(1, dtype).tobytes())
        end = 0
        for block in _blocks(lengths):
            ends = end + np.cumsum(block, dtype=np.int64)
            file.write(ends.astype(dtype).tobytes())
            end = int(ends[-1])


def _blocks(lengths: Path) -> Iterator[NDArray[np.int64]]:
    with lengths.open("rb") as file:
        while data := file.read(4 * _BLOCK):
            yield np.frombuffer(data, np.uint32).astype(np.int64)
