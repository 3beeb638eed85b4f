"""Work done ahead in a thread: the batches of the next steps, while a step is computed."""

import threading
from collections.abc import Callable
from queue import Full, Queue
from typing import Generic, TypeAlias, TypeVar

Result = TypeVar("Result")
Position: TypeAlias = tuple[int, int]  # epoch and batch

STEPS_AHEAD = 4
_POLL = 0.1  # seconds after which a full queue looks whether it is closed


class Ahead(Generic[Result]):
    """Calls a pure function of a position in the data before its result is needed.

    The results and their order are those of calls at the time when they are needed.

    Args:
        load: returns the result at a position, and the position after it.
        num_epochs: later epochs are not loaded ahead; None: no limit.
    """

    def __init__(
        self,
        load: Callable[[Position], tuple[Result, Position]],
        num_epochs: int | None = None,
    ) -> None:
        self._load, self._num_epochs = load, num_epochs
        self._next: Position | None = None  # that the thread's next result belongs to
        self._queue: Queue[tuple[Result, Position] | BaseException] = Queue(STEPS_AHEAD)
        self._is_closed = threading.Event()

    def __call__(self, position: Position) -> tuple[Result, Position]:
        """The result at a position, and the position after it; raises what the function raises."""
        if position != self._next:
            self.close()
            self._start(position)
        loaded = self._queue.get()
        if isinstance(loaded, BaseException):
            self.close()
            raise loaded
        self._next = loaded[1]
        if self._num_epochs is not None and loaded[1][0] >= self._num_epochs:
            self.close()  # the thread has ended
        return loaded

    def close(self) -> None:
        """End the thread; a later call starts another one."""
        self._is_closed.set()
        self._next = None

    def _start(self, position: Position) -> None:
        self._queue, self._is_closed = Queue(STEPS_AHEAD), threading.Event()
        arguments = (position, self._queue, self._is_closed)
        # A daemon: a program that ends by an error does not wait for it.
        threading.Thread(target=self._fill, args=arguments, daemon=True).start()

    def _fill(
        self,
        position: Position,
        queue: "Queue[tuple[Result, Position] | BaseException]",
        is_closed: threading.Event,
    ) -> None:
        while not is_closed.is_set():
            try:
                loaded: tuple[Result, Position] | BaseException = self._load(position)
            except BaseException as error:  # raised again when the result is needed
                loaded = error
            while not is_closed.is_set():
                try:
                    queue.put(loaded, timeout=_POLL)
                    break
                except Full:
                    continue
            if isinstance(loaded, BaseException):
                return
            position = loaded[1]
            if self._num_epochs is not None and position[0] >= self._num_epochs:
                return
