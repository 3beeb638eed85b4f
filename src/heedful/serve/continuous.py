"""Outputs of requests in a continuous batch: admitted in the order of arrival, a step at a time."""

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from heedful.backends.torch.continuous import ContinuousBatch, NewToken, Output
from heedful.backends.torch.prefixes import MIN_TOKENS
from heedful.errors import UserError
from heedful.serve.jobs import Deliveries, GenerationJob, Piece

READ_AT_ONCE = 512  # tokens of prompts between two steps, to limit the delay of outputs in progress
MAX_ROWS = 256


class ContinuousEngine:
    """Runs one step a turn, of all outputs that have been admitted.

    Outputs that are admitted while others are in progress take their first step in the same turn.

    An output is admitted when the longest one that is in progress, times their number, fits the
    budget; none overtakes another, so each is admitted after those before it at the latest.

    Args:
        batch_tokens: most tokens that outputs in progress may come to, padding included.
        deliver: makes calls in the event loop.
        observe: called with the rows and the tokens of each pass.
    """

    def __init__(
        self,
        batch: ContinuousBatch,
        batch_tokens: int,
        deliver: Callable[[Deliveries], None],
        observe: Callable[[int, int], None] = lambda rows, tokens: None,
    ) -> None:
        self.batch = batch
        self.batch_tokens = batch_tokens
        self.deliver = deliver
        self.observe = observe
        self._waiting: deque[tuple[Output, GenerationJob, int]] = deque()
        # For each output in progress: its job, its index there, and undelivered tokens.
        self._jobs: dict[Output, tuple[GenerationJob, int, list[NewToken]]] = {}

    def add(self, job: GenerationJob) -> None:
        """Queue all outputs of a job; an output that cannot begin ends with its error."""
        for index in range(len(job.rows) * job.samples):
            prompt, sample = divmod(index, job.samples)
            try:
                output = self.batch.open(
                    job.rows[prompt], job.requests[prompt], sample, job.num_top
                )
            except UserError as error:
                self.deliver([partial(job.pieces.put_nowait, _failed(index, error))])
                continue
            self._waiting.append((output, job, index))

    def turn(self) -> bool:
        """Read the prompts of admitted outputs and take a step; returns False without work."""
        self._drop_cancelled()
        admitted = self._admit()
        if not admitted and not self.batch.outputs:
            return False
        for output, job, index in admitted:
            self._jobs[output] = job, index, []
        running = bool(self.batch.outputs)
        if admitted:
            self._emit(self._begin([output for output, _, _ in admitted]))
        if running and self.batch.outputs:  # those in progress do not wait for more prompts
            self._emit(self._step())
        return True

    def fail(self, error: Exception) -> None:
        """See `Engine.fail`."""
        jobs = [job for _, job, _ in self._waiting] + [entry[0] for entry in self._jobs.values()]
        self.batch.clear()
        self._waiting.clear()
        self._jobs.clear()
        self.deliver([partial(job.fail, error) for job in dict.fromkeys(jobs)])

    def _drop_cancelled(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry[1].cancelled)
        gone = [output for output in self.batch.outputs if self._jobs[output][0].cancelled]
        self._leave(gone)

    def _admit(self) -> list[tuple[Output, GenerationJob, int]]:
        """The waiting outputs that may begin now, in their order."""
        admitted: list[tuple[Output, GenerationJob, int]] = []
        longest = max((self._jobs[output][0].limit for output in self.batch.outputs), default=0)
        count, num_read = len(self.batch.outputs), 0
        while self._waiting and count < MAX_ROWS:
            output, job, _ = self._waiting[0]
            longest = max(longest, job.limit)
            if count and (count + 1) * longest > self.batch_tokens:
                break
            num_read += len(output.prompt)
            if admitted and num_read > READ_AT_ONCE:
                break
            # The next turn copies what this one reads.
            others = [other.prompt for other, _, _ in admitted]
            if others and self.batch.shared_length(output.prompt, others) >= MIN_TOKENS:
                break
            admitted.append(self._waiting.popleft())
            count += 1
        return admitted

    def _step(self) -> list[NewToken]:
        """The new tokens of a step. If it fails, each output is computed again from its prompt, and
        those that fail alone end with their error."""
        outputs = list(self.batch.outputs)
        self.observe(len(outputs), len(outputs))
        try:
            return self.batch.step()
        except Exception as error:
            _log(error)
        self.batch.clear()
        return self._add_one_by_one(outputs)

    def _begin(self, outputs: list[Output]) -> list[NewToken]:
        """The first tokens of outputs; if that fails, they are begun one by one."""
        self.observe(len(outputs), sum(len(output.prompt) for output in outputs))
        try:
            return self.batch.add(outputs)
        except Exception as error:
            _log(error)
        return self._add_one_by_one(outputs)

    def _add_one_by_one(self, outputs: list[Output]) -> list[NewToken]:
        tokens: list[NewToken] = []
        for output in outputs:
            try:
                tokens += self.batch.add([output])
            except Exception as error:
                output.error, output.reason = error, "dead_end"
                tokens.append(NewToken(output, None, math.nan, []))
        return tokens

    def _emit(self, tokens: list[NewToken]) -> None:
        """Deliver new tokens, and take the outputs that have ended out of the batch.

        The tokens of an output that is not streamed are delivered at its end.
        """
        deliveries: Deliveries = []
        for new in tokens:
            job, index, held = self._jobs[new.output]
            held.append(new)
            if job.streams or new.output.reason is not None:
                deliveries.append(partial(job.pieces.put_nowait, _piece(index, held)))
                held.clear()
        self.deliver(deliveries)
        self._leave([new.output for new in tokens if new.output.reason is not None])

    def _leave(self, outputs: list[Output]) -> None:
        self.batch.remove([output for output in outputs if output in self.batch.outputs])
        for output in outputs:
            del self._jobs[output]


def _piece(index: int, tokens: list[NewToken]) -> Piece:
    """Tokens of one output, the last of which may end it."""
    output, new_tokens = tokens[-1].output, [new for new in tokens if new.token is not None]
    return Piece(
        index,
        [new.token for new in new_tokens if new.token is not None],
        [new.log_prob for new in new_tokens],
        [new.top for new in new_tokens],
        output.reason,
        output.error,
    )


def _log(error: Exception) -> None:
    logging.getLogger("heedful.serve").error("a pass failed", exc_info=error)


def _failed(index: int, error: Exception) -> Piece:
    return Piece(index, [], [], [], "dead_end", error)
