"""A random sample of rows that are read in chunks, within limits of rows and characters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from jaxtyping import Bool, Float64, Int64

from heedful.data.rows import Rows

SAMPLE_CHARACTERS = 1 << 28  # of the texts that a tokenizer is trained on
_SLACK = 1.25  # a sample is cut to its size when it is larger by this factor


@dataclass(frozen=True)
class SampledRows:
    """Rows of a chunk that may belong to the sample, in their order.

    Attributes:
        keys: (n,), random numbers by which rows are sampled.
        sizes: (n,), in characters.
        indices: (n,), of the rows among those of the chunk that filters keep.
    """

    keys: Float64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    indices: Int64[np.ndarray, " n"]
    rows: Rows

    def select(self, is_chosen: Bool[np.ndarray, " n"]) -> "SampledRows":
        """The rows at which `is_chosen` is True."""
        if is_chosen.all():
            return self
        rows = self.rows.select(np.flatnonzero(is_chosen))
        return SampledRows(
            self.keys[is_chosen], self.sizes[is_chosen], self.indices[is_chosen], rows
        )

    def filtered(self, is_kept: Bool[np.ndarray, " N"]) -> "SampledRows":
        """The rows after further filters, which keep the rows of the chunk where it is True."""
        left = self.select(is_kept[self.indices])
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
        self._chunks: list[SampledRows] = []
        self._num_rows = self._num_characters = 0

    def add(self, rows: SampledRows) -> None:
        """Add the rows of the next chunk."""
        self._chunks.append(rows)
        self._num_rows += len(rows.keys)
        self._num_characters += int(rows.sizes.sum())
        if (
            self._num_rows > _SLACK * self._most_rows
            or self._num_characters > _SLACK * self._most_characters
        ):
            self._cut()

    def rows(self, starts: Sequence[int]) -> tuple[Rows, Int64[np.ndarray, " S"]]:
        """The sample, in the order of the rows, and the indices of its rows among all.

        Args:
            starts: the index of the first row of each chunk.
        """
        self._cut()
        pairs = zip(starts, self._chunks, strict=False)
        indices = np.concatenate([start + chunk.indices for start, chunk in pairs])
        return Rows.concatenate([chunk.rows for chunk in self._chunks]), indices

    def _cut(self) -> None:
        """Keep the rows with the smallest keys, at least one unless the size is 0."""
        keys = np.concatenate([chunk.keys for chunk in self._chunks])
        sizes = np.concatenate([chunk.sizes for chunk in self._chunks])
        order = np.argsort(keys, kind="stable")
        num_fitting = np.searchsorted(np.cumsum(sizes[order]), self._most_characters, side="right")
        num_kept = int(min(self._most_rows, max(1, int(num_fitting))))
        if num_kept < len(order):
            # The threshold never rises: rows of earlier chunks with larger keys were not kept.
            self.threshold = min(self.threshold, float(keys[order[num_kept]]))
        self._chunks = [chunk.select(chunk.keys < self.threshold) for chunk in self._chunks]
        self._num_rows = sum(len(chunk.keys) for chunk in self._chunks)
        self._num_characters = sum(int(chunk.sizes.sum()) for chunk in self._chunks)
