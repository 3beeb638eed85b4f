"""Greedy decoding and sampling from any next-token function: complete outputs, or step by step.

The device chooses the tokens. The host finds the rows that have ended when it reads the tokens:
after each step on a CPU, and after several steps on a device that it would have to wait for.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.hypotheses import first_largest, sum_dtype
from heedful.generation.outputs import Hypothesis, LengthScore
from heedful.generation.request import (
    EndReason,
    LogitState,
    NextLogProbs,
    SearchRequest,
    Starts,
    State,
    StopFunction,
    check_not_nan,
)
from heedful.generation.search_base import Search, check_shape
from heedful.generation.token_rules import BANS, PrefixFunction

STEPS_PER_READ = 8  # on a device that the host would have to wait for


@dataclass
class SampledStep:
    """The new tokens of one step; entry i of each list belongs to one row.

    Attributes:
        rows: indices of the rows in the result of `sample`: those of sentence s are
            s * num_samples and the following.
        token_log_probs: the model's log-probabilities, before any rule.
        ended: the rows that end in this step, and why; a row at a dead end has no token.
    """

    rows: list[int]
    tokens: list[int]
    token_log_probs: list[float]
    ended: dict[int, EndReason]


def sample(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    score: LengthScore | None = None,
    **options: Any,
) -> list[Hypothesis]:
    """`num_samples` hypotheses for each start; those of one sentence are adjacent.

    Tokens are sampled from the distribution under the rules; `log_prob`, `token_log_probs` and
    `score` of a hypothesis are computed from the model's, before any rule.

    Args:
        score: computes the score; None: the mean log-probability of a token.
        options: those of `sample_steps`, and `on_done` (see `SearchRequest.from_options`).

    >>> import torch
    >>> def next_log_probs(prefixes):  # of 3 tokens, of which 2 is the end
    ...     return torch.tensor([[0.6, 0.1, 0.3]]).log().expand(len(prefixes), -1)
    >>> hypotheses = sample(next_log_probs, [[0]], seeds=[1], eos_id=2, max_new_tokens=9)
    >>> hypotheses[0].finished == (hypotheses[0].ids[-1] == 2)
    True
    """
    on_done, size = options.pop("on_done", None), options.get("num_samples", 1)
    length_score = score or LengthScore()
    sampler = sample_steps(next_log_probs, start, **options)
    hypotheses: dict[int, Hypothesis] = {}
    for step in sampler:
        for row, reason in step.ended.items():
            finished, failure = reason in ("eos", "stop"), None
            if reason == "dead_end":
                failure = reason
            hypotheses[row] = length_score.hypothesis(*sampler.outputs[row], finished, failure)
        for sentence in dict.fromkeys(row // size for row in step.ended) if on_done else ():
            rows = range(sentence * size, (sentence + 1) * size)
            if all(row in hypotheses for row in rows):
                on_done(sentence, [hypotheses[row] for row in rows])
    return [hypothesis for _, hypothesis in sorted(hypotheses.items())]


def sample_steps(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    seeds: Sequence[int] | None,
    num_samples: int = 1,
    stop: StopFunction | None = None,
    state: State | None = None,
    scores: bool = True,
    steps_per_read: int | None = None,
    **options: Any,
) -> "Sampler":
    """The tokens of `sample`, step by step, for output that is shown while it is generated.

    Each row has a generator and takes one number of it for each token, by inverse transform
    sampling over the ids in order. So a sample depends on its seed and its sentence, but not on its
    batch or on the number of samples. Arguments are checked at the call, not at the first step.

    Args:
        next_log_probs: called first with one row for each sentence, then with one for each sample,
            in the order of the results. Samples that have ended leave the batch with the last of
            their sentence, and in large batches several sentences at a time. A function with a
            state needs to read `prefixes[:, -1:]` only (at the first call, all of `start`).
        start, options: `eos_id`, `max_new_tokens` and more, see `SearchRequest.from_options`;
            but not `on_done`, which is for `sample`. Before `min_new_tokens` neither EOS nor `stop`
            ends a row, but a forced EOS does.
        seeds: one for each sentence, 0 or more. None: greedy decoding, which takes the most
            probable token under the rules, of equal ones the lowest id.
        stop: called after each token other than EOS; where it returns True the row is finished.
        state: passed to `next_log_probs`, and reordered and selected between two calls. Greedy
            decoding under rules that only forbid tokens (`BANS`) calls `next_logits` of a
            `LogitState` in its place, and normalizes nothing but the scores.
        scores: False: log-probabilities may be NaN, where they would have to be computed.
        steps_per_read: steps after which the host reads the tokens. None: 1 without a state, on a
            CPU, or with a function that needs the tokens (`stop`, `PrefixFunction`); otherwise
            `STEPS_PER_READ`.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.

    >>> import torch
    >>> def next_log_probs(prefixes):  # of 3 tokens, of which 2 is the end
    ...     return torch.tensor([[0.6, 0.1, 0.3]]).log().expand(len(prefixes), -1)
    >>> steps = sample_steps(next_log_probs, [[0]], seeds=None, eos_id=2, max_new_tokens=3)
    >>> [step.tokens for step in steps]
    [[0], [0], [0]]
    """
    request = SearchRequest.from_options(start, **options)
    if request.on_done is not None:
        raise UserError("sample_steps does not call on_done, read its steps or use sample")
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}")
    if seeds is None and num_samples > 1:
        raise UserError(f"num_samples = {num_samples} without seeds would all be the same")
    generators = None if seeds is None else generators_of(seeds, request.batch, num_samples)
    settings = generators, num_samples, stop, scores, steps_per_read
    return Sampler(next_log_probs, state, request, *settings)


@dataclass
class Sampler(Search):
    """The loop of `sample_steps`; without generators it decodes greedily.

    Attributes:
        outputs: for each row of the result its new tokens and their log-probabilities, so far.
    """

    generators: list[random.Random] | None = None
    num_samples: int = 1
    stop: StopFunction | None = None
    scores: bool = True
    steps_per_read: int | None = None
    outputs: list[tuple[list[int], list[float]]] = field(default_factory=list, init=False)
    _ended: set[int] = field(default_factory=set, init=False)  # rows of the result
    _logit_state: LogitState | None = field(default=None, init=False)  # None: it is not read
    _reads_last: bool = field(default=False, init=False)  # only new tokens are read

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outputs = [([], []) for _ in self._rows_of(self.sentences)]
        needs_order_only = self.generators is None and all(
            isinstance(rule, BANS) for rule in self.request.rules
        )
        # Except on a CPU a log-sum-exp takes more kernels than a log-softmax.
        is_faster = not self.scores or self.request.start.device.type == "cpu"
        if needs_order_only and is_faster and getattr(self.state, "has_logits", False):
            self._logit_state = cast(LogitState, self.state)
            most = self.request.start.size(1) + max(self.request.max_new_tokens, default=0) - 1
            self._reads_last = not self.request.rules and most <= self._logit_state.longest

    def __iter__(self) -> Iterator[SampledStep]:
        """Decode until every row has ended."""
        needs_tokens = any(isinstance(rule, PrefixFunction) for rule in self.request.rules)
        reads_each = needs_tokens or self.stop is not None or self.state is None
        reads_each = reads_each or self.request.start.device.type == "cpu"
        count = self.steps_per_read or (1 if reads_each else STEPS_PER_READ)
        rows = self._rows_of(self.sentences)
        tokens, length = self.request.start, 0
        limit = max(self.request.max_new_tokens, default=0)
        while self.sentences:
            # Backends decode in inference mode; a context costs as much as an operation.
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                tokens, steps = self._run(tokens, length, min(count, limit - length), rows)
            num_ended = len(self._ended)
            for step in steps:
                length += 1
                yield self._read(length, rows, step)
            if len(self._ended) == num_ended:
                continue
            is_open = [row not in self._ended for row in rows]
            firsts = range(0, len(rows), self.num_samples)
            has_open = [any(is_open[first : first + self.num_samples]) for first in firsts]
            keep = self.drop_done(has_open, at_once=needs_tokens or not any(has_open))
            if keep is not None:
                tokens = tokens.unflatten(0, (-1, self.num_samples))[keep].flatten(0, 1)
                rows = self._rows_of(self.sentences)
                limit = max([self.request.max_new_tokens[s] for s in self.sentences], default=0)

    def _run(
        self, tokens: Int[Tensor, "N all"], length: int, count: int, rows: list[int]
    ) -> tuple[Int[Tensor, "rows more"], list[list[list[int | float]]]]:
        """The rows after `count` steps in which the host does not wait for the device.

        Also returns for each step four values of each row: the token, its log-probability, the
        largest under the rules and the largest of the model. The last ones may be left out, if they
        equal the one before.
        """
        numbers = None
        if self.generators is not None:
            numbers = self._random_numbers(self.generators, count, rows, tokens.device)
        is_open = None
        if self._ended and self.request.rules:
            is_open = [row not in self._ended for row in rows]
        values: list[Tensor] = []
        for step in range(length, length + count):
            if self._logit_state is not None:
                logits = self._logit_state.next_logits(tokens).float()
                check_shape(logits, tokens.size(0), "next_logits")
                # Without scores the logits are in place of the log-probabilities.
                normalizer = logits.logsumexp(1, keepdim=True) if self.scores else 0.0
                largest, token = first_largest(self.under_rules(logits, tokens, step, is_open))
                values += [token, largest - normalizer]
                if self._reads_last:
                    tokens = token
                    continue
            else:
                model_log_probs, log_probs = self.next_step(tokens, step, is_open)
                if step == 0 and self.num_samples > 1:
                    tokens, model_log_probs, log_probs = (
                        of_sentences.repeat_interleave(self.num_samples, dim=0)
                        for of_sentences in (tokens, model_log_probs, log_probs)
                    )
                    if self.state is not None:
                        self.state.reorder(tokens.new_zeros(len(self.sentences), self.num_samples))
                best, token = first_largest(log_probs)
                if numbers is not None:
                    token = inverse_cdf(log_probs, numbers[:, step - length])[:, None]
                values += [token, model_log_probs.gather(1, token), best]
                if self.rules.checks_model:
                    values.append(model_log_probs.amax(dim=1, keepdim=True))
            tokens = torch.cat([tokens, token], dim=1)
        if count == 1:
            return tokens, [[column.flatten().tolist() for column in values]]
        dtype = sum_dtype(tokens.device)
        table = torch.cat([column.to(dtype) for column in values], dim=1)  # read at once
        return tokens, table.T.unflatten(0, (count, -1)).tolist()

    def _read(self, length: int, rows: list[int], values: list[list[int | float]]) -> SampledStep:
        """The new tokens of the open rows from the values of `_run`; some of the rows end."""
        step = SampledStep([], [], [], {})
        is_known = self.scores or self._logit_state is None
        tokens, *others = values
        columns = others + others[-1:] * (3 - len(others))
        for row, token, log_prob, best, largest in zip(
            rows, map(int, tokens), *columns, strict=True
        ):
            if row in self._ended:
                continue
            if self._logit_state is None:
                self.rules.check_not_nan(largest, best, length)
            elif log_prob != log_prob:  # bans give no NaN
                check_not_nan(log_prob, length, "the model")
            if best == -torch.inf:
                step.ended[row] = "dead_end"
                continue
            ids, log_probs = self.outputs[row]
            ids.append(token)
            log_probs.append(log_prob if is_known else math.nan)
            step.rows.append(row)
            step.tokens.append(token)
            step.token_log_probs.append(log_probs[-1])
            reason = self.request.end_reason(row // self.num_samples, ids, self.stop)
            if reason is not None:
                step.ended[row] = reason
        self._ended.update(step.ended)
        return step

    def _rows_of(self, sentences: list[int]) -> list[int]:
        """The rows of these sentences in the result."""
        size = self.num_samples
        return [row for s in sentences for row in range(s * size, (s + 1) * size)]

    def _random_numbers(
        self, generators: list[random.Random], count: int, rows: list[int], device: torch.device
    ) -> Float[Tensor, "rows count"]:
        """The next numbers of each row from [0, 1)."""
        numbers = [[generators[row].random() for _ in range(count)] for row in rows]
        uniform = torch.tensor(numbers, dtype=torch.float64)
        return uniform if sum_dtype(device) != torch.float64 else uniform.to(device)


def inverse_cdf(log_weights: Float[Tensor, "N V"], uniform: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """The id in whose part of the cumulative distribution each number from [0, 1) falls.

    The weights need not sum to 1. Ids of weight zero are never returned.
    """
    device = log_weights.device
    # On a device without double precision the CPU does it: a number rounded up to 1 is no index.
    values = log_weights if sum_dtype(device) == torch.float64 else log_weights.cpu()
    weights = values.double()
    weights = (weights - weights.amax(dim=1, keepdim=True)).exp()
    sums = weights.cumsum(dim=1)
    ids = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    return ids.clamp(max=weights.shape[1] - 1).to(device)  # V: all weights are zero or NaN


def generators_of(seeds: Sequence[int], batch: int, num_samples: int) -> list[random.Random]:
    """A generator for each row; that of the first sample of a sentence has the sentence's seed."""
    if len(seeds) != batch:
        raise UserError(f"seeds has {len(seeds)} seeds for {batch} sentences")
    if min(seeds, default=0) < 0:
        raise UserError(f"seeds must be 0 or more, not {min(seeds)}")
    return [
        random.Random(int(seed) + (sample << 64)) for seed in seeds for sample in range(num_samples)
    ]
