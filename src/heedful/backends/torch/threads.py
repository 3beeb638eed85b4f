"""The number of torch threads of a pass: small passes are faster with one thread.

A decoding step of a small model is a hundred matrix products of microseconds each, and all threads
are synchronized after each product; beside another busy process a thread is often late. More
than one thread is used only where a step is long (docs/log.md has the figures), and not more than
other programs leave cores free.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from heedful.backends.base import Settings
from heedful.openmp import limited

LONG = 2**27  # multiplications of a step that is long
READ = 8  # multiplications that take as long as reading their weight from memory


class _Pass(threading.local):
    """Of the present pass in each Python thread: the most torch threads that it takes, of which
    other programs leave some; None: it takes a fixed number, or there is no pass."""

    reducible: int | None = None


_pass = _Pass()


class ThreadPolicy:
    """Sets the number of torch threads for each pass.

    Args:
        settings: threads of a pass; None: by the size of the pass, and fewer beside other programs.
        num_weights: returns the number of weights that a new token is multiplied with
            (`weights_of_step`); called once, if the settings have no number of threads.
    """

    def __init__(self, settings: Settings, num_weights: Callable[[], int] = int) -> None:
        self._settings = settings
        self._num_weights = num_weights
        self._weights: int | None = None

    def for_tokens(self, count: int) -> AbstractContextManager[None]:
        """A context manager for a pass over `count` tokens."""
        threads = self._settings.threads
        if threads is not None:
            return run_with(threads, may_reduce=self._settings.may_reduce)
        if self._weights is None:
            self._weights = self._num_weights()
        threads = threads_for(self._weights, count, torch.get_num_threads())
        return run_with(threads, may_reduce=True)


def threads_for(weights: int, rows: int, available: int) -> int:
    """The number of the available threads for a step of `rows` tokens through `weights`."""
    return available if weights * max(rows, READ) >= LONG else 1


def weights_of_step(net: Any) -> int:
    """The number of weights that a new token is multiplied with: of decoder and output head."""
    parts = [getattr(net, name, None) for name in ("decoder", "head")]
    if parts[0] is None:
        parts = [getattr(net, "encoder", net)]
    weights = {id(p): p for part in parts if part is not None for p in part.parameters()}
    return sum(p.numel() for p in weights.values() if p.dim() > 1)


@contextmanager
def run_with(count: int, *, may_reduce: bool = False) -> Iterator[None]:
    """Run torch with `count` threads, then restore the former number.

    Args:
        may_reduce: take fewer beside other programs; `adapt` then takes as many as are free.
    """
    before, outer = torch.get_num_threads(), _pass.reducible
    _pass.reducible = count if may_reduce else None
    _set_threads(limited(count) if may_reduce else count)
    try:
        yield
    finally:
        _pass.reducible = outer
        _set_threads(before)


def adapt() -> None:
    """Between steps of a pass that may reduce its threads: take as many as are free by now."""
    if _pass.reducible is not None:
        _set_threads(limited(_pass.reducible))


def _set_threads(count: int) -> None:
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
