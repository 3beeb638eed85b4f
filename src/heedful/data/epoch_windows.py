"""Epochs larger than memory: rows shuffled in blocks, batches planned in windows of blocks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar, overload

import numpy as np
from jaxtyping import Int64

Item = TypeVar("Item")

RowsOf: TypeAlias = Callable[[int, int], Int64[np.ndarray, " n"]]

BLOCK_ROWS = 1 << 17
WINDOW_BLOCKS = 8  # blocks whose rows are planned together, at most


def window_rows(
    num_rows: int, *, seed: int, epoch: int, rows_of: RowsOf = np.arange
) -> list[Callable[[], Int64[np.ndarray, " n"]]]:
    """Functions that return the rows of each window of an epoch.

    Rows are divided into blocks of `BLOCK_ROWS`; the blocks, in a random order determined by
    (seed, epoch), are divided evenly into windows of at most `WINDOW_BLOCKS`. Only the numbers of
    the blocks are in memory. If one window has all rows, they are in their order.

    Args:
        num_rows: rows that the epoch reads.
        rows_of: returns those from a start up to an end; default: each row is read once.
    """
    num_blocks = -(-num_rows // BLOCK_ROWS)
    num_windows = max(1, -(-num_blocks // WINDOW_BLOCKS))
    blocks = np.arange(num_blocks)
    if num_windows > 1:
        # A spawn key: plans within a window are by the seed sequence (seed, epoch, window).
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
        blocks = rng.permutation(num_blocks)

    def rows_of_blocks(numbers: Int64[np.ndarray, " b"]) -> Int64[np.ndarray, " n"]:
        """The rows of some blocks."""
        ranges = [
            rows_of(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, num_rows))
            for block in numbers.tolist()
        ]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def function_of(numbers: Int64[np.ndarray, " b"]) -> Callable[[], Int64[np.ndarray, " n"]]:
        """`rows_of_blocks` of these blocks."""
        return lambda: rows_of_blocks(numbers)

    return [function_of(numbers) for numbers in np.array_split(blocks, num_windows)]


def plan_windows_of_rows(num_windows: int, plan: Callable[[int], Sequence[Item]]) -> Sequence[Item]:
    """The batches of all windows, by a function that plans one window.

    Of several windows only the batches of one are in memory; all are planned once more, to count
    their batches, before the first batch is read.
    """
    return plan(0) if num_windows == 1 else _WindowedPlan(num_windows, plan)


class _WindowedPlan(Sequence[Item], Generic[Item]):
    """A sequence of batches that are planned when they are read."""

    def __init__(self, num_windows: int, plan: Callable[[int], Sequence[Item]]) -> None:
        self._num_windows, self._plan = num_windows, plan
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
        return self._window(number)[index - self._starts[number]]

    def __iter__(self) -> Iterator[Item]:
        for number in range(self._num_windows):
            yield from self._window(number)

    def _window(self, number: int) -> Sequence[Item]:
        """The batches of a window; those of the last one are kept."""
        current, batches = self._current
        if current != number:
            batches = self._plan(number)
            self._current = (number, batches)
        return batches

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first batch of each window, and the number of all."""
        counts = (len(self._plan(number)) for number in range(self._num_windows))
        return [*accumulate(counts, initial=0)]
