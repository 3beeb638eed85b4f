"""Continuous batching: outputs enter and leave a batch between the steps of one decoder-only net.

The idea is that of Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based
Generative Models", section 3.1: the unit of scheduling is a step, not a request.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.backends.torch.cached_net import right_padded
from heedful.backends.torch.prefixes import PrefixStore, common_length
from heedful.backends.torch.searching import Searcher, stop_function
from heedful.backends.torch.state import STEPS_AT_FIRST
from heedful.errors import UserError
from heedful.generation.context import Rule
from heedful.generation.decoding import DecodingStep
from heedful.generation.request import EndReason, SearchRequest, StopFunction
from heedful.generation.rules import Temperature, TopH, Truncation
from heedful.generation.sampling import generators_of, inverse_cdf
from heedful.generation.token_rules import single_bans
from heedful.generation.topk import first_largest
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
    ids: list[int] = field(default_factory=list)
    reason: EndReason | None = None
    error: Exception | None = None
    step: DecodingStep = field(init=False)
    banned_ids: list[int] | None = field(init=False)  # of all rules but `_RESHAPING`; None: others
    reshaping: tuple[Rule, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.step = DecodingStep(self.request, "the model", can_overwrite=True)
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

    An output's prompt and new tokens must fit the net's positions.

    Args:
        searcher: of a decoder-only net, for the arguments of requests, its net and its threads.
        prefix_tokens: tokens of ended outputs whose keys and values are kept, so that a prompt that
            begins like one of them (or like an output in progress) is read from there on. Nets
            with windowed layers, which forget, do not share prefixes.
    """

    def __init__(self, searcher: Searcher, prefix_tokens: int = 0) -> None:
        self.searcher = searcher
        self.net = searcher.net.net  # type: ignore[attr-defined]
        self.outputs: list[Output] = []
        self._lengths: list[int] = []  # tokens of each output in the cache
        self._cache: Cache | None = None
        self._view: Cache | None = None  # the rows of the outputs
        layers = self.net.decoder.cache_layers
        self.shares_prefixes = all(layer.window is None for layer in layers)
        self.prefixes = PrefixStore(prefix_tokens if self.shares_prefixes else 0)

    def open(
        self, row: list[int], request: GenerationRequest, sample: int = 0, num_top: int = 0
    ) -> Output:
        """The output of one prompt, which `add` begins.

        Args:
            request: of this prompt alone.
            sample: its number among the samples of the prompt, from 0.
            num_top: see `Output`.

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
        return Output(row, search, stop, generator, num_top, options.scores)

    def shared_length(self, tokens: list[int], others: Sequence[list[int]]) -> int:
        """Tokens that a prompt would share with others, beyond those that it need not read now."""
        if not self.shares_prefixes or not self.prefixes.max_tokens:
            return 0
        most = max((common_length(tokens, other) for other in others), default=0)
        most = min(most, len(tokens) - 1)
        return most if most > self._find_prefix(tokens)[0] else 0

    def add(self, outputs: list[Output]) -> list[NewToken]:
        """Read the tokens of outputs, which join the batch; returns their next tokens."""
        with self._mode(sum(len(output.prompt) for output in outputs)):
            rows = [output.tokens for output in outputs]
            cache, states = self._read(rows)
            tokens = self._choose(outputs, self.net.head(states)[:, 0])  # may fail: join afterwards
            count = len(self.outputs)
            if self._cache is None:
                self._cache = cache
            else:
                if count + len(rows) > self._cache.num_sources:
                    texts = 1 << (count + len(rows) - 1).bit_length()
                    self._cache = self._cache.with_texts(texts, STEPS_AT_FIRST)
                indices = torch.arange(count, count + len(rows), device=cache.device)
                self._cache.write_rows(indices, cache)
            self._view = None
            self.outputs += outputs
            self._lengths += map(len, rows)
            return tokens

    def step(self) -> list[NewToken]:
        """The next token of every output."""
        assert self._cache is not None
        with self._mode(len(self.outputs)):
            device = self._cache.device
            ids = torch.tensor([[output.ids[-1]] for output in self.outputs], device=device)
            positions = torch.tensor(self._lengths, device=device)[:, None]
            states = self.net.decode(Tokens(ids, positions), self._cache_of_step())
            self._lengths = [length + 1 for length in self._lengths]
            return self._choose(self.outputs, self.net.head(states)[:, 0])

    def remove(self, outputs: Sequence[Output]) -> None:
        """Take outputs out of the batch, those that have ended or others."""
        if not outputs:
            return
        with torch.inference_mode():
            for output in outputs:
                self._remove(self.outputs.index(output))
            count, cache = len(self.outputs), self._cache
            self._view = None
            if not count:
                self._cache = None
            elif cache is not None:
                for group in cache.groups:
                    group.limit = min(group.limit or 0, max(self._lengths))
                if 4 * count <= cache.num_sources:
                    texts = 1 << (count - 1).bit_length()
                    self._cache = cache.with_texts(texts, STEPS_AT_FIRST)

    def clear(self) -> None:
        """Take all outputs out, without keeping anything of them."""
        self.outputs, self._lengths, self._cache, self._view = [], [], None, None

    def _remove(self, index: int) -> None:
        """The last row takes the place of a removed one."""
        assert self._cache is not None
        last = len(self.outputs) - 1
        output, length = self.outputs[index], self._lengths[index]
        if output.reason is not None:
            self.prefixes.add(output.tokens[:length], lambda: self._copy_of(index, length))
        if index != last:
            where = torch.tensor([index], device=self._cache.device)
            self._cache.write_rows(where, self._cache.select(where.new_tensor([last])))
            self.outputs[index], self._lengths[index] = self.outputs[last], self._lengths[last]
        del self.outputs[last], self._lengths[last]

    def _copy_of(self, index: int, length: int) -> Cache:
        """The first tokens of a row, in a cache of their own."""
        assert self._cache is not None
        rows = torch.tensor([index], device=self._cache.device)
        row = self._cache.select(rows)
        row.rewind(length)
        return row.with_texts(1, 0)

    # --- passes ---------------------------------------------------------------------------------

    def _read(self, rows: list[list[int]]) -> tuple[Cache, Float[Tensor, "N 1 D"]]:
        """A cache of new rows, and the state of the last token of each.

        A prefix in `self.prefixes` is copied; the rest is padded on the right.
        """
        prefixes = [self._find_prefix(row) for row in rows]
        slots = capacity_for(max(map(len, rows)) + STEPS_AT_FIRST)
        cache: Cache = self.net.start(len(rows), capacity=slots)
        for group in cache.groups:
            group.limit = 0
        device = cache.device
        for index, (length, prefix) in enumerate(prefixes):
            if prefix is not None:
                prefix.rewind(length)
                cache.write_rows(torch.tensor([index], device=device), prefix)
        rest = [row[length:] for row, (length, _) in zip(rows, prefixes, strict=True)]
        ids, lengths = right_padded(rest, device)
        cache.reserve(ids.size(1), forgets=True)
        starts = torch.tensor([length for length, _ in prefixes], device=device)[:, None]
        positions = starts + torch.arange(ids.size(1), device=device)
        real = None if lengths is None else padding_mask(lengths, ids.size(1))
        # The positions of padding must exist; its keys and values are never read.
        positions = positions.clamp(max=max(map(len, rows)) - 1)
        states: Tensor = self.net.decode(Tokens(ids, positions, real), cache)
        if lengths is None:
            return cache, states[:, -1:]
        return cache, states[torch.arange(len(rows), device=device), lengths - 1][:, None]

    def _find_prefix(self, tokens: list[int]) -> tuple[int, Cache | None]:
        """The longest beginning of a prompt whose keys and values are known, and a copy of them.

        At least one token is left to read.
        """
        if not self.prefixes.max_tokens:
            return 0, None
        length, prefix = self.prefixes.find(tokens)
        for index, output in enumerate(self.outputs):
            common = min(
                common_length(tokens, output.tokens), self._lengths[index], len(tokens) - 1
            )
            if common > max(length, self.prefixes.min_tokens - 1):
                length, prefix = common, (lambda i=index, n=common: self._copy_of(i, n))
        return (0, None) if prefix is None else (length, prefix())

    def _cache_of_step(self) -> Cache:
        """The rows of the outputs, with a slot for a new token each."""
        assert self._cache is not None
        if self._cache.reserve(1, forgets=True) or self._view is None:
            self._view = self._cache.first(len(self.outputs))
        for group, whole in zip(self._view.groups, self._cache.groups, strict=True):
            group.limit = whole.limit
        return self._view

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
                result[rows] = output.step(own, new, [0])
        except UserError as error:
            for index in indices:
                outputs[index].error = error
    return result


def _under_shared_rules(output: Output, log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    new = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
    return output.step(log_probs, new, [0])


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
