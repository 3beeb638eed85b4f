"""Progress of long work: reported by the code that does it, displayed where the caller chooses.

`ProgressBars` is a display for a terminal, with plain lines elsewhere.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

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


class ProgressBars:
    """A display of `heedful.progress`: one bar for each block of work, nested blocks below it.

    If `console` is not a terminal, a line without control codes is printed every `line_seconds`
    of work instead.
    """

    def __init__(self, console: "Console | None" = None, *, line_seconds: float = 15.0) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._line_seconds = line_seconds
        self._progress: Progress | None = None  # None: no bar is displayed

    @contextmanager
    def track(self, description: str, total: int | None) -> Iterator[Advance]:
        """Display one block of work; `total` None: unknown."""
        started = last_line = time.monotonic()
        done = 0
        is_outermost = self._progress is None
        bars = self._open(transient=True) if self._progress is None else self._progress
        task = bars.add_task("", total=total, name=description)

        def advance(count: int) -> None:
            nonlocal done, last_line
            done, now = done + count, time.monotonic()
            left = ""
            if total is not None:
                rate = done / max(now - started, 1e-9)
                seconds = (now - started) * (total - done) / max(1, done)
                left = f"{rate:,.{0 if rate >= 10 else 1}f}/s, {clock(seconds)} left"
            bars.update(task, completed=done, description=left)
            if not self._console.is_terminal and now - last_line >= self._line_seconds:
                last_line = now
                of_total = "" if total is None else f"/{total:,}"
                self.print_line(f"{description} {done:,}{of_total}  {left}".rstrip())

        try:
            yield advance
        finally:
            bars.remove_task(task)
            if is_outermost:
                self.close()

    def close(self) -> None:
        """Remove the bars and restore the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open(self, *, transient: bool = False) -> "Progress":
        """Start displaying bars."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),  # names of files have brackets
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            expand=True,
            refresh_per_second=4,
            transient=transient,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        return self._progress

    def print_line(self, line: str) -> None:
        """Print a line above the bars, as it is."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
