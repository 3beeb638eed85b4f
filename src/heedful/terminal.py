"""Bars of long work in a terminal, and plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from heedful.progress import Advance


class ProgressBars:
    """Shows each piece of work (`heedful.progress`) as a bar, those within another below it.

    Where `console` is no terminal, a line is printed every `line_seconds` of work instead, without
    control codes.
    """

    def __init__(self, console: Console | None = None, *, line_seconds: float = 15.0) -> None:
        self._console = console or Console()
        self._line_seconds = line_seconds
        self._progress: Progress | None = None  # while anything is shown

    @contextmanager
    def track(self, what: str, total: int | None) -> Iterator[Advance]:
        """A bar for some work; `total` None: it is not known."""
        began = said = time.monotonic()
        done = 0
        owns = self._progress is None
        bar = self._open(transient=True) if self._progress is None else self._progress
        task = bar.add_task("", total=total, what=what)

        def advance(count: int) -> None:
            nonlocal done, said
            done, now = done + count, time.monotonic()
            left = "" if total is None else _time_left(now - began, done, total)
            bar.update(task, completed=done, description=left)
            if not self._console.is_terminal and now - said >= self._line_seconds:
                said = now
                of = "" if total is None else f"/{total:,}"
                self._print(f"{what} {done:,}{of}  {left}".rstrip())

        try:
            yield advance
        finally:
            bar.remove_task(task)
            if owns:
                self.close()

    def close(self) -> None:
        """Takes the bars down, so that the terminal is usable again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open(self, *, transient: bool = False) -> Progress:
        """Begin to show bars."""
        self._progress = Progress(
            TextColumn("{task.fields[what]}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=self._console,
            expand=True,
            refresh_per_second=4,
            transient=transient,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        return self._progress

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _time_left(seconds: float, done: int, total: int) -> str:
    """Time left of `total` when `done` of it took so many seconds."""
    return f"{clock(seconds * (total - done) / max(1, done))} left"


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
