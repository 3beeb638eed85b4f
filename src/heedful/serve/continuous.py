"""Outputs of requests in a continuous batch: which of them run, a step at a time."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from heedful.backends.torch.continuous import ContinuousBatch, NewToken, Output
from heedful.backends.torch.prefixes import MIN_TOKENS
from heedful.errors import UserError
from heedful.serve.jobs import Deliveries, GenerationJob, Piece

READ_AT_ONCE = 512  # padded tokens of prompts between two steps; a longer prompt is read in parts
READ_BESIDE = 128  # tokens of such a part while there are other outputs, which wait for it
MAX_ROWS = 256
SLICE = 256  # least number of new tokens after which an output goes behind those that wait
HEADROOM = 16  # steps for which there must be room when an output begins


@dataclass(eq=False)
class _Entry:
    """An output that has not ended.

    Attributes:
        index: of the output in its job.
        slice_end: number of new tokens at which its slice ends.
        held: new tokens that have not been delivered.
        runs: it is in the batch, or its prompt is being read.
        is_read: its prompt is being read in parts.
        turn: outputs have this order; see `ContinuousEngine`.
    """

    output: Output
    job: GenerationJob
    index: int
    slice_end: int
    held: list[NewToken] = field(default_factory=list)
    runs: bool = False
    is_read: bool = False
    turn: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.output.prompt) + len(self.output.ids)

    @property
    def headroom(self) -> int:
        """Tokens that the next steps add, up to `HEADROOM`."""
        return min(HEADROOM, max(0, self.job.limit - self.num_tokens))


class ContinuousEngine:
    """Runs one step a turn, of all outputs in progress.

    Outputs have an order, by a number of tokens: those that all outputs had run when its request
    came, and those of the first slices of the outputs before it in the request. A slice is of
    `SLICE` new tokens, or a quarter of the output's tokens if that is more; at its end the output
    goes behind the others of its request, and behind all that were due before (`_queue`).

    In each turn those outputs run, in this order, whose tokens fit the budget together. One that
    does not fit any more leaves the batch; when it fits again its tokens are read again, and it
    continues as if it had not left. So an output waits for the slices of those before it, among
    which are no later requests once as many tokens have run as its order says; and a request of
    many outputs does not stop a later one.

    Outputs that begin while others are in progress take their first step in the same turn. Prompts
    of more than `READ_AT_ONCE` tokens are read in parts, one of them in a turn, between the steps
    of the others.

    Args:
        batch_tokens: most tokens in the caches of all outputs together; a single one may exceed it.
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
        self._entries: dict[Output, _Entry] = {}  # in their order
        self._num_run = 0  # tokens of prompts and new ones, each once
        self._num_turns = 0

    def add(self, job: GenerationJob) -> None:
        """Queue all outputs of a job; an output that cannot begin ends with its error."""
        for index in range(len(job.rows) * job.samples):
            prompt, sample = divmod(index, job.samples)
            try:
                output = self.batch.open(
                    job.rows[prompt], job.requests[prompt], sample, job.num_top, job.tenant
                )
            except UserError as error:
                self.deliver([partial(job.pieces.put_nowait, _failed(index, error))])
                continue
            entry = self._entries[output] = _Entry(output, job, index, SLICE)
            new = min(SLICE, job.requests[prompt].max_new_tokens[0])
            self._queue(entry, len(output.prompt) + new)
        self._sort()

    def turn(self) -> bool:
        """Read the prompts of outputs that begin and take a step; returns False without work."""
        self._leave([o for o, entry in self._entries.items() if entry.job.cancelled])
        if not self._entries:
            return False
        running, beginning = self._choose()
        self._pause([e for e in self._entries.values() if e.runs and e not in running])
        has_others = len(running) + len(beginning) > 1
        in_progress = bool(self.batch.outputs)
        for entry in beginning:
            entry.runs, entry.is_read = True, entry.num_tokens > READ_AT_ONCE
        reading = [entry for entry in self._entries.values() if entry.is_read]
        if reading:
            next_one = reading[self._num_turns % len(reading)]
            self._read_part(next_one, READ_BESIDE if has_others else READ_AT_ONCE)
        if whole := [entry.output for entry in beginning if entry not in reading]:
            self._emit(self._begin(whole))
        if in_progress and self.batch.outputs:  # those in progress do not wait for more prompts
            self._emit(self._step())
        self._end_slices()
        self._num_turns += 1
        return True

    def fail(self, error: Exception) -> None:
        """See `Engine.fail`."""
        jobs = dict.fromkeys(entry.job for entry in self._entries.values())
        self.batch.clear()
        self._entries.clear()
        self.deliver([partial(job.fail, error) for job in jobs])

    def _choose(self) -> tuple[set[_Entry], list[_Entry]]:
        """The outputs that continue, and those that begin, as far as they fit in their order.

        The first one runs always.
        """
        running: set[_Entry] = set()
        beginning: list[_Entry] = []
        room, ahead, longest, may_begin = self.batch_tokens, 0, 0, True
        for entry in self._entries.values():
            count = len(running) + len(beginning)
            if count == MAX_ROWS:
                break
            # The turn in which an output has been read has a step too, of a further token.
            joins = entry.is_read or not entry.runs
            length = self.batch.tokens_in_cache(entry.num_tokens) + joins
            if entry.runs:
                if length <= room or not count:
                    running.add(entry)
                else:
                    continue
            else:
                if not may_begin or (count and length + ahead + entry.headroom > room):
                    continue
                longest = max(longest, entry.num_tokens)
                if beginning and not self._can_read_with(beginning, entry, longest):
                    may_begin = False
                    continue
                beginning.append(entry)
            room -= length
            ahead += entry.headroom
        return running, beginning

    def _can_read_with(self, beginning: list[_Entry], entry: _Entry, longest: int) -> bool:
        """A further prompt can be read in the same pass as those that begin before it."""
        if (len(beginning) + 1) * longest > READ_AT_ONCE:
            return False
        # The next turn copies what this one reads.
        others = [other.output for other in beginning]
        return self.batch.shared_length(entry.output, others) < MIN_TOKENS

    def _pause(self, entries: list[_Entry]) -> None:
        """Take outputs out of the batch, which wait at their places in the order."""
        if entries:
            self.batch.remove([entry.output for entry in entries])
        for entry in entries:
            entry.runs = entry.is_read = False

    def _end_slices(self) -> None:
        """Queue the next slices of the outputs whose slices have ended."""
        ended = [e for e in self._entries.values() if len(e.output.ids) >= e.slice_end]
        for entry in ended:
            size = max(SLICE, entry.num_tokens // 4)
            entry.slice_end = len(entry.output.ids) + size
            self._entries[entry.output] = self._entries.pop(entry.output)
            self._queue(entry, size)
        if ended:
            self._sort()

    def _queue(self, entry: _Entry, size: int) -> None:
        """Give a slice of `size` tokens its turn, after those of its job that are queued."""
        entry.turn = max(entry.job.turn, self._num_run)
        entry.job.turn = entry.turn + size

    def _sort(self) -> None:
        """Order the outputs by their turns; of equal ones the first queued is first."""
        self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1].turn))

    def _read_part(self, entry: _Entry, count: int) -> None:
        """Read a part of a long prompt, after the last of which the output joins the batch."""
        self.observe(1, count)
        try:
            is_last = self.batch.read_part(entry.output, count)
        except Exception as error:
            _log(error)
            self._emit([_without_token(entry.output, error)])
            return
        if is_last:
            entry.is_read = False
            self._emit(self._begin([entry.output]))

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
                tokens.append(_without_token(output, error))
        return tokens

    def _emit(self, tokens: list[NewToken]) -> None:
        """Deliver new tokens, and take the outputs that have ended out of the batch.

        The tokens of an output that is not streamed are delivered at its end.
        """
        deliveries: Deliveries = []
        for new in tokens:
            is_first = len(new.output.ids) <= 1
            self._num_run += 1 + len(new.output.prompt) * is_first
            entry = self._entries[new.output]
            entry.held.append(new)
            if entry.job.streams or new.output.reason is not None:
                piece = _piece(entry.index, entry.held)
                deliveries.append(partial(entry.job.pieces.put_nowait, piece))
                entry.held.clear()
        self.deliver(deliveries)
        self._leave([new.output for new in tokens if new.output.reason is not None])

    def _leave(self, outputs: list[Output]) -> None:
        if outputs:
            self.batch.remove(outputs)
        for output in outputs:
            del self._entries[output]


def _without_token(output: Output, error: Exception) -> NewToken:
    """The end of an output by an error."""
    output.error, output.reason = error, "dead_end"
    return NewToken(output, None, math.nan, [])


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
