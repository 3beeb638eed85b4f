"""Progress of long work: reported by the code that does it, displayed where the caller chooses."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Advance = Callable[[int], None]  # called with the number of items done since the last call
Display = Callable[[str, int | None], AbstractContextManager[Advance]]
PrintLine = Callable[[str], None]  # prints one line of text

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def use_display(display: Display | None) -> Iterator[None]:
    """Display the work tracked in the block by `display(description, total)`; None: do not."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def track(description: str, total: int | None) -> Iterator[Advance]:
    """Report work on `total` items (None: unknown) by calls of the function that is yielded."""
    display = _display.get()
    if display is None:
        yield lambda count: None
        return
    with display(description, total) as advance:
        yield advance


def has_display() -> bool:
    """True if progress is displayed; for libraries with progress bars."""
    return _display.get() is not None
