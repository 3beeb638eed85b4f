"""A random sample of rows that are read in chunks, within limits of rows and characters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer
from numpy.typing import NDArray

from heedful.data.rows import Rows

SAMPLE_CHARACTERS = 1 << 28  # of the texts that a tokenizer is trained on
_SLACK = 1.25  # a sample is cut to its size when it is larger by this factor


@dataclass(frozen=True)
class SampledRows:
    """Rows of a chunk that may belong to the sample, in the order of their keys.

    Those that belong to a smaller sample are the first ones: no others need to be copied.

    Attributes:
        keys: (n,), by which they are sampled, ascending.
        sizes: (n,), in characters.
        indices: (n,), of the rows among those of the chunk that filters keep.
    """

    keys: Float64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    indices: Int64[np.ndarray, " n"]
    rows: "PackedRows"

    @classmethod
    def choose(
        cls,
        rows: Rows,
        keys: Float64[np.ndarray, " N"],
        sizes: Int64[np.ndarray, " N"],
        threshold: float,
    ) -> "SampledRows":
        """The rows whose keys are below a threshold."""
        indices = np.flatnonzero(keys < threshold)
        indices = indices[np.argsort(keys[indices], kind="stable")]
        return cls(keys[indices], sizes[indices], indices, PackedRows.pack(rows.select(indices)))

    def select(self, chosen: Integer[np.ndarray, " m"]) -> "SampledRows":
        """The rows at the positions `chosen`, which ascend."""
        rows = self.rows.select(chosen)
        return SampledRows(self.keys[chosen], self.sizes[chosen], self.indices[chosen], rows)

    def filtered(self, is_kept: Bool[np.ndarray, " N"]) -> "SampledRows":
        """The rows after further filters, which keep the rows of the chunk where it is True."""
        left = self.select(np.flatnonzero(is_kept[self.indices]))
        return replace(left, indices=np.searchsorted(np.flatnonzero(is_kept), left.indices))


class RowSample:
    """The rows with the smallest keys so far, within two limits.

    Args:
        size: the maximum number of rows; `SAMPLE_CHARACTERS` is the other limit. None: all rows.

    Attributes:
        threshold: all rows of the sample have smaller keys.
    """

    def __init__(self, size: int | None) -> None:
        self.threshold = 0.0 if size == 0 else 1.0
        self._most_rows = inf if size is None else size
        self._most_characters = inf if size is None else SAMPLE_CHARACTERS
        # The sample, and rows that the last cuts have left out; one entry for each chunk.
        self._rows: list["PackedRows"] = []
        # Keys, sizes and indices (see `SampledRows`) of the rows of the sample, chunk by chunk.
        self._keys, self._sizes = np.zeros(0), np.zeros(0, np.int64)
        self._indices, self._chunks = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._added: list[SampledRows] = []  # since the last cut
        self._num_rows = self._num_characters = 0

    def add(self, rows: SampledRows) -> None:
        """Add the rows of the next chunk."""
        self._added.append(rows)
        self._num_rows += len(rows.keys)
        self._num_characters += int(rows.sizes.sum())
        if (
            self._num_rows > _SLACK * self._most_rows
            or self._num_characters > _SLACK * self._most_characters
        ):
            self._cut()

    def rows(self, starts: Sequence[int]) -> tuple[Rows, Int64[np.ndarray, " S"]]:
        """The sample, in the order of the rows, and the indices of its rows among all.

        The sample is empty afterwards: packed rows are deleted when they are unpacked.

        Args:
            starts: the index of the first row of each chunk.
        """
        self._cut()
        ends = np.cumsum(np.bincount(self._chunks, minlength=len(self._rows)))
        waiting, self._rows = self._rows[::-1], []
        indices, rows = [], []
        for start, of_chunk in zip(starts, np.split(self._indices, ends[:-1]), strict=False):
            order = np.argsort(of_chunk)
            indices.append(start + of_chunk[order])
            rows.append(waiting.pop().unpack(order))
        return Rows.concatenate(rows), np.concatenate(indices)

    def _cut(self) -> None:
        """Keep the rows with the smallest keys, at least one unless the size is 0."""
        self._include_added()
        order = np.argsort(self._keys, kind="stable")
        sizes = np.cumsum(self._sizes[order])
        num_fitting = int(np.searchsorted(sizes, self._most_characters, side="right"))
        num_kept = int(min(self._most_rows, max(1, num_fitting)))
        if num_kept < len(order):
            # The threshold never rises: rows of earlier chunks with larger keys were not kept.
            self.threshold = min(self.threshold, float(self._keys[order[num_kept]]))
        is_kept = self._keys < self.threshold
        self._keys, self._sizes = self._keys[is_kept], self._sizes[is_kept]
        self._indices, self._chunks = self._indices[is_kept], self._chunks[is_kept]
        self._num_rows, self._num_characters = len(self._keys), int(self._sizes.sum())
        counts = np.bincount(self._chunks, minlength=len(self._rows))
        sizes_before = np.fromiter(map(len, self._rows), np.int64, len(self._rows))
        for chunk in np.flatnonzero(2 * counts < sizes_before).tolist():
            self._rows[chunk] = self._rows[chunk].first(int(counts[chunk]))

    def _include_added(self) -> None:
        """Append the rows added since the last cut to those of the sample."""
        added, first = self._added, len(self._rows)
        counts = [len(rows.keys) for rows in added]
        self._keys = np.concatenate([self._keys, *(rows.keys for rows in added)])
        self._sizes = np.concatenate([self._sizes, *(rows.sizes for rows in added)])
        self._indices = np.concatenate([self._indices, *(rows.indices for rows in added)])
        numbers = np.repeat(np.arange(first, first + len(added)), counts)
        self._chunks = np.concatenate([self._chunks, numbers])
        self._rows += [rows.rows for rows in added]
        self._added = []


@dataclass(frozen=True)
class PackedRows:
    """N rows of text as a few large objects, which are small in memory and cheap to send.

    Attributes:
        texts: for each column the texts, joined, in UTF-8.
        borders: for each column (M,), M = N + 1: the index of the first byte of each text in the
            joined ones, and the number of all bytes.
        sources, locations: as in `Rows`.
    """

    texts: Mapping[str, bytes]
    borders: Mapping[str, Int64[np.ndarray, " M"]]
    sources: tuple[str, ...] = ()
    locations: NDArray[np.int64] | None = None

    @classmethod
    def pack(cls, rows: Rows) -> "PackedRows":
        """Pack rows; their report is left out."""
        cells = {
            name: [text.encode("utf-8", "surrogatepass") for text in texts]
            for name, texts in rows.columns.items()
        }
        return cls._joined(cells, rows.sources, rows.locations)

    def __len__(self) -> int:
        return len(next(iter(self.borders.values()))) - 1

    def select(self, indices: Integer[np.ndarray, " m"]) -> "PackedRows":
        """The rows at `indices`, in that order."""
        cells = {name: self._cells(name, indices) for name in self.texts}
        locations = None if self.locations is None else self.locations[:, indices]
        return self._joined(cells, self.sources, locations)

    def first(self, count: int) -> "PackedRows":
        """The first rows."""
        borders = {name: ends[: count + 1].copy() for name, ends in self.borders.items()}
        texts = {name: data[: int(borders[name][-1])] for name, data in self.texts.items()}
        locations = None if self.locations is None else self.locations[:, :count].copy()
        return PackedRows(texts, borders, self.sources, locations)

    def unpack(self, indices: Integer[np.ndarray, " m"]) -> Rows:
        """The rows at `indices`, in that order."""
        columns = {
            name: [text.decode("utf-8", "surrogatepass") for text in self._cells(name, indices)]
            for name in self.texts
        }
        locations = None if self.locations is None else self.locations[:, indices]
        return Rows(columns, None, self.sources, locations)

    def _cells(self, name: str, indices: Integer[np.ndarray, " m"]) -> list[bytes]:
        """The texts of a column at `indices`, in UTF-8."""
        data, borders = self.texts[name], self.borders[name]
        starts, ends = borders[indices].tolist(), borders[indices + 1].tolist()
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    @classmethod
    def _joined(
        cls,
        cells: Mapping[str, list[bytes]],
        sources: tuple[str, ...],
        locations: NDArray[np.int64] | None,
    ) -> "PackedRows":
        """Rows with these texts in UTF-8 by column."""
        texts = {name: b"".join(column) for name, column in cells.items()}
        borders = {
            name: np.cumsum([0, *map(len, column)], dtype=np.int64)
            for name, column in cells.items()
        }
        return cls(texts, borders, sources, locations)
