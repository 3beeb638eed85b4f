"""Batches of rows of similar length, and work on them by the workers of a backend."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from heedful.backends.base import Backend
from heedful.options import DEFAULTS
from heedful.pipelines.inputs import check_batch_tokens

Result = TypeVar("Result")


def by_length(rows: Sequence[Sequence[int]], budget: int, workers: int = 1) -> Iterator[list[int]]:
    """Batches of the indices of rows of similar length, the longest first; without empty rows.

    The first batch needs the most memory. Each worker gets a part of every batch (`split_among`),
    of at most `budget` padded tokens or a single row.
    """
    lengths = [len(ids) for ids in rows]
    nonempty = filter(lengths.__getitem__, range(len(rows)))
    order = sorted(nonempty, key=lengths.__getitem__, reverse=True)
    while order:
        count = workers * max(1, budget // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def split_among(workers: int, batches: Iterable[list[int]]) -> list[list[int]]:
    """Each batch divided among workers: worker k gets rows k, k + workers and so on.

    Rows of `by_length` are sorted, so that the parts have similar lengths and take equal time.
    """
    return [batch[k::workers] for batch in batches for k in range(min(workers, len(batch)))]


def in_batches(
    backend: Backend,
    rows: list[list[int]],
    width: int,
    run: Callable[[list[int]], list[np.ndarray]],
    batch_tokens: int | None,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Results (N, D) of `run(indices of a batch)`; see `map_batches`. Empty rows have zeros."""
    results = np.zeros((len(rows), width), np.float32)
    for indices, values in map_batches(backend, rows, run, batch_tokens):
        results[indices] = values
        if progress is not None:
            progress(len(indices))
    return results


def map_batches(
    backend: Backend,
    rows: list[list[int]],
    run: Callable[[list[int]], Result],
    batch_tokens: int | None,
    most_tokens: int | None = None,
) -> Iterator[tuple[list[int], Result]]:
    """The indices of each batch and `run` of them, in threads for the backend's workers.

    Args:
        batch_tokens: padded tokens of a batch; None: as measured for the backend.
        most_tokens: limit of it; None: none.
    """
    from concurrent.futures import ThreadPoolExecutor

    check_batch_tokens(batch_tokens)
    workers = backend.settings.workers
    budget = batch_tokens or backend.settings.batch_tokens or DEFAULTS["batch_tokens"]
    batches = split_among(workers, by_length(rows, min(budget, most_tokens or budget), workers))
    pool = ThreadPoolExecutor(workers)
    try:
        results = (pool.map if workers > 1 else map)(run, batches)
        yield from zip(batches, results, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
