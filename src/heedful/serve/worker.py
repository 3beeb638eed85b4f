"""The thread that runs a model: turns of its engines, as long as there is work."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol


class Engine(Protocol):
    """Work in turns, on one thread."""

    def turn(self) -> bool:
        """Do a part of the work; returns False if no work is queued."""

    def fail(self, error: Exception) -> None:
        """Give up all work, after a turn that raised an error."""


class Worker:
    """One thread, on which the engines of a model take turns.

    Everything that touches a net or the queues of an engine runs there, so that nothing is locked
    but the hand-over.
    """

    def __init__(self, name: str, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"heedful-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Call a function on the thread, before the next turn."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its present turn and the functions that wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @property
    def is_alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        has_work = False
        while True:
            with self._changed:
                while not (has_work or self._tasks or self._is_closed):
                    self._changed.wait()
                tasks, self._tasks = list(self._tasks), deque()
                is_closed = self._is_closed
            for task in tasks:
                task()
            if is_closed:
                return
            has_work = False
            for engine in self.engines:
                try:
                    has_work |= engine.turn()
                except Exception as error:  # a defect: none of its requests may wait for ever
                    logging.getLogger("heedful.serve").error("a turn failed", exc_info=error)
                    engine.fail(error)
