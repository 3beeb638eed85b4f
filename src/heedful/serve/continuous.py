"""Continuous batching: outputs enter and leave a batch between the steps of one decoder-only net.

The idea is that of Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based
Generative Models", section 3.1: the unit of scheduling is a step, not a request.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.torch.batch_rows import MIN_TOKENS, BatchRows, PrefixStore, common_length
from heedful.backends.torch.cached_net import STEPS_AT_FIRST, right_padded
from heedful.backends.torch.eager import Eager
from heedful.backends.torch.generating import stop_function
from heedful.errors import UserError
from heedful.generation.request import SearchRequest
from heedful.generation.sampling import generators_of
from heedful.parts.cache import Cache, capacity_for
from heedful.parts.tokens import Tokens, padding_mask
from heedful.serve.batches import Deliveries
from heedful.serve.outputs import GenerationJob, Output, OutputPiece, append_next_tokens

READ_AT_ONCE = 512  # padded tokens of prompts between two steps; a longer prompt is read in parts
READ_BESIDE = 128  # tokens of such a part while there are other outputs, which wait for it
MAX_ROWS = 256
SLICE = 256  # least number of new tokens after which an output goes behind those that wait


class ContinuousBatch:
    """The outputs that share the steps of a net, one step a turn; each equals the one it is alone.

    Outputs have an order, by a number of tokens: those that all outputs had run when its request
    came, and those of the first slices of the outputs before it in the request. A slice is of
    `SLICE` new tokens, or a quarter of the output's tokens if that is more; at its end the output
    goes behind the others of its request, and behind all that were due before (`_give_turn`).

    In each turn those outputs run, in this order, whose tokens fit the budget together. One that
    does not fit any more leaves the batch; when it fits again its tokens are read again, and it
    continues as if it had not left. So an output waits for the slices of those before it, among
    which are no later requests once as many tokens have run as its order says; and a request of
    many outputs does not stop a later one.

    Outputs that begin while others are in progress take their first step in the same turn. Prompts
    of more than `READ_AT_ONCE` tokens are read in parts, one of them in a turn, between the steps
    of the others.

    Args:
        eager: of a decoder-only net; prompt and new tokens of an output must fit its positions.
        batch_tokens: most tokens in the caches of all outputs together; a single one may exceed it.
        deliver: makes calls in the event loop.
        observe: called with the rows and the tokens of each pass.
        prefix_tokens: tokens of ended outputs whose keys and values are kept, so that a prompt that
            begins like one of them (or like an output in progress) of the same tenant is read from
            there on. Nets with windowed layers, which forget, do not share prefixes.

    Attributes:
        queue: the outputs that have not ended, in their order.
    """

    def __init__(
        self,
        eager: Eager,
        batch_tokens: int,
        deliver: Callable[[Deliveries], None],
        observe: Callable[[int, int], None] = lambda rows, tokens: None,
        prefix_tokens: int = 0,
    ) -> None:
        self.eager = eager
        self.net = eager.net
        self.batch_tokens = batch_tokens
        self.deliver = deliver
        self.observe = observe
        self._layers = self.net.decoder.cache_layers
        self.shares_prefixes = all(layer.window is None for layer in self._layers)
        self.prefixes = PrefixStore(prefix_tokens if self.shares_prefixes else 0)
        self.queue: list[Output] = []
        self._num_run = 0  # tokens of prompts and new ones, each once
        self._num_turns = 0
        self.clear()

    def clear(self) -> None:
        """Take all outputs out of the batch, without keeping anything of their caches."""
        self._rows: BatchRows[Output] = BatchRows(self._layers)
        # Outputs that have not joined: tokens that have been read, and their cache.
        self._begun: dict[Output, tuple[int, Cache]] = {}

    # --- which outputs run ----------------------------------------------------------------------

    def add(self, job: GenerationJob) -> None:
        """Queue all outputs of a job; an output that cannot begin ends with its error."""
        for index in range(job.num_outputs):
            try:
                output = self.open(job, index)
            except UserError as error:
                self.deliver([partial(job.pieces.put_nowait, OutputPiece.failed(index, error))])
                continue
            output.slice_end = SLICE
            self.queue.append(output)
            new = min(SLICE, output.request.max_new_tokens[0])
            self._give_turn(output, len(output.prompt) + new)
        self._sort()

    def turn(self) -> bool:
        """Read the prompts of outputs that begin and take a step; returns False without work."""
        self._leave([output for output in self.queue if output.job.cancelled])
        if not self.queue:
            return False
        running, beginning = self._choose()
        self._pause([output for output in self.queue if output.runs and output not in running])
        has_others = len(running) + len(beginning) > 1
        in_progress = bool(self.outputs)
        for output in beginning:
            output.runs, output.is_read = True, output.num_tokens > READ_AT_ONCE
        reading = [output for output in self.queue if output.is_read]
        if reading:
            next_one = reading[self._num_turns % len(reading)]
            self._read_next(next_one, READ_BESIDE if has_others else READ_AT_ONCE)
        if whole := [output for output in beginning if output not in reading]:
            self._begin_all(whole)
        if in_progress and self.outputs:  # those in progress do not wait for more prompts
            self._step_all()
        self._end_slices()
        self._num_turns += 1
        return True

    def fail(self, error: Exception) -> None:
        """See `Engine.fail`."""
        jobs = dict.fromkeys(output.job for output in self.queue)
        self.clear()
        self.queue.clear()
        self.deliver([partial(job.fail, error) for job in jobs])

    def _choose(self) -> tuple[set[Output], list[Output]]:
        """The outputs that continue, and those that begin, as far as they fit in their order.

        The first one runs always.
        """
        running: set[Output] = set()
        beginning: list[Output] = []
        room, ahead, longest, may_begin = self.batch_tokens, 0, 0, True
        for output in self.queue:
            count = len(running) + len(beginning)
            if count == MAX_ROWS:
                break
            # The turn in which an output has been read has a step too, of a further token.
            joins = output.is_read or not output.runs
            length = self._rows.num_cached(output.num_tokens) + joins
            if output.runs:
                if length <= room or not count:
                    running.add(output)
                else:
                    continue
            else:
                if not may_begin or (count and length + ahead + output.headroom > room):
                    continue
                longest = max(longest, output.num_tokens)
                if beginning and not self._can_read_with(beginning, output, longest):
                    may_begin = False
                    continue
                beginning.append(output)
            room -= length
            ahead += output.headroom
        return running, beginning

    def _can_read_with(self, beginning: list[Output], output: Output, longest: int) -> bool:
        """A further prompt can be read in the same pass as those that begin before it."""
        if (len(beginning) + 1) * longest > READ_AT_ONCE:
            return False
        # The next turn copies what this one reads.
        return self.shared_length(output, beginning) < MIN_TOKENS

    def _pause(self, outputs: list[Output]) -> None:
        """Take outputs out of the batch, which wait at their places in the order."""
        if outputs:
            self.remove(outputs)
        for output in outputs:
            output.runs = output.is_read = False

    def _end_slices(self) -> None:
        """Queue the next slices of the outputs whose slices have ended."""
        ended = [output for output in self.queue if len(output.ids) >= output.slice_end]
        if not ended:
            return
        self.queue = [output for output in self.queue if len(output.ids) < output.slice_end] + ended
        for output in ended:
            size = max(SLICE, output.num_tokens // 4)
            output.slice_end = len(output.ids) + size
            self._give_turn(output, size)
        self._sort()

    def _give_turn(self, output: Output, size: int) -> None:
        """Give a slice of `size` tokens its turn, after those of its job that are queued."""
        output.turn = max(output.job.turn, self._num_run)
        output.job.turn = output.turn + size

    def _sort(self) -> None:
        """Order the outputs by their turns; of equal ones the first queued is first."""
        self.queue.sort(key=lambda output: output.turn)

    # --- passes, of which no error ends more than one output ------------------------------------

    def _read_next(self, output: Output, count: int) -> None:
        """Read a part of a long prompt, after the last of which the output joins the batch."""
        self.observe(1, count)
        try:
            is_last = self.read_part(output, count)
        except Exception as error:
            _log(error)
            output.end(error)
            self._emit([output])
            return
        if is_last:
            output.is_read = False
            self._begin_all([output])

    def _step_all(self) -> None:
        """A step of all outputs. If it fails, each output is computed again from its prompt, and
        those that fail alone end with their error."""
        outputs = list(self.outputs)
        self.observe(len(outputs), len(outputs))
        try:
            self.step()
        except Exception as error:
            _log(error)
            self.clear()
            self._begin_one_by_one(outputs)
        self._emit(outputs)

    def _begin_all(self, outputs: list[Output]) -> None:
        """The first tokens of outputs; if that fails, they are begun one by one."""
        self.observe(len(outputs), sum(len(output.prompt) for output in outputs))
        try:
            self.begin(outputs)
        except Exception as error:
            _log(error)
            self._begin_one_by_one(outputs)
        self._emit(outputs)

    def _begin_one_by_one(self, outputs: list[Output]) -> None:
        for output in outputs:
            try:
                self.begin([output])
            except Exception as error:
                output.end(error)

    def _emit(self, outputs: list[Output]) -> None:
        """Deliver new tokens, and take the outputs that have ended out of the batch.

        The tokens of an output that is not streamed are delivered at its end.
        """
        deliveries: Deliveries = []
        for output in outputs:
            self._num_run += 1 + len(output.prompt) * (len(output.ids) <= 1)
            if output.job.streams or output.reason is not None:
                deliveries.append(partial(output.job.pieces.put_nowait, output.take_piece()))
        self.deliver(deliveries)
        self._leave([output for output in outputs if output.reason is not None])

    def _leave(self, outputs: list[Output]) -> None:
        if outputs:
            self.remove(outputs)
            gone = set(outputs)
            self.queue = [output for output in self.queue if output not in gone]

    # --- the batch ------------------------------------------------------------------------------

    def open(self, job: GenerationJob, index: int) -> Output:
        """An output of a job, which `begin` begins.

        Raises:
            UserError: an option of beam search; an argument out of range.
        """
        number, sample = divmod(index, job.samples)
        row, request = job.rows[number], job.request.select([number])
        options = request.options
        is_search = options.beam_size != 1 and not options.samples
        if is_search or options.draft is not None or request.required_ids:
            raise UserError("only greedy decoding and sampling run in a continuous batch")
        search = SearchRequest.from_options([[]], **self.eager.arguments([row], request))
        seeds = request.seeds
        generator = None if seeds is None else generators_of(seeds, 1, sample + 1)[sample]
        return Output(job, index, row, search, stop_function(request), generator)

    @property
    def outputs(self) -> list[Output]:
        """The outputs that take the next step."""
        return self._rows.items

    @property
    def num_cached(self) -> int:
        """Tokens in the caches of all outputs, those that are being read included."""
        lengths = [*self._rows.lengths, *(length for length, _ in self._begun.values())]
        return sum(map(self._rows.num_cached, lengths))

    def shared_length(self, output: Output, others: Sequence[Output]) -> int:
        """Tokens that an output would share with others, beyond those that it need not read now."""
        if not self.shares_prefixes or not self.prefixes.max_tokens:
            return 0
        tokens = output.tokens
        own = [other.tokens for other in others if other.job.tenant == output.job.tenant]
        most = max((common_length(tokens, other) for other in own), default=0)
        most = min(most, len(tokens) - 1)
        return most if most > self._find_prefix(output)[0] else 0

    def read_part(self, output: Output, count: int) -> bool:
        """Read `count` further tokens of an output that has not joined.

        Returns:
            True if no more than that are left: they are not read, but remain for `begin`.
        """
        tokens = output.tokens
        read, prefix = self._find_prefix(output)
        if len(tokens) - read <= count:
            return True
        with self._mode(count):
            cache = self._empty(1, count) if prefix is None else prefix()
            cache.reserve(count, drops_hidden=True)
            ids = torch.tensor([tokens[read : read + count]], device=cache.device)
            positions = torch.arange(read, read + count, device=cache.device)[None]
            self._begun.pop(output, None)
            self.net.decode(Tokens(ids, positions), cache)
            self._begun[output] = read + count, cache
        return False

    def begin(self, outputs: list[Output]) -> None:
        """Read the tokens of outputs, append the next ones; the outputs join the batch."""
        with self._mode(sum(len(output.prompt) for output in outputs)):
            cache, states = self._read(outputs)
            lengths = [output.num_tokens for output in outputs]
            append_next_tokens(outputs, self.net.head(states)[:, 0])  # may fail: join afterwards
            self._rows.append(outputs, lengths, cache)
            for output in outputs:
                self._begun.pop(output, None)

    def step(self) -> None:
        """Append the next token to every output."""
        with self._mode(len(self._rows)):
            cache = self._rows.begin()
            outputs = self.outputs
            last = [[output.ids[-1]] for output in outputs]
            lengths = [[length] for length in self._rows.lengths]
            ids, after = torch.tensor([last, lengths]).to(self.eager.decoding.device)
            states = self.net.decode(Tokens(ids, after - 1), cache)
            append_next_tokens(outputs, self.net.head(states)[:, 0])

    def remove(self, outputs: Sequence[Output]) -> None:
        """Take outputs out of the batch; of those that have ended the prefixes are kept."""
        with torch.inference_mode():
            lengths = dict(zip(self.outputs, self._rows.lengths, strict=True))
            for output in outputs:
                self._begun.pop(output, None)
                if output.reason is not None and output in lengths:
                    length = lengths[output]
                    copy = partial(self._rows.copy_of, output, length)
                    self.prefixes.add(output.tokens[:length], copy, output.job.tenant)
            self._rows.remove(outputs)

    def _read(self, outputs: list[Output]) -> tuple[Cache, Float[Tensor, "N 1 D"]]:
        """A cache of new rows, and the state of the last token of each.

        What is known of a row (`_find_prefix`) is copied; the rest is padded on the right.
        """
        rows = [output.tokens for output in outputs]
        prefixes = [self._find_prefix(output) for output in outputs]
        cache = self._empty(len(rows), max(map(len, rows)) + STEPS_AT_FIRST)
        device = cache.device
        for index, (_, prefix) in enumerate(prefixes):
            if prefix is not None:
                cache.write_rows(torch.tensor([index], device=device), prefix())
        rest = [row[length:] for row, (length, _) in zip(rows, prefixes, strict=True)]
        ids, lengths = right_padded(rest, device)
        cache.reserve(ids.size(1), drops_hidden=True)
        starts = torch.tensor([length for length, _ in prefixes], device=device)[:, None]
        positions = starts + torch.arange(ids.size(1), device=device)
        real = None if lengths is None else padding_mask(lengths, ids.size(1))
        # The positions of padding must exist; its keys and values are never read.
        positions = positions.clamp(max=max(map(len, rows)) - 1)
        states: Tensor = self.net.decode(Tokens(ids, positions, real), cache)
        if lengths is None:
            return cache, states[:, -1:]
        return cache, states[torch.arange(len(rows), device=device), lengths - 1][:, None]

    def _empty(self, rows: int, slots: int) -> Cache:
        """A cache without tokens."""
        cache: Cache = self.net.start(rows, capacity=capacity_for(slots))
        for group in cache.groups:
            group.num_read = 0
        return cache

    def _find_prefix(self, output: Output) -> tuple[int, Callable[[], Cache] | None]:
        """The longest beginning of an output whose keys and values are known, and a function that
        copies them.

        At least one token is left to read.
        """
        if output in self._begun:
            length, cache = self._begun[output]
            return length, lambda: cache
        if not self.prefixes.max_tokens:
            return 0, None
        tokens, tenant = output.tokens, output.job.tenant
        length, prefix = self.prefixes.find(tokens, tenant)
        for other, known in zip(self.outputs, self._rows.lengths, strict=True):
            if other.job.tenant != tenant:
                continue
            common = min(common_length(tokens, other.tokens), known, len(tokens) - 1)
            if common > max(length, self.prefixes.min_tokens - 1):
                length, prefix = common, (lambda o=other, n=common: self._rows.copy_of(o, n))
        return length, prefix

    @contextmanager
    def _mode(self, count: int) -> Iterator[None]:
        """Around a pass over `count` tokens."""
        with torch.inference_mode(), self.eager.threads.for_tokens(count):
            yield


def _log(error: Exception) -> None:
    logging.getLogger("heedful.serve").error("a pass failed", exc_info=error)
