"""The thread that runs a model: turns of its engines, as long as there is work."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

_log = logging.getLogger("heedful.serve")


class Engine(Protocol):
    """Work in turns, on one thread."""

    def turn(self) -> bool:
        """Do a part of the work; returns False if no work is queued."""

    def fail(self, error: Exception) -> None:
        """Give up all work, after a turn that raised an error."""


Fail = Callable[[Exception], None]
"""Called on the worker's thread, or on that of the caller, with the error that ends a task."""


class WorkerError(Exception):
    """The thread has ended."""


def _report(error: Exception) -> None:
    _log.error("a task failed", exc_info=error)


class Worker:
    """One thread, on which the engines of a model take turns.

    Everything that touches a net or the queues of an engine runs there, so that nothing is locked
    but the hand-over.

    Args:
        on_death: called on the thread if it ends otherwise than by `close`, which is a defect: the
            work of its engines is lost.
    """

    def __init__(
        self, name: str, engines: Sequence[Engine], on_death: Fail = lambda error: None
    ) -> None:
        self.engines = engines
        self._on_death = on_death
        self._tasks: deque[tuple[Callable[[], object], Fail]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"heedful-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object], fail: Fail = _report) -> None:
        """Call a function on the thread, before the next turn.

        Args:
            fail: called with the error that the function raises, which ends nothing else; or with
                `WorkerError` if the thread has ended, or ends before it.
        """
        with self._changed:
            if not self._has_ended:
                self._tasks.append((task, fail))
                self._changed.notify()
                return
        fail(WorkerError("the thread has ended"))

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
        """All turns, and at the end of the thread the failure of what is left."""
        error: BaseException | None = None
        try:
            self._take_turns()
        except BaseException as raised:
            error = raised
            _log.critical("the thread of a model has ended", exc_info=raised)
        with self._changed:
            self._has_ended = True
            tasks, self._tasks = list(self._tasks), deque()
        ended = WorkerError("the thread has ended")
        for _, fail in tasks:
            fail(ended)
        if error is not None:
            self._on_death(ended)

    def _take_turns(self) -> None:
        has_work = False
        while True:
            with self._changed:
                while not (has_work or self._tasks or self._is_closed):
                    self._changed.wait()
                tasks, self._tasks = list(self._tasks), deque()
                is_closed = self._is_closed
            for task, fail in tasks:
                try:
                    task()
                except Exception as error:
                    fail(error)
            if is_closed:
                return
            has_work = False
            for engine in self.engines:
                try:
                    has_work |= engine.turn()
                except Exception as error:  # a defect: none of its requests may wait for ever
                    _log.error("a turn failed", exc_info=error)
                    engine.fail(error)
