"""The work of requests: rows that share batches, and outputs that are generated token by token."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from heedful.backends.base import GenerationRequest


def _new_future() -> "asyncio.Future[list[Any]]":
    return asyncio.get_running_loop().create_future()


OnOutput = Callable[[int, Any], None]
"""Called with the index of a row and its result."""
Run = Callable[[list[Any], OnOutput], list[Any]]


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


Deliveries = list[Callable[[], object]]
"""Calls that the event loop is to make, in their order."""

Reason = Literal["eos", "stop", "length", "dead_end"]


@dataclass(frozen=True)
class Piece:
    """New tokens of one output of a `GenerationJob`.

    Attributes:
        index: of the output.
        log_probs: of the tokens; NaN where they were not requested.
        top: for each token the most probable tokens and their log-probabilities.
        reason: why the output ended; None: it is in progress.
        error: the error that ended it.
    """

    index: int
    ids: list[int]
    log_probs: list[float]
    top: list[list[tuple[int, float]]]
    reason: Reason | None = None
    error: Exception | None = None


@dataclass(eq=False)
class GenerationJob:
    """The outputs of one request to a language model.

    Attributes:
        rows: ids of the prompts.
        requests: of each prompt alone.
        samples: outputs of each prompt; output i is of prompt i // samples.
        num_top: most probable tokens to report with each token.
        limit: largest number of tokens, prompt and new ones, of an output.
        streams: the client reads tokens as they come.
        tenant: who asks (`RequestInfo.tenant`); prefixes are shared among the prompts of one alone.
        turn: of the next output or slice that is queued (`ContinuousEngine`), in tokens.
        pieces: of the outputs as they are generated; filled in the event loop.
        cancelled: the remaining tokens are not needed.
    """

    rows: list[list[int]]
    requests: list[GenerationRequest]
    samples: int
    num_top: int
    limit: int
    streams: bool
    tenant: str = ""
    turn: int = 0
    pieces: "asyncio.Queue[Piece]" = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    def fail(self, error: Exception) -> None:
        """End all outputs with an error; called in the event loop."""
        for index in range(len(self.rows) * self.samples):
            self.pieces.put_nowait(Piece(index, [], [], [], "dead_end", error))

    def cancel(self) -> None:
        """Take the outputs out of the batch before the next step."""
        self.cancelled = True
