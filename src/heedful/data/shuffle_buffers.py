"""Epochs larger than memory: rows in random blocks, planned one shuffle buffer at a time."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar, overload

import numpy as np
from jaxtyping import Int64

Item = TypeVar("Item")

RowsOf: TypeAlias = Callable[[int, int], Int64[np.ndarray, " n"]]

BLOCK_ROWS = 1 << 17
BUFFER_BLOCKS = 8  # blocks whose rows are planned together, at most


def plan_by_buffers(
    num_rows: int,
    plan: Callable[[int, Int64[np.ndarray, " n"]], Sequence[Item]],
    *,
    seed: int,
    epoch: int,
    rows_of: RowsOf = np.arange,
) -> Sequence[Item]:
    """The batches of an epoch, planned for the rows of one shuffle buffer at a time.

    Rows are divided into blocks of `BLOCK_ROWS`; the blocks, in a random order determined by
    (seed, epoch), are divided evenly into buffers of at most `BUFFER_BLOCKS`. Only the numbers of
    the blocks are in memory. If one buffer has all rows, they are in their order. Of several
    buffers only the batches of one are in memory; all are planned once more, to count their
    batches, before the first batch is read.

    Args:
        num_rows: rows that the epoch reads.
        plan: returns the batches of a buffer, by its number and the indices of its rows.
        rows_of: returns the rows from a start up to an end; default: each row is read once.
    """
    num_blocks = -(-num_rows // BLOCK_ROWS)
    num_buffers = -(-num_blocks // BUFFER_BLOCKS)
    if num_buffers <= 1:
        return plan(0, rows_of(0, num_rows))
    # A spawn key: plans within a buffer are by the seed sequence (seed, epoch, buffer).
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    buffers = np.array_split(rng.permutation(num_blocks), num_buffers)

    def plan_buffer(number: int) -> Sequence[Item]:
        starts = (buffers[number] * BLOCK_ROWS).tolist()
        blocks = [rows_of(start, min(start + BLOCK_ROWS, num_rows)) for start in starts]
        return plan(number, np.concatenate(blocks))

    return _BufferedPlan(num_buffers, plan_buffer)


class _BufferedPlan(Sequence[Item], Generic[Item]):
    """A sequence of batches that are planned when they are read."""

    def __init__(self, num_buffers: int, plan: Callable[[int], Sequence[Item]]) -> None:
        self._num_buffers, self._plan = num_buffers, plan
        self._current: tuple[int, Sequence[Item]] = (-1, [])

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._buffer(number)[index - self._starts[number]]

    def __iter__(self) -> Iterator[Item]:
        for number in range(self._num_buffers):
            yield from self._buffer(number)

    def _buffer(self, number: int) -> Sequence[Item]:
        """The batches of a buffer; those of the last one are kept."""
        current, batches = self._current
        if current != number:
            batches = self._plan(number)
            self._current = (number, batches)
        return batches

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first batch of each buffer, and the number of all."""
        counts = (len(self._plan(number)) for number in range(self._num_buffers))
        return [*accumulate(counts, initial=0)]
