"""Continuous batching: outputs enter and leave a batch between the steps of one decoder-only net.

The idea is that of Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based
Generative Models", section 3.1: the unit of scheduling is a step, not a request.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.backends.torch.batch_rows import BatchRows
from heedful.backends.torch.cached_net import right_padded
from heedful.backends.torch.prefixes import PrefixStore, common_length
from heedful.backends.torch.searching import Searcher, stop_function
from heedful.backends.torch.state import STEPS_AT_FIRST
from heedful.errors import UserError
from heedful.generation.decoding import RequestRules
from heedful.generation.hypotheses import first_largest
from heedful.generation.request import EndReason, SearchRequest, StopFunction
from heedful.generation.rules import Temperature, TopH, Truncation
from heedful.generation.sampling import generators_of, inverse_cdf
from heedful.generation.token_rules import Rule, single_bans
from heedful.parts.cache import Cache, capacity_for
from heedful.parts.tokens import Tokens, padding_mask

_RESHAPING = (Temperature, TopH, Truncation)


@dataclass(eq=False)
class Output:
    """The output for one prompt, which may still be in progress.

    Attributes:
        prompt: its ids; at least one.
        request: limits, EOS ids and rules, of this output alone.
        stop: see `sample_steps`.
        generator: of sampling; None: greedy decoding.
        num_top: number of most probable tokens to report with each new token.
        scores: report log-probabilities.
        tenant: whose prompt it is; prefixes are shared only among the outputs of one tenant.
        ids: new tokens.
        reason: why it has ended; None: it is in progress.
        error: the error that ended it.
    """

    prompt: list[int]
    request: SearchRequest
    stop: StopFunction | None
    generator: random.Random | None
    num_top: int
    scores: bool
    tenant: str = ""
    ids: list[int] = field(default_factory=list)
    reason: EndReason | None = None
    error: Exception | None = None
    rules: RequestRules = field(init=False)
    banned_ids: list[int] | None = field(init=False)  # of all rules but `_RESHAPING`; None: others
    reshaping: tuple[Rule, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rules = RequestRules(self.request, "the model", can_overwrite=True)
        rules = self.request.rules
        self.reshaping = tuple(rule for rule in rules if isinstance(rule, _RESHAPING))
        self.banned_ids = single_bans([rule for rule in rules if rule not in self.reshaping])

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.prompt, *self.ids]

    @property
    def needs_log_probs(self) -> bool:
        """The next token is not simply that of the largest logit which is not banned."""
        is_plain = self.banned_ids is not None and not self.reshaping
        return self.scores or self.num_top > 0 or self.generator is not None or not is_plain


@dataclass(frozen=True)
class NewToken:
    """A step of one output.

    Attributes:
        token: None if the output ended at a dead end, or with an error.
        log_prob: the model's, before any rule; NaN without `Output.scores`.
        top: the most probable tokens and their log-probabilities, the best first.
    """

    output: Output
    token: int | None
    log_prob: float
    top: list[tuple[int, float]]


class ContinuousBatch:
    """The outputs that share the steps of a net; each equals the one it would be alone.

    An output's prompt and new tokens must fit the net's positions. Outputs may leave before they
    have ended and be added again: their tokens are then read again.

    Args:
        searcher: of a decoder-only net, for the arguments of requests, its net and its threads.
        prefix_tokens: tokens of ended outputs whose keys and values are kept, so that a prompt that
            begins like one of them (or like an output in progress) of the same tenant is read from
            there on. Nets with windowed layers, which forget, do not share prefixes.
    """

    def __init__(self, searcher: Searcher, prefix_tokens: int = 0) -> None:
        self.searcher = searcher
        self.net = searcher.net.net  # type: ignore[attr-defined]
        self._layers = self.net.decoder.cache_layers
        self.shares_prefixes = all(layer.window is None for layer in self._layers)
        self.prefixes = PrefixStore(prefix_tokens if self.shares_prefixes else 0)
        self.clear()

    def clear(self) -> None:
        """Take all outputs out, without keeping anything of them."""
        self._rows: BatchRows[Output] = BatchRows(self._layers)
        # Outputs that have not joined: tokens that have been read, and their cache.
        self._begun: dict[Output, tuple[int, Cache]] = {}

    def open(
        self,
        row: list[int],
        request: GenerationRequest,
        sample: int = 0,
        num_top: int = 0,
        tenant: str = "",
    ) -> Output:
        """The output of one prompt, which `add` begins.

        Args:
            request: of this prompt alone.
            sample: its number among the samples of the prompt, from 0.
            num_top, tenant: see `Output`.

        Raises:
            UserError: an option of beam search; an argument out of range.
        """
        options = request.options
        is_search = options.beam_size != 1 and not options.samples
        if is_search or options.draft is not None or request.required_ids:
            raise UserError("only greedy decoding and sampling run in a continuous batch")
        search = SearchRequest.from_options([[]], **self.searcher.arguments([row], request))
        seeds = request.seeds
        generator = None if seeds is None else generators_of(seeds, 1, sample + 1)[sample]
        stop = stop_function(request)
        return Output(row, search, stop, generator, num_top, options.scores, tenant)

    @property
    def outputs(self) -> list[Output]:
        """The outputs that take the next step."""
        return self._rows.items

    @property
    def num_cached(self) -> int:
        """Tokens in the caches of all outputs, those that are being read included."""
        lengths = [*self._rows.lengths, *(length for length, _ in self._begun.values())]
        return sum(map(self.tokens_in_cache, lengths))

    def tokens_in_cache(self, length: int) -> int:
        """Tokens that are in the cache after `length` of an output have been read."""
        return self._rows.num_cached(length)

    def shared_length(self, output: Output, others: Sequence[Output]) -> int:
        """Tokens that an output would share with others, beyond those that it need not read now."""
        if not self.shares_prefixes or not self.prefixes.max_tokens:
            return 0
        tokens = output.tokens
        own = [other.tokens for other in others if other.tenant == output.tenant]
        most = max((common_length(tokens, other) for other in own), default=0)
        most = min(most, len(tokens) - 1)
        return most if most > self._find_prefix(output)[0] else 0

    def read_part(self, output: Output, count: int) -> bool:
        """Read `count` further tokens of an output that has not joined.

        Returns:
            True if no more than that are left: they are not read, but remain for `add`.
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

    def add(self, outputs: list[Output]) -> list[NewToken]:
        """Read the tokens of outputs, which join the batch; returns their next tokens."""
        with self._mode(sum(len(output.prompt) for output in outputs)):
            cache, states = self._read(outputs)
            lengths = [len(output.prompt) + len(output.ids) for output in outputs]
            tokens = self._choose(outputs, self.net.head(states)[:, 0])  # may fail: join afterwards
            self._rows.append(outputs, lengths, cache)
            for output in outputs:
                self._begun.pop(output, None)
            return tokens

    def step(self) -> list[NewToken]:
        """The next token of every output."""
        with self._mode(len(self._rows)):
            cache = self._rows.begin()
            outputs = self.outputs
            last = [[output.ids[-1]] for output in outputs]
            ids, after = torch.tensor([last, [[n] for n in self._rows.lengths]]).to(self._device)
            states = self.net.decode(Tokens(ids, after - 1), cache)
            return self._choose(outputs, self.net.head(states)[:, 0])

    def remove(self, outputs: Sequence[Output]) -> None:
        """Take outputs out of the batch, those that have ended or others."""
        with torch.inference_mode():
            lengths = dict(zip(self.outputs, self._rows.lengths, strict=True))
            for output in outputs:
                self._begun.pop(output, None)
                if output.reason is not None and output in lengths:
                    self._keep(output, lengths[output])
            self._rows.remove(outputs)

    def _keep(self, output: Output, length: int) -> None:
        """Store the keys and values of an output that has ended."""
        tokens = output.tokens[:length]
        self.prefixes.add(tokens, lambda: self._rows.copy_of(output, length), output.tenant)

    # --- passes ---------------------------------------------------------------------------------

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
        tokens = output.tokens
        length, prefix = self.prefixes.find(tokens, output.tenant)
        for other, known in zip(self.outputs, self._rows.lengths, strict=True):
            if other.tenant != output.tenant:
                continue
            common = min(common_length(tokens, other.tokens), known, len(tokens) - 1)
            if common > max(length, self.prefixes.min_tokens - 1):
                length, prefix = common, (lambda o=other, n=common: self._rows.copy_of(o, n))
        return length, prefix

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.searcher.net.device
        return device

    # --- the next tokens ------------------------------------------------------------------------

    def _choose(self, outputs: list[Output], logits: Float[Tensor, "N V"]) -> list[NewToken]:
        """Append the next token to each output, by greedy choice or sampling; some outputs end."""
        log_probs = logits.float()
        top: list[list[tuple[int, float]]] = [[] for _ in outputs]
        if any(output.needs_log_probs for output in outputs):
            log_probs = log_probs.log_softmax(-1)
            top = _top_tokens(outputs, log_probs)
        largest = log_probs.amax(1).tolist()
        scores = _under_rules(outputs, log_probs)
        best, token = first_largest(scores)
        sampled = [i for i, output in enumerate(outputs) if output.generator is not None]
        if sampled:
            rows = torch.tensor(sampled, device=token.device)
            numbers = [[outputs[i].generator.random()] for i in sampled]  # type: ignore[union-attr]
            uniform = torch.tensor(numbers, dtype=torch.float64)[:, 0]
            token[rows, 0] = inverse_cdf(scores[rows], uniform.to(scores.device))
        values = log_probs.gather(1, token)
        columns = token[:, 0].tolist(), values[:, 0].tolist(), largest, best[:, 0].tolist()
        return [
            _append(output, *row, top_tokens)
            for output, row, top_tokens in zip(
                outputs, zip(*columns, strict=True), top, strict=True
            )
        ]

    @contextmanager
    def _mode(self, count: int) -> Iterator[None]:
        """Around a pass over `count` tokens."""
        with torch.inference_mode(), self.searcher.threads.for_tokens(count):
            yield


