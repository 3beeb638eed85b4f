"""Signals that end a run: after its step, or at once where it evaluates."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EvaluationInterrupted(BaseException):
    """A signal arrived in an evaluation; no `Exception`, so that nothing else handles it."""


class Interruption:
    """Whether Ctrl-C, SIGTERM or SIGHUP has asked a run to end.

    A second signal ends the process at once, as without this class.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._in_evaluation = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals in the block, but for those that the caller ignores (nohup)."""

        def request(number: int, frame: FrameType | None) -> None:
            if self.is_requested:
                raise KeyboardInterrupt
            self.is_requested = True
            if self._in_evaluation:
                raise EvaluationInterrupted

        try:
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            handled = [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]
            before = {each: signal.signal(each, request) for each in handled}
        except ValueError:  # not in the main thread: there the caller decides
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A signal before or in the block raises EvaluationInterrupted in it."""
        self._in_evaluation = True
        try:
            if self.is_requested:
                raise EvaluationInterrupted
            yield
        finally:
            self._in_evaluation = False
