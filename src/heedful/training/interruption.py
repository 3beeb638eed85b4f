"""Early ends of a run: signals, after the current step or at once during an evaluation, and
evaluations that fail."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EvaluationInterrupted(BaseException):
    """A signal during an evaluation; not an `Exception`, so that no other code catches it."""


class EvaluationFailed(Exception):
    """An error in an evaluation, which is its cause; the weights are those of a complete step."""


class Interruption:
    """Turns SIGINT (Ctrl-C), SIGTERM and SIGHUP into a flag that ends a run.

    A second signal raises KeyboardInterrupt at once.
    """

    is_requested = False
    _in_evaluation = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals in the block, except those that the process ignores (nohup)."""

        def request(number: int, frame: FrameType | None) -> None:
            if self.is_requested:
                raise KeyboardInterrupt
            self.is_requested = True
            if self._in_evaluation:
                raise EvaluationInterrupted

        try:
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            handled = [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]
            before = {number: signal.signal(number, request) for number in handled}
        except ValueError:  # handlers can be set in the main thread only
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the block, a signal before or during it raises EvaluationInterrupted."""
        self._in_evaluation = True
        try:
            if self.is_requested:
                raise EvaluationInterrupted
            yield
        finally:
            self._in_evaluation = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block a signal is only recorded; it ends the evaluation around the block after it.

        For exchanges with other processes, which would wait for the rest of an interrupted one.
        """
        was_in_evaluation, self._in_evaluation = self._in_evaluation, False
        try:
            yield
        finally:
            self._in_evaluation = was_in_evaluation
        if was_in_evaluation and self.is_requested:
            raise EvaluationInterrupted