def _append(
    output: Output,
    token: int,
    log_prob: float,
    of_model: float,
    best: float,
    top: list[tuple[int, float]],
) -> NewToken:
    """Add a token to its output, and check whether it ends."""
    if output.error is None and (of_model != of_model or best != best):
        source = "the model" if of_model != of_model else "a rule"
        step = len(output.ids) + 1
        output.error = FloatingPointError(
            f"{source} gave NaN at step {step}: look for an overflow in it"
        )
    if output.error is not None or best == -torch.inf:
        output.reason = "dead_end"
        return NewToken(output, None, torch.nan, [])
    output.ids.append(token)
    try:
        output.reason = output.request.end_reason(0, output.ids, output.stop)
    except Exception as error:  # of the tokenizer's decoder
        output.error, output.reason = error, "dead_end"
    return NewToken(output, token, log_prob if output.scores else torch.nan, top)


def _under_rules(outputs: list[Output], log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """The log-probabilities after the rules of each output, whose error is set if one fails.

    Outputs with the same bans and numbers, whatever their lengths, share the operations; bans are
    written in place.
    """
    groups: dict[object, list[int]] = {}
    for index, output in enumerate(outputs):
        shared = output.banned_ids is not None
        key = (tuple(output.banned_ids or ()), output.reshaping) if shared else index
        groups.setdefault(key, []).append(index)
    if len(groups) == 1 and outputs[0].banned_ids is not None:
        return _under_shared_rules(outputs[0], log_probs)
    result = torch.empty_like(log_probs)
    for indices in groups.values():
        rows, output = torch.tensor(indices, device=log_probs.device), outputs[indices[0]]
        own = log_probs[rows]
        try:
            if output.banned_ids is not None:
                result[rows] = _under_shared_rules(output, own)
            else:
                new = torch.tensor([output.ids], dtype=torch.long, device=log_probs.device)
                result[rows] = output.rules(own, new, [0])
        except UserError as error:
            for index in indices:
                outputs[index].error = error
    return result


def _under_shared_rules(output: Output, log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    new = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
    return output.rules(log_probs, new, [0])


def _top_tokens(
    outputs: list[Output], log_probs: Float[Tensor, "N V"]
) -> list[list[tuple[int, float]]]:
    """The `num_top` most probable tokens of each output, with their log-probabilities."""
    count = min(max(output.num_top for output in outputs), log_probs.size(1))
    if not count:
        return [[] for _ in outputs]
    best = log_probs.topk(count, dim=1)
    return [
        list(zip(ids, values, strict=True))[: output.num_top]
        for output, ids, values in zip(
            outputs, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
