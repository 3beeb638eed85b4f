"""Rows of text as a few large objects, which are small in memory and cheap to send."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer
from numpy.typing import NDArray

from heedful.data.rows import Rows


@dataclass(frozen=True)
class PackedRows:
    """N rows of text.

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
