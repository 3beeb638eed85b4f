"""One evaluation whose batches and outputs are computed by several processes.

Inside of `share_evaluation` all processes call the same function, which divides its work by
`current_shares` and gathers the results. Outside of it this process has the whole work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from heedful.errors import UserError, error_line
from heedful.processes import Processes

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class _Message(NamedTuple):
    """The part of a process in one exchange.

    Attributes:
        state: running, at its end, interrupted, or failed.
        value: what the process contributes; the description of its error.
    """

    state: Literal["running", "done", "interrupted", "failed"]
    value: Any = None


class _Ended(BaseException):
    """Another process has ended the evaluation; not an `Exception`, so no other code catches it."""

    def __init__(self, messages: Sequence[_Message]) -> None:
        super().__init__("another process has ended the evaluation")
        self.messages = messages


class Shares:
    """The shares of the processes in an evaluation.

    Args:
        processes: those that take part.
        deferred: a context in which a signal does not interrupt the evaluation.

    Attributes:
        part: the items of this process in any sequence that all processes have.
        is_connected: False after an exchange that failed, since a process has ended.
    """

    def __init__(
        self,
        processes: Processes,
        deferred: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._processes, self._deferred = processes, deferred
        self.part = slice(processes.rank, None, processes.count)
        self.is_connected = True

    def gather(self, value: _Result) -> list[_Result]:
        """The value of each process, by rank, in all of them, which call this equally often."""
        messages = self.exchange(_Message("running", value))
        if any(message.state in ("interrupted", "failed") for message in messages):
            raise _Ended(messages)
        return [message.value for message in messages]

    def map(
        self,
        function: Callable[[Sequence[_Item]], Sequence[_Result]],
        items: Sequence[_Item],
    ) -> list[_Result]:
        """The results of a function of several items, by item; each process has some of them.

        Args:
            function: returns one result for each item; not called without items.
        """
        own = items[self.part]
        parts = self.gather([*function(own)] if own else [])
        return [parts[index % len(parts)][index // len(parts)] for index in range(len(items))]

    def from_main(self, function: Callable[[], _Result]) -> _Result:
        """The result of a function that only the main process calls, in all of them."""
        results = self.gather(function() if self._processes.is_main else None)
        result: Any = results[0]
        return result

    def exchange(self, message: _Message) -> list[_Message]:
        """The messages of all processes, by rank."""
        try:
            with self._deferred():
                return self._processes.gather(message)
        except Exception:
            self.is_connected = False
            raise


_current: ContextVar[Shares | None] = ContextVar("shares", default=None)


def current_shares() -> Shares:
    """The shares of the evaluation in progress; outside of one all work is of this process."""
    return _current.get() or Shares(Processes())


def from_main(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: only the main process of an evaluation calls the function, for all of them."""

    @wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        return current_shares().from_main(lambda: function(*arguments, **options))

    return call


def share_evaluation(
    processes: Processes,
    evaluate: Callable[[], _Result | None],
    deferred: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Result | None:
    """Call a function in all processes, and return the result of the main one in all.

    Args:
        evaluate: divides its work by `current_shares`; None: it was interrupted in this process.
        deferred: a context in which a signal does not interrupt the function.

    Returns:
        None if the function was interrupted in any process.

    Raises:
        UserError: the function raised an error in some process, which is named; in all processes.
    """
    if processes.count == 1:
        return evaluate()
    with _shares_of(processes, deferred) as shares:
        try:
            result = evaluate()
            message = _Message("interrupted" if result is None else "done")
            if result is not None and processes.is_main:
                message = _Message("done", result)
        except _Ended as ended:
            messages = ended.messages
        except Exception as error:
            if not shares.is_connected:
                raise
            messages = shares.exchange(_Message("failed", error_line(error)))
        else:
            messages = shares.exchange(message)
    for rank, other in enumerate(messages):
        if other.state == "failed":
            raise UserError(f"{processes.describe(rank)}: {other.value}")
    if any(other.state == "interrupted" for other in messages):
        return None
    final: _Result = messages[0].value
    return final


@contextmanager
def _shares_of(
    processes: Processes, deferred: Callable[[], AbstractContextManager[None]]
) -> Iterator[Shares]:
    """In the block `current_shares` are those of some processes."""
    shares = Shares(processes, deferred)
    token = _current.set(shares)
    try:
        yield shares
    finally:
        _current.reset(token)
