"""Batches of whole rows: translations, classes, vectors, and generation by compiled backends."""

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from heedful.errors import DamagedError, UserError

_SEARCHED = 4_096  # rows among which those of similar length are looked for

Deliveries = list[Callable[[], object]]
"""Calls that the event loop is to make, in their order."""
OnOutput = Callable[[int, Any], None]
"""Called with the index of a row and its result."""
Run = Callable[[list[Any], OnOutput], list[Any]]


def _new_future() -> "asyncio.Future[list[Any]]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Job:
    """The rows of one request, which are queued together and may run in different batches.

    Attributes:
        key: rows of jobs with equal keys may share a batch.
        rows: arguments of `run`, one for each text.
        sizes: tokens of each row.
        run: returns the results of some rows, in their order. It may pass the index and the result
            of a row to its second argument as soon as it has it.
        rows_each: rows of a batch that each text takes: beams or samples.
        result: of all rows; set in the event loop.
        cancelled: the results are not needed any more.
    """

    key: Hashable
    rows: list[Any]
    sizes: list[int]
    run: Run
    rows_each: int = 1
    result: "asyncio.Future[list[Any]]" = field(default_factory=_new_future)
    cancelled: bool = False
    results: dict[int, Any] = field(default_factory=dict)

    def cancel(self) -> None:
        """Skip the rows that have not begun."""
        self.cancelled = True

    def add_result(self, index: int, value: Any) -> bool:
        """Store a row's result, or the error that ends the job; returns True at the end."""
        self.results[index] = value
        return isinstance(value, Exception) or len(self.results) == len(self.rows)

    def fail(self, error: Exception) -> None:
        """End the job with an error; called in the event loop."""
        if not self.result.done():
            self.result.set_exception(error)

    def complete(self) -> None:
        """Deliver the results, or the first error; called in the event loop."""
        if self.result.done():
            return
        errors = (value for value in self.results.values() if isinstance(value, Exception))
        error = next(errors, None)
        if error is not None:
            self.fail(error)
        else:
            self.result.set_result([self.results[index] for index in range(len(self.rows))])


class _Row(NamedTuple):
    """A row that waits.

    Attributes:
        turn: the tokens that ran before its job came, and those of the job's rows before it: rows
            run in this order, so that a request of many rows does not stop others.
        order: of arrival.
        number: among the rows of its job.
    """

    turn: int
    order: int
    job: Job
    number: int

    @property
    def size(self) -> int:
        """Its number of tokens."""
        return self.job.sizes[self.number]


class BatchEngine:
    """Runs one batch a turn: the first row by `_Row.turn`, and others of similar length.

    A row is overtaken only by those of requests that came before as many tokens had run as its own
    request has before it. So each row runs after a time that does not depend on later requests.

    There is no timer: a row that finds the model idle runs at once, and those that arrive while a
    batch runs share the next one. So batches grow with the load.

    Args:
        batch_tokens: padded tokens of a batch.
        deliver: makes calls in the event loop.
        observe: called with the rows and the padded tokens of each batch.
    """

    def __init__(
        self,
        batch_tokens: int,
        deliver: Callable[[Deliveries], None],
        observe: Callable[[int, int], None] = lambda rows, tokens: None,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.deliver = deliver
        self.observe = observe
        self._waiting: list[_Row] = []
        self._arrived = 0
        self._num_run = 0  # tokens
        self._due: Deliveries = []  # completed, not delivered

    def add(self, job: Job) -> None:
        """Queue all rows of a job."""
        turn = self._num_run
        for index, size in enumerate(job.sizes):
            self._waiting.append(_Row(turn, self._arrived, job, index))
            self._arrived += 1
            turn += size * job.rows_each
        self._waiting.sort(key=lambda row: row[:2])

    def turn(self) -> bool:
        """Run one batch; returns False if no row waits."""
        self._waiting = [row for row in self._waiting if not row.job.cancelled]
        if not self._waiting:
            return False
        batch = self._next_batch()
        orders = {row.order for row in batch}
        self._waiting = [row for row in self._waiting if row.order not in orders]
        self._num_run += sum(row.size * row.job.rows_each for row in batch)
        self.observe(len(batch), len(batch) * max(row.size for row in batch))
        for row, value in zip(batch, self._results(batch), strict=True):
            self._finish(row, value)
        self._deliver_all()
        return True

    def _finish(self, row: _Row, value: Any) -> None:
        """Store the result of a row, the first time; a job with all of its results is due."""
        if row.number in row.job.results:
            return
        if row.job.add_result(row.number, value):
            row.job.cancelled = isinstance(value, Exception)  # its other rows need not run
            self._due.append(row.job.complete)

    def _deliver_all(self) -> None:
        """Deliver the jobs that are due."""
        deliveries, self._due = self._due, []
        self.deliver(deliveries)

    def fail(self, error: Exception) -> None:
        """See `Engine.fail`."""
        jobs = dict.fromkeys(row.job for row in self._waiting)
        self._waiting = []
        self.deliver([partial(job.fail, error) for job in jobs])

    def _next_batch(self) -> list[_Row]:
        """The first row and rows of similar length with the same key, up to `batch_tokens`."""
        leader = self._waiting[0]
        alike = [row for row in self._waiting[:_SEARCHED] if row.job.key == leader.job.key]
        alike.sort(key=lambda row: (row.size, *row[:2]))
        first = last = alike.index(leader)
        budget = max(1, self.batch_tokens // leader.job.rows_each)
        while True:  # widen by the neighbor of the nearer length
            wider = []
            if first:
                wider.append((leader.size - alike[first - 1].size, first - 1, last))
            if last + 1 < len(alike):
                wider.append((alike[last + 1].size - leader.size, first, last + 1))
            _, low, high = min(wider, default=(0, 0, -1))
            if not wider or (high - low + 1) * max(1, alike[high].size) > budget:
                return alike[first : last + 1]
            first, last = low, high

    def _results(self, batch: list[_Row]) -> list[Any]:
        """The result of each row, or its error: a batch that fails is run again row by row."""
        run = batch[0].job.run

        def report(index: int, value: Any) -> None:
            """Deliver the result of a row while others are in progress."""
            self._finish(batch[index], value)
            self._deliver_all()

        try:
            return run([row.job.rows[row.number] for row in batch], report)
        except Exception as error:
            if len(batch) == 1:
                return [_logged(error)]
        results: list[Any] = []
        for row in batch:
            if row.number in row.job.results:  # reported before the error
                results.append(row.job.results[row.number])
                continue
            try:
                results += run([row.job.rows[row.number]], lambda index, value: None)
            except Exception as error:
                results.append(_logged(error))
        return results


def _logged(error: Exception) -> Exception:
    """The error, which is logged with its traceback unless it is of the input."""
    if not isinstance(error, UserError) or isinstance(error, DamagedError):
        logging.getLogger("heedful.serve").error("a batch failed", exc_info=error)
    return error


def call_all(deliveries: Deliveries) -> None:
    """Make the calls."""
    for call in deliveries:
        call()


def in_loop(loop: Any) -> Callable[[Deliveries], None]:
    """A function that makes calls in an event loop, from another thread, unless it is closed."""

    def deliver(deliveries: Deliveries) -> None:
        """Make the calls in the loop, in one turn of it."""
        if deliveries and not loop.is_closed():
            loop.call_soon_threadsafe(partial(call_all, deliveries))

    return deliver
