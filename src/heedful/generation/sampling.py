"""Greedy decoding and sampling from any next-token function: whole, or step by step.

The device only chooses; which rows have ended the host works out whenever it looks at what was
chosen: each step where looking is free or asked for, else every few steps.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.decoding import Search
from heedful.generation.hypotheses import Hypothesis, LengthScore
from heedful.generation.request import EndReason, SearchRequest, Starts, StopFunction
from heedful.generation.state import NextLogProbs, State, sum_dtype
from heedful.generation.token_rules import PrefixFunction
from heedful.generation.topk import first_largest

STEPS_BETWEEN_LOOKS = 8  # on a device whose answers must be waited for


@dataclass(frozen=True)
class SampledStep:
    """What one step gave: entry i of the lists is one new token of one row.

    `rows` are the places in what `sample` returns, `sentences` the sentences that they belong to.
    `ended` says which rows ended in this step, and why; one at a dead end gets no token.
    """

    rows: list[int]
    sentences: list[int]
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
    """`num_samples` hypotheses for each start, those of one sentence adjacent.

    Each token is drawn from the distribution that the rules leave; `log_prob` and the other
    numbers of a hypothesis are the model's, before any rule. `score` says how the reported score
    follows from them; default: the mean a token. Options are those of `sample_steps`.
    """
    rows: dict[int, tuple[list[int], list[float]]] = {}
    ended: dict[int, EndReason] = {}
    for step in sample_steps(next_log_probs, start, **options):
        ended |= step.ended
        for row, token, part in zip(step.rows, step.tokens, step.token_log_probs, strict=True):
            ids, parts = rows.setdefault(row, ([], []))
            ids.append(token)
            parts.append(part)
    of_score = score or LengthScore()
    return [
        of_score.hypothesis(*rows.get(row, ([], [])), end in ("eos", "stop"))
        for row, end in sorted(ended.items())
    ]


def sample_steps(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    seeds: Sequence[int] | None,
    num_samples: int = 1,
    stop: StopFunction | None = None,
    state: State | None = None,
    look_every: int | None = None,
    **options: Any,
) -> Iterator[SampledStep]:
    """What `sample` gives, step by step, for output that is shown as it comes.

    Each row has a generator of its own and takes one number from it for each token, by the inverse
    of the cumulative distribution over the ids in their order: a sample depends on its seed and
    its sentence, not on its batch, nor on how many other samples there are. Arguments are checked
    at the call, not at the first step.

    Args:
        next_log_probs: called first with one row a sentence, then with one for each sample, in the
            order of the results. Samples that have ended leave with the last of their sentence, in
            large batches some at a time. With a state it may look at `prefixes[:, -1:]` alone (all
            of `start` at the first call).
        start, options: `eos_id`, `max_new_tokens` and more, see `SearchRequest.from_options`.
            Before `min_new_tokens` neither EOS nor `stop` ends a row, but a forced EOS does.
        seeds: from 0, one for each sentence. None: no sampling; the likeliest token under the
            rules each time, the lowest id of equals.
        stop: asked after each token other than EOS; where it says yes the row is finished.
        state: given to `next_log_probs`; told between two calls how rows moved.
        look_every: after how many steps the host looks at what was chosen. Default: each step
            where there is no state, on the CPU, or with a function to ask (`stop`,
            `PrefixFunction`); else `STEPS_BETWEEN_LOOKS`.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.
    """
    request = SearchRequest.from_options(start, **options)
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}")
    if seeds is None and num_samples > 1:
        raise UserError(f"num_samples = {num_samples} without seeds would all be the same")
    generators = None if seeds is None else _generators(seeds, request.batch, num_samples)
    numbers = num_samples, stop, look_every
    return Sampler(next_log_probs, state, request, generators, *numbers).steps()


@dataclass
class Sampler(Search):
    """The loop of `sample`; without generators it is greedy."""

    generators: list[random.Random] | None = None
    num_samples: int = 1
    stop: StopFunction | None = None
    look_every: int | None = None

    def steps(self) -> Iterator[SampledStep]:
        """Until every row has ended."""
        asks_host = any(isinstance(rule, PrefixFunction) for rule in self.request.rules)
        looks_each = asks_host or self.stop is not None or self.state is None
        looks_each = looks_each or self.request.start.device.type == "cpu"
        every = self.look_every or (1 if looks_each else STEPS_BETWEEN_LOOKS)
        ids: list[list[int]] = [[] for _ in range(self.request.batch * self.num_samples)]
        ended: dict[int, EndReason] = {}
        tokens, length = self.request.start, 0
        while self.sentences:
            longest = max(self.request.max_new_tokens[sentence] for sentence in self.sentences)
            with torch.no_grad():
                tokens, looks = self._run(tokens, length, min(every, longest - length), ended)
                seen = looks.tolist()
            rows = self._rows(self.sentences)
            for of_step in seen:
                length += 1
                yield self._read(length, rows, of_step, ids, ended)
            is_open = [not all(row in ended for row in self._rows([s])) for s in self.sentences]
            keep = self.drop_done(is_open, at_once=asks_host or not any(is_open))
            if keep is not None:
                tokens = tokens.unflatten(0, (-1, self.num_samples))[keep].flatten(0, 1)

    def _run(
        self,
        tokens: Int[Tensor, "N all"],
        length: int,
        count: int,
        ended: dict[int, EndReason],
    ) -> tuple[Int[Tensor, "rows more"], Float[Tensor, "count seen rows"]]:
        """Some steps in which nothing waits for the device: the rows, and what is to be seen.

        For each step and row that is the token, its log-probability, the largest value given and
        the largest under the rules.
        """
        device, dtype = tokens.device, sum_dtype(tokens.device)
        numbers = self._numbers(count, device)
        is_open = [row not in ended for row in self._rows(self.sentences)] if ended else None
        looks = []
        for number in range(count):
            given, ruled = self.next_step(tokens, length + number, is_open)
            if length + number == 0 and self.num_samples > 1:
                tokens, given, ruled = (
                    of.repeat_interleave(self.num_samples, dim=0) for of in (tokens, given, ruled)
                )
                if self.state is not None:
                    self.state.reorder(tokens.new_zeros(len(self.sentences), self.num_samples))
            best, token = first_largest(ruled)
            if numbers is not None:
                token = inverse_cdf(ruled, numbers[:, number])[:, None]
            largest = given.amax(dim=1) if self.step.checks_given else best[:, 0]
            look = (token[:, 0], given.gather(1, token)[:, 0], largest, best[:, 0])
            looks.append(torch.stack([part.to(dtype) for part in look]))
            tokens = torch.cat([tokens, token], dim=1)
        return tokens, torch.stack(looks)

    def _read(
        self,
        length: int,
        rows: list[int],
        seen: list[list[float]],
        ids: list[list[int]],
        ended: dict[int, EndReason],
    ) -> SampledStep:
        """What one step gave the rows that had not ended; those that end with it are added."""
        step = SampledStep([], [], [], [], {})
        for row, token, part, largest, best in zip(rows, *seen, strict=True):
            if row in ended:
                continue
            self.step.check_not_nan(largest, best, length)
            if best == -torch.inf:
                step.ended[row] = "dead_end"
                continue
            sentence = row // self.num_samples
            ids[row].append(int(token))
            step.rows.append(row)
            step.sentences.append(sentence)
            step.tokens.append(int(token))
            step.token_log_probs.append(part)
            end = self.request.end_reason(sentence, ids[row], self.stop)
            if end is not None:
                step.ended[row] = end
        ended |= step.ended
        return step

    def _rows(self, sentences: list[int]) -> list[int]:
        """The numbers of the sentences' rows among the results."""
        size = self.num_samples
        return [row for s in sentences for row in range(s * size, (s + 1) * size)]

    def _numbers(self, count: int, device: torch.device) -> Float[Tensor, "rows count"] | None:
        """Each row's next numbers from [0, 1); None where nothing is drawn."""
        if self.generators is None:
            return None
        rows = [self.generators[row] for row in self._rows(self.sentences)]
        numbers = [[row.random() for _ in range(count)] for row in rows]
        drawn = torch.tensor(numbers, dtype=torch.float64)
        return drawn if sum_dtype(device) != torch.float64 else drawn.to(device)


def inverse_cdf(log_weights: Float[Tensor, "N V"], uniform: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """The id in whose part of the cumulative distribution each number from [0, 1) falls.

    The weights need not sum to 1. Ids are in their order; one of weight zero is never picked.
    """
    device = log_weights.device
    # Where there is no double precision, on the CPU: a number rounded up to 1 would fall outside.
    near = log_weights if sum_dtype(device) == torch.float64 else log_weights.cpu()
    weights = near.double()
    weights = (weights - weights.amax(dim=1, keepdim=True)).exp()
    sums = weights.cumsum(dim=1)
    picked = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    return picked.clamp(max=weights.shape[1] - 1).to(device)  # beyond the last: no weight at all


def _generators(seeds: Sequence[int], batch: int, num_samples: int) -> list[random.Random]:
    """One a row; the first sample of a sentence has its seed itself."""
    if len(seeds) != batch:
        raise UserError(f"seeds has {len(seeds)} seeds for {batch} sentences")
    if min(seeds, default=0) < 0:
        raise UserError(f"seeds must be 0 or more, not {min(seeds)}")
    return [
        random.Random(int(seed) + (sample << 64)) for seed in seeds for sample in range(num_samples)
    ]
