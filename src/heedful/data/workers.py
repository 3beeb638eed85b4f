"""Functions mapped over chunks by a pool of processes, with results in order."""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

from heedful.data.prepared import Resumable

Item = TypeVar("Item")
Result = TypeVar("Result")

POOL_BYTES = 1 << 24  # of text; less is done sooner by one process than a pool is started
# Threshold of the garbage collector, in objects. Reference counts free the objects of a chunk; a
# collection reads all lists of ids again, a full one also the objects of all modules, which takes
# 150 ms if torch is loaded.
_GC_THRESHOLD = 50_000
_BATCHES_A_WORKER = 2  # that are being processed, or wait: one result is not awaited idly


def choose_workers(number: int | None, num_bytes: int) -> int:
    """The number of processes for some bytes of text; `number` None: by the cores and the size."""
    if number is not None:
        return number
    if num_bytes < POOL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    *,
    batch: int = 1,
    work: str = "the preparation",
    setting: str = "data.workers",
) -> Iterator[Result]:
    """`map(function, items)` by a pool of processes, or in this process for one worker.

    At most a few batches for each worker are in memory. The function is sent to each worker once.
    After an interruption the workers are terminated.

    Args:
        batch: number of items that are sent at once, since each message costs some tenths of a
            millisecond.
        work: name of the work, for messages.
        setting: name of the setting of the number of workers, for messages.

    Raises:
        UserError: as the function; a worker was killed.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        if num_workers == 1:
            yield from map(function, items)
        else:
            yield from _map_by_pool(function, items, num_workers, batch, work, setting)
    finally:
        gc.set_threshold(*threshold)


def _map_by_pool(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    batch: int,
    work: str,
    setting: str,
) -> Iterator[Result]:
    """`map_in_order` for several workers."""
    others = {process.pid for process in multiprocessing.active_children()}
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), _start_worker, (function,)
    )
    pending: deque[Future[list[Result]]] = deque()
    rest = iter(items)
    try:
        while some := [*islice(rest, batch)]:
            with without_main_module():  # submitting starts processes
                pending.append(pool.submit(_call, pickle.dumps(some)))
            if len(pending) > _BATCHES_A_WORKER * num_workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise Resumable(
            f"a worker process of {work} was killed, as when memory runs out; start again to "
            f"continue, with fewer {setting}"
        ) from None
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        for process in multiprocessing.active_children():
            if process.pid not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[Any], Any] | None = None  # of a worker process


def _start_worker(function: Callable[[Any], Any]) -> None:
    """Initialize a worker process: interruptions are handled by its parent, whose end ends it."""
    global _function  # noqa: PLW0603
    _function = function
    gc.set_threshold(_GC_THRESHOLD)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(pickled: bytes) -> list[Any]:
    """The function's results for a batch, unpickled here: an error of that is one of the call."""
    assert _function is not None
    return [*map(_function, pickle.loads(pickled))]


@contextmanager
def without_main_module() -> Iterator[None]:
    """Start processes that do not run the program of their parent once more.

    A new process imports the main module of its parent. A worker needs nothing of it: it would only
    hold more memory (torch), and would train if the program is not guarded by
    `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
