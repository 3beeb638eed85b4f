"""Progress of long work: reported by the code that works, shown where the caller asks for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Advance = Callable[[int], None]
Show = Callable[[str, int | None], AbstractContextManager[Advance]]

_show: ContextVar[Show | None] = ContextVar("show", default=None)


@contextmanager
def use_display(show: Show | None) -> Iterator[None]:
    """Have `show(what, total)` make a bar for each piece of work in the block; None: show none."""
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)


@contextmanager
def track(what: str, total: int | None) -> Iterator[Advance]:
    """A function to call with how many more of `total` are done; None: the total is not known."""
    show = _show.get()
    if show is None:
        yield lambda count: None
        return
    with show(what, total) as advance:
        yield advance


def has_display() -> bool:
    """Whether anyone looks; for libraries that draw bars of their own."""
    return _show.get() is not None
