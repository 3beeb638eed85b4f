"""Rows of text as a few large objects, which are small in memory and cheap to send."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64, Integer
from numpy.typing import NDArray

from heedful.data.rows import Rows


@dataclass(frozen=True)
class PackedRows:
    """N rows of text, n of which are chosen.

    Attributes:
        texts: for each column the texts of all rows, joined, in UTF-8.
        borders: for each column (M,), M = N + 1: the index of the first character of each text in
            the joined ones, and the number of all characters.
        chosen: (n,), the indices of the chosen rows.
        sources, locations: as in `Rows`.
    """

    texts: Mapping[str, bytes]
    borders: Mapping[str, Int64[np.ndarray, " M"]]
    chosen: Int64[np.ndarray, " n"]
    sources: tuple[str, ...] = ()
    locations: NDArray[np.int64] | None = None

    @classmethod
    def pack(cls, rows: Rows) -> "PackedRows":
        """Pack rows, all of which are chosen; their report is left out."""
        texts, borders = {}, {}
        for name, cells in rows.columns.items():
            texts[name] = "".join(cells).encode("utf-8", "surrogatepass")
            lengths = np.fromiter(map(len, cells), np.int64, len(cells))
            borders[name] = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64)
        return cls(texts, borders, np.arange(len(rows)), rows.sources, rows.locations)

    def __len__(self) -> int:
        return len(self.chosen)

    def select(self, indices: Integer[np.ndarray, " m"]) -> "PackedRows":
        """The chosen rows at `indices`; packed anew if they are less than half of the N rows."""
        selected = replace(self, chosen=self.chosen[indices])
        num_rows = len(next(iter(self.borders.values()))) - 1
        return selected if 2 * len(selected) >= num_rows else PackedRows.pack(selected.unpack())

    def unpack(self) -> Rows:
        """The chosen rows."""
        columns = {}
        for name, data in self.texts.items():
            text, borders = data.decode("utf-8", "surrogatepass"), self.borders[name]
            starts, ends = borders[self.chosen].tolist(), borders[self.chosen + 1].tolist()
            columns[name] = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        locations = None if self.locations is None else self.locations[:, self.chosen]
        return Rows(columns, None, self.sources, locations)
