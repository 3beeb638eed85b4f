"""Outputs that a backend without continuous batches streams: one step of each in turn."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from heedful.backends.base import GenerationBackend, GenerationRequest
from heedful.backends.torch.generating import stop_function
from heedful.errors import DamagedError, UserError
from heedful.generation.request import EndReason
from heedful.serve.batches import Deliveries
from heedful.serve.outputs import GenerationJob, OutputPiece

MOST = 8  # streams side by side; the others wait


class StreamEngine:
    """Takes one step of every stream in progress a turn.

    Args:
        backend_for: the backend that runs a request of one prompt.
        deliver: makes calls in the event loop.
    """

    def __init__(
        self,
        backend_for: Callable[[list[int], GenerationRequest], GenerationBackend],
        deliver: Callable[[Deliveries], None],
    ) -> None:
        self.backend_for = backend_for
        self.deliver = deliver
        self._waiting: deque[GenerationJob] = deque()
        self._running: list[_Stream] = []

    def add(self, job: GenerationJob) -> None:
        """Queue a job of one prompt with one sample."""
        self._waiting.append(job)

    def turn(self) -> bool:
        """Take a step of each stream; returns False without work."""
        self._running = [stream for stream in self._running if not stream.job.cancelled]
        while self._waiting and len(self._running) < MOST:
            job = self._waiting.popleft()
            if not job.cancelled:
                self._running.append(_Stream(job, self.backend_for))
        if not self._running:
            return False
        pieces = [(stream, stream.next_piece()) for stream in self._running]
        self.deliver([partial(s.job.pieces.put_nowait, piece) for s, piece in pieces])
        self._running = [stream for stream, piece in pieces if piece.reason is None]
        return True

    def fail(self, error: Exception) -> None:
        """See `Engine.fail`."""
        jobs = [*self._waiting, *(stream.job for stream in self._running)]
        self._waiting.clear()
        self._running = []
        self.deliver([partial(job.fail, error) for job in jobs])


class _Stream:
    """The steps of one output."""

    def __init__(
        self,
        job: GenerationJob,
        backend_for: Callable[[list[int], GenerationRequest], GenerationBackend],
    ) -> None:
        self.job = job
        self._backend_for = backend_for
        self._ids: list[int] = []
        self._steps: Iterator[tuple[list[int], bool]] | None = None

    def next_piece(self) -> OutputPiece:
        """The tokens of the next step, or the error that ends the output."""
        row, request = self.job.rows[0], self.job.request
        try:
            if self._steps is None:
                self._steps = iter(self._backend_for(row, request).stream_tokens(row, request))
            ids, ended = next(self._steps)
        except Exception as error:
            if not isinstance(error, UserError) or isinstance(error, DamagedError):
                logging.getLogger("heedful.serve").error("a stream failed", exc_info=error)
            return OutputPiece.failed(0, error)
        self._ids += ids
        reason = self._reason(request) if ended else None
        return OutputPiece(0, ids, [math.nan] * len(ids), [[] for _ in ids], reason)

    def _reason(self, request: GenerationRequest) -> EndReason:
        if self._ids and self._ids[-1] in request.eos_ids:
            return "eos"
        stop = stop_function(request)
        if stop is not None and stop(0, self._ids):
            return "stop"
        return "length" if len(self._ids) == request.max_new_tokens[0] else "dead_end"
