"""A random sample of rows that are read in chunks, within limits of rows and characters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Integer

from heedful.data.packed_rows import PackedRows
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
        places: (n,), their indices among the rows of the chunk that filters keep.
    """

    keys: Float64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    places: Int64[np.ndarray, " n"]
    rows: PackedRows

    @classmethod
    def choose(
        cls,
        rows: Rows,
        keys: Float64[np.ndarray, " N"],
        sizes: Int64[np.ndarray, " N"],
        threshold: float,
    ) -> "SampledRows":
        """The rows whose keys are below a threshold."""
        places = np.flatnonzero(keys < threshold)
        places = places[np.argsort(keys[places], kind="stable")]
        return cls(keys[places], sizes[places], places, PackedRows.pack(rows.select(places)))

    def select(self, chosen: Integer[np.ndarray, " m"]) -> "SampledRows":
        """The rows at the positions `chosen`, which ascend."""
        rows = self.rows.select(chosen)
        return SampledRows(self.keys[chosen], self.sizes[chosen], self.places[chosen], rows)


class RowSample:
    """The rows with the smallest keys so far, within two limits.

    Args:
        size: the maximum number of rows; `SAMPLE_CHARACTERS` is the other limit.

    Attributes:
        threshold: all rows of the sample have smaller keys.
    """

    def __init__(self, size: int) -> None:
        self.threshold = 1.0 if size else 0.0
        self._size = size
        # The sample, and rows that the last cuts have left out; one entry for each chunk.
        self._rows: list[PackedRows] = []
        # Keys, sizes and places (see `SampledRows`) of the rows of the sample, chunk by chunk.
        self._keys, self._sizes = np.zeros(0), np.zeros(0, np.int64)
        self._places, self._chunks = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._added: list[SampledRows] = []  # since the last cut
        self._num_rows = self._num_characters = 0

    def add(self, rows: SampledRows) -> None:
        """Add the rows of the next chunk."""
        self._added.append(rows)
        self._num_rows += len(rows.keys)
        self._num_characters += int(rows.sizes.sum())
        if self._num_rows > _SLACK * self._size or self._num_characters > (
            _SLACK * SAMPLE_CHARACTERS
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
        for start, places in zip(starts, np.split(self._places, ends[:-1]), strict=False):
            order = np.argsort(places)
            indices.append(start + places[order])
            rows.append(waiting.pop().unpack(order))
        return Rows.concatenate(rows), np.concatenate(indices)

    def _cut(self) -> None:
        """Keep the rows with the smallest keys, at least one unless the size is 0."""
        self._include_added()
        order = np.argsort(self._keys, kind="stable")
        sizes = np.cumsum(self._sizes[order])
        num_fitting = int(np.searchsorted(sizes, SAMPLE_CHARACTERS, side="right"))
        num_kept = min(self._size, max(1, num_fitting))
        if num_kept < len(order):
            # The threshold never rises: rows of earlier chunks with larger keys were not kept.
            self.threshold = min(self.threshold, float(self._keys[order[num_kept]]))
        is_kept = self._keys < self.threshold
        self._keys, self._sizes = self._keys[is_kept], self._sizes[is_kept]
        self._places, self._chunks = self._places[is_kept], self._chunks[is_kept]
        self._num_rows, self._num_characters = len(self._keys), int(self._sizes.sum())
        counts = np.bincount(self._chunks, minlength=len(self._rows))
        sizes_before = np.fromiter(map(len, self._rows), np.int64, len(self._rows))
        for chunk in np.flatnonzero(2 * counts < sizes_before).tolist():
            self._rows[chunk] = self._rows[chunk].first(int(counts[chunk]))

    def _include_added(self) -> None:
        """Append the rows added since the last cut to those of the sample."""
        added, first = self._added, len(self._rows)
        counts = [len(part.keys) for part in added]
        self._keys = np.concatenate([self._keys, *(part.keys for part in added)])
        self._sizes = np.concatenate([self._sizes, *(part.sizes for part in added)])
        self._places = np.concatenate([self._places, *(part.places for part in added)])
        numbers = np.repeat(np.arange(first, first + len(added)), counts)
        self._chunks = np.concatenate([self._chunks, numbers])
        self._rows += [part.rows for part in added]
        self._added = []
