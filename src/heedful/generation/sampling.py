"""Sampling from any next-token function: one generator a row, whole or step by step."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.constraints import Constraints
from heedful.generation.logits import Context, Rule, apply_rules
from heedful.generation.next_token import NextLogProbs, State, ask, check, moves, sum_dtype
from heedful.generation.request import EosIds, PerSentence, Starts, read_prompts, read_request
from heedful.generation.scoring import Hypothesis, LengthScore

End = Literal["eos", "stop", "length", "dead_end"]
"""Why a row ended: an EOS, the `stop` function, the length limit, or nothing that may come."""

StopFunction = Callable[[int, list[int]], bool]
"""`stop(sentence index, new token ids) -> whether that is enough`."""


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
    ended: dict[int, End]


def sample(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    rules: Sequence[Rule] = (),
    eos_id: EosIds,
    max_new_tokens: PerSentence,
    min_new_tokens: PerSentence = 0,
    seeds: Sequence[int] | None,
    num_samples: int = 1,
    prompts: Sequence[Sequence[int]] | None = None,
    stop: StopFunction | None = None,
    state: State | None = None,
) -> list[Hypothesis]:
    """`num_samples` hypotheses for each start, those of one sentence adjacent.

    Each token is drawn from the distribution that the rules leave; `log_prob` and the other
    numbers of a hypothesis are the model's, before any rule, and `score` is the mean a token.
    Each row has a generator of its own and takes one number from it for each token, by the inverse
    of the cumulative distribution over the ids in their order: a sample depends on its seed and
    its sentence, not on its batch, nor on how many other samples there are.

    Args:
        next_log_probs: called first with one row a sentence, then with one for each sample that
            has not ended, in the order of the results. With a state it may look at
            `prefixes[:, -1:]` alone (all of `start` at the first call).
        start: `(B, t0)` ids that the samples go on from, for example prompts padded on the left.
            Sampling never looks into it.
        rules: logit rules, in their order; see `sampling_rules`.
        eos_id: what ends a row, one id or several.
        max_new_tokens: EOS included; one number, or one for each sentence. So `min_new_tokens`,
            before which neither EOS nor `stop` ends a row (but a forced EOS does).
        seeds: from 0, one for each sentence. None: no sampling; the likeliest token under the
            rules each time, the lowest id of equals.
        prompts: the real prompt tokens of each sentence, for the rules that look at them.
        stop: asked after each token other than EOS; where it says yes the row is finished.
        state: reordered after each step in which rows moved, then given to `next_log_probs`.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.
    """
    steps = sample_steps(
        next_log_probs,
        start,
        rules=rules,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        seeds=seeds,
        num_samples=num_samples,
        prompts=prompts,
        stop=stop,
        state=state,
    )
    ids: dict[int, list[int]] = {}
    parts: dict[int, list[float]] = {}
    ended: dict[int, End] = {}
    for step in steps:
        ended |= step.ended
        for row, token, part in zip(step.rows, step.tokens, step.token_log_probs, strict=True):
            ids.setdefault(row, []).append(token)
            parts.setdefault(row, []).append(part)
    return [_hypothesis(ids.get(row, []), parts.get(row, []), ended[row]) for row in sorted(ended)]


def sample_steps(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    rules: Sequence[Rule] = (),
    eos_id: EosIds,
    max_new_tokens: PerSentence,
    min_new_tokens: PerSentence = 0,
    seeds: Sequence[int] | None,
    num_samples: int = 1,
    prompts: Sequence[Sequence[int]] | None = None,
    stop: StopFunction | None = None,
    state: State | None = None,
) -> Iterator[SampledStep]:
    """What `sample` does, step by step, for output that is shown as it comes.

    The arguments are those of `sample`; they are checked at the call, not at the first step.
    """
    request = read_request(
        start,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        no_repeat_ngram_size=0,
        forced_prefix=None,
        force_eos=False,
    )
    batch = len(request.start)
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}")
    if seeds is None and num_samples > 1:
        raise UserError(f"num_samples = {num_samples} without seeds would all be the same")
    sampler = _Sampler(
        next_log_probs,
        state,
        request.constraints,
        list(rules),
        read_prompts(prompts, batch),
        None if seeds is None else _generators(seeds, batch, num_samples),
        num_samples,
        stop,
    )
    return sampler.steps(request.start)


@dataclass(frozen=True)
class StopStrings:
    """A `stop` function: enough when the new tokens, decoded, contain one of the strings.

    The text then still has the string and what the last token brought behind it; see `cut`.
    """

    decode: Callable[[list[int]], str]
    strings: Sequence[str]

    def __post_init__(self) -> None:
        _check_strings(self.strings)

    def __call__(self, sentence: int, ids: list[int]) -> bool:
        text = self.decode(ids)
        return any(string in text for string in self.strings)


def cut(text: str, strings: Sequence[str]) -> str:
    """The text before the first place where one of the strings begins; all of it without one."""
    _check_strings(strings)
    return text[: min((at for at in map(text.find, strings) if at >= 0), default=len(text))]


@dataclass(frozen=True)
class _Rows:
    """The rows that have not ended: which result each is, and its tokens."""

    row: list[int]
    tokens: Int[Tensor, "N all"]
    num_new: int

    @property
    def generated(self) -> Int[Tensor, "N t"]:
        return self.tokens[:, self.tokens.shape[1] - self.num_new :]


@dataclass(frozen=True)
class _Sampler:
    next_log_probs: NextLogProbs
    state: State | None
    constraints: Constraints
    rules: Sequence[Rule]
    prompts: list[list[int]]
    generators: list[random.Random] | None
    num_samples: int
    stop: StopFunction | None

    def steps(self, start: Int[Tensor, "B t0"]) -> Iterator[SampledStep]:
        """Until every row has ended."""
        tokens = start.repeat_interleave(self.num_samples, dim=0)
        rows = _Rows(list(range(len(tokens))), tokens, 0)
        memory: dict[str, Tensor] = {}
        while rows.row:
            step, rows = self._step(rows, memory)
            yield step

    @torch.no_grad()
    def _step(self, rows: _Rows, memory: dict[str, Tensor]) -> tuple[SampledStep, _Rows]:
        device = rows.tokens.device
        number = rows.num_new + 1
        # At the start the samples of a sentence are the same: asked for as one.
        copies = self.num_samples if rows.num_new == 0 else 1
        given = ask(
            self.next_log_probs, rows.tokens[::copies], self.state, self.constraints.eos_ids
        )
        check(given.amax(dim=1), number)
        given = given.repeat_interleave(copies, dim=0) if copies > 1 else given
        sentences = [row // self.num_samples for row in rows.row]
        sentence = torch.tensor(sentences, device=device)
        # First, so that a rule which keeps only few tokens keeps some that may come.
        ruled = self.constraints.forbid_early_end(given, rows.num_new, sentence)
        context = Context(self.prompts, rows.generated, sentence, memory)
        ruled = apply_rules(self.rules, ruled, context)

        best = ruled.max(dim=1)
        if best.values.isnan().any():
            raise UserError(f"a rule gave NaN at step {number}")
        alive = (best.values > -torch.inf).nonzero()[:, 0]
        token = self._pick(ruled[alive], best.indices[alive], [rows.row[i] for i in alive.tolist()])
        parts = given[alive, token].to(sum_dtype(device)).tolist()
        grown = torch.cat([rows.tokens[alive], token[:, None]], dim=1)
        grown_rows = _Rows([rows.row[i] for i in alive.tolist()], grown, number)

        ended: dict[int, End] = dict.fromkeys(set(rows.row) - set(grown_rows.row), "dead_end")
        ended |= self._ended(grown_rows, token.tolist())
        step = SampledStep(
            grown_rows.row,
            [row // self.num_samples for row in grown_rows.row],
            token.tolist(),
            parts,
            ended,
        )
        stays = [place for place, row in enumerate(grown_rows.row) if row not in ended]
        places = torch.tensor(stays, dtype=torch.long, device=device)
        former = alive[places] // copies
        if self.state is not None and stays and moves(former, len(rows.row) // copies):
            self.state.reorder(former)
        return step, _Rows([grown_rows.row[place] for place in stays], grown[places], number)

    def _pick(
        self, ruled: Float[Tensor, "N V"], best: Int[Tensor, "N"], rows: list[int]
    ) -> Int[Tensor, "N"]:
        """The next token of each row."""
        if self.generators is None:
            return best
        uniform = [self.generators[row].random() for row in rows]
        return inverse_cdf(ruled, torch.tensor(uniform, dtype=torch.float64))

    def _ended(self, rows: _Rows, tokens: list[int]) -> dict[int, End]:
        """Which rows end with their newest token, and why."""
        ended: dict[int, End] = {}
        generated = rows.generated.tolist() if self.stop is not None else []
        longest, shortest = self.constraints.max_lengths, self.constraints.min_lengths
        limits = longest.tolist(), shortest.tolist()
        for place, (row, token) in enumerate(zip(rows.row, tokens, strict=True)):
            sentence = row // self.num_samples
            most, least = (limit[sentence] for limit in limits)
            if token in self.constraints.eos_ids:
                ended[row] = "eos"
            elif (
                self.stop is not None
                and rows.num_new >= least
                and self.stop(sentence, generated[place])
            ):
                ended[row] = "stop"
            elif rows.num_new == most:
                ended[row] = "length"
        return ended


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
    threshold = uniform.to(sums.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, threshold, right=True)[:, 0].to(device)


def _generators(seeds: Sequence[int], batch: int, num_samples: int) -> list[random.Random]:
    """One a row; the first sample of a sentence has its seed itself."""
    if len(seeds) != batch:
        raise UserError(f"seeds has {len(seeds)} seeds for {batch} sentences")
    if min(seeds, default=0) < 0:
        raise UserError(f"seeds must be 0 or more, not {min(seeds)}")
    return [
        random.Random(int(seed) + (sample << 64)) for seed in seeds for sample in range(num_samples)
    ]


def _hypothesis(ids: list[int], parts: list[float], end: End) -> Hypothesis:
    log_prob = 0.0
    for part in parts:
        log_prob += part
    score = LengthScore()(torch.tensor(log_prob, dtype=torch.float64), len(ids)).item()
    return Hypothesis(ids, score, end in ("eos", "stop"), log_prob, parts)


def _check_strings(strings: Sequence[str]) -> None:
    if isinstance(strings, str):
        raise UserError(f"stop strings must be a list of strings, not the string {strings!r}")
    if "" in strings:
        raise UserError("a stop string is empty: every text contains it")
