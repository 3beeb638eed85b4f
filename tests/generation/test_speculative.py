"""Speculative decoding over tables: outputs and distribution of the target model."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tables
from backend_models import TEXTS, model_of
from chance import fits_outcomes
from heedful.errors import UserError
from heedful.generation.request import StopFunction
from heedful.generation.rules import RepetitionPenalty, Temperature, TopK, TopP
from heedful.generation.sampling import sample
from heedful.generation.speculative import (
    CachedScorer,
    Draft,
    PromptLookup,
    Speculation,
    accept_or_resample,
    sample_token,
)
from heedful.generation.token_rules import (
    BannedTokens,
    Context,
    ForcedTokens,
    MinLength,
    NoRepeatNgram,
    Rule,
)

INF = math.inf
BELOW_1 = math.nextafter(1.0, 0.0)  # the largest number that a generator returns
Rows = Callable[[tuple[int, ...]], Tensor]  # log-probabilities after everything so far


def random_rows(seed: int, size: int, order: int | None, holes: float = 0.0) -> Rows:
    """As `tables.random_rows`, as tensors."""
    row = tables.random_rows(seed, size, holes, order=order)
    return cache(lambda ids: torch.tensor(row(ids), dtype=torch.float64))


def noisy(rows: Rows, seed: int, amount: float) -> Rows:
    """A draft that is right in most steps."""
    noise = random_rows(seed, len(rows((0,))), 1)
    return lambda ids: (rows(ids) + amount * noise(ids)).log_softmax(0)


class Table:
    """A scorer of a table that refuses calls in a wrong order, and records them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.held: list[int] = []
        self.fed: list[int] = []  # how many tokens at each call
        self.rewound: list[int] = []  # the number of tokens rewound at each call, if any
        self.most = 0

    def feed(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        assert len(tokens) >= 1
        start = len(self.held)
        self.held += tokens.tolist()
        self.fed.append(len(tokens))
        self.most = max(self.most, len(self.held))
        assert sum(self.fed) - sum(self.rewound) == len(self.held)
        return torch.stack(
            [self.rows(tuple(self.held[: end + 1])) for end in range(start, self.end)]
        )

    @property
    def end(self) -> int:
        return len(self.held)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.held)
        if length < len(self.held):
            self.rewound.append(len(self.held) - length)
        del self.held[length:]


class Avoid:
    """A rule on the whole context: a token that depends on it becomes less probable."""

    def __call__(self, log_probs: Tensor, context: Context) -> Tensor:
        assert context.sentence.tolist() == [0]
        assert len(context.prompts) == len(context.generated) == 1
        history = context.prompts[0] + context.generated[0].tolist()
        token = (sum(history) + len(history)) % log_probs.shape[1]
        log_probs = log_probs.clone()
        log_probs[:, token] -= 1.5
        return log_probs


def normalize(log_probs: Tensor, _: Context) -> Tensor:
    """NaN if an earlier rule excluded every token."""
    return log_probs.log_softmax(dim=1)


def ruled(rows: Rows, rules: Sequence[Rule], prompt: list[int], ids: list[int]) -> Tensor:
    row = rows(tuple(prompt + ids))[None]
    for rule in rules:
        generated = torch.tensor([ids], dtype=torch.long)
        row = rule(row, Context([prompt], generated, torch.zeros(1, dtype=torch.long)))
    return row[0]


def plain_greedy(
    rows: Rows, prompt: list[int], **options: Any
) -> tuple[list[int], bool, list[float]]:
    """By the batched search, which shares no loop with speculation."""

    def next_log_probs(prefixes: Tensor) -> Tensor:
        return torch.stack([rows(tuple(ids)) for ids in prefixes.tolist()])

    [actual] = sample(next_log_probs, [prompt], seeds=None, prompts=[prompt], **options)
    return actual.ids, actual.finished, actual.token_log_probs


def every_outcome(
    rows: Rows, prompt: list[int], eos_ids: Sequence[int], longest: int, rules: Sequence[Rule]
) -> dict[tuple[int, ...], float]:
    """The probability of each output under plain sampling."""
    outcomes: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        ids, before = open_.popitem()
        probs = ruled(rows, rules, prompt, list(ids)).softmax(0)
        for token, prob in enumerate(probs.tolist()):
            longer = (*ids, token)
            ended = token in eos_ids or len(longer) == longest
            (outcomes if ended else open_)[longer] = before * prob
    return {ids: prob for ids, prob in outcomes.items() if prob}


def check_properties(
    result: SimpleNamespace, target: Table, prompt: list[int], longest: int, num_draft: int
) -> None:
    assert len(target.fed) == result.num_target_calls
    assert 0 <= result.num_accepted <= result.num_proposed
    own = len(result.ids) - result.num_accepted
    # At a dead end neither the call that meets it nor the one that finds it adds an own token.
    without = 1 + (result.failure == "dead_end")
    assert result.num_target_calls - without <= own <= result.num_target_calls
    assert target.fed[0] == len(prompt)
    assert all(count <= num_draft + 1 for count in target.fed[1:])
    assert sum(count - 1 for count in target.fed[1:]) == result.num_proposed
    assert target.most <= len(prompt) + longest - 1
    assert result.log_prob == pytest.approx(sum(result.token_log_probs))


# --- Greedy -------------------------------------------------------------------------------------


RULES: list[list[Rule]] = [
    [],
    [Temperature(0.7), TopK(2)],
    [RepetitionPenalty(1.5), NoRepeatNgram(2), TopP(0.8)],
    [Avoid(), MinLength([0], [5]), normalize],
    [ForcedTokens({2: 1, 3: 3}), Avoid()],
]


@pytest.mark.parametrize("rules", range(len(RULES)))
@pytest.mark.parametrize("order", [1, 2, None])
def test_greedy_equals_plain_greedy(order: int | None, rules: int) -> None:
    """Hundreds of random cases: every draft, rules, EOS, lengths, impossible tokens."""
    chance = random.Random(rules * 10 + (order or 0))
    accepted = rejected = finished = 0
    for case in range(40):
        size, longest, num_draft = chance.randint(4, 7), chance.randint(1, 14), chance.randint(1, 5)
        holes = chance.choice([0.0, 0.4]) if normalize not in RULES[rules] else 0.0
        rows = random_rows(case, size, order, holes)
        prompt = [chance.randrange(size) for _ in range(chance.randint(1, 6))]
        eos_ids = chance.choice([0, [0, 2], [size - 1]])
        target, small = Table(rows), Table(noisy(rows, case + 1, chance.choice([0.0, 0.3, 1.0])))
        draft = chance.choice([CachedScorer(small), PromptLookup()])
        options: dict[str, Any] = {
            "eos_id": eos_ids, "max_new_tokens": longest, "rules": RULES[rules],
            "min_new_tokens": chance.choice([0, 0, min(3, longest)]),
            "no_repeat_ngram_size": chance.choice([0, 0, 3]),
            "forced_prefix": [[1, 1][: chance.choice([0, 0, 2]) * (longest > 1)]],
        }  # fmt: skip
        runs, result = run(target, draft, prompt, num_draft_tokens=num_draft, **options)
        ids, ends, parts = plain_greedy(rows, prompt, **options)
        assert (result.ids, result.finished) == (ids, ends)
        assert result.token_log_probs == parts
        assert all(runs) or (all(runs[:-1]) and not ends)
        check_properties(result, target, prompt, longest, num_draft)
        assert small.most <= max(0, len(prompt) + longest - 2)
        accepted += result.num_accepted
        rejected += len(target.rewound)
        finished += ends
    assert accepted > 10
    assert rejected > 5
    assert finished > 5


def run(
    rows: Rows | Table, draft: Draft | None = None, prompt: Sequence[int] = (1,), **options: Any
) -> tuple[list[list[int]], SimpleNamespace]:
    """The runs of tokens, the result and the counts; by default the draft is the target."""
    target = rows if isinstance(rows, Table) else Table(rows)
    draft = draft or CachedScorer(Table(target.rows))
    speculation = Speculation(target, draft, prompt, **{"eos_id": 0, "max_new_tokens": 9} | options)
    runs, result = list(speculation), speculation.result()
    assert list(itertools.chain(*runs)) == result.ids
    counts = {name: n for name, n in vars(speculation).items() if name.startswith("num_")}
    return runs, SimpleNamespace(**asdict(result), **counts)


def test_equal_log_probs_take_the_lower_id() -> None:
    _, result = run(lambda ids: torch.tensor([0.0, 0.5, 0.5]).log(), prompt=[2], max_new_tokens=4)
    assert result.ids == [1, 1, 1, 1]


def chain(ids: tuple[int, ...]) -> Tensor:
    """1 2 3 4 0 1 2 ...: each token is followed by the next, modulo 5; 5 is unlikely."""
    probs = torch.full((6,), 0.02, dtype=torch.float64)
    probs[(ids[-1] + 1) % 5] = 0.9
    return probs.log()


@pytest.mark.parametrize("longest", range(1, 12))
@pytest.mark.parametrize("num_draft", [1, 2, 4])
def test_target_calls_with_a_perfect_draft(longest: int, num_draft: int) -> None:
    target = Table(chain)
    options = {"eos_id": 5, "max_new_tokens": longest, "num_draft_tokens": num_draft}
    _, result = run(target, prompt=[3, 1], **options)
    assert len(result.ids) == longest
    assert not result.finished
    assert result.num_target_calls == 1 + math.ceil((longest - 1) / (num_draft + 1))
    assert result.num_accepted == result.num_proposed
    assert target.rewound == []


def test_target_calls_with_a_draft_that_is_never_right() -> None:
    target, small = Table(chain), Table(lambda ids: chain((*ids[:-1], ids[-1] + 1)))
    _, result = run(target, CachedScorer(small), eos_id=5, num_draft_tokens=3)
    assert result.ids == [2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert (result.num_target_calls, result.num_accepted) == (9, 0)
    # All proposals go after each call; the last round has no room to propose.
    assert target.rewound == [3, 3, 3, 3, 3, 2, 1]
    assert target.fed == [1, 4, 4, 4, 4, 4, 3, 2, 1]
    # The last proposal of a round is never passed to the draft, so it rewinds one less.
    assert small.rewound == [2, 2, 2, 2, 2, 1]
    assert small.fed == [2] + [1] * 17


def test_stop_is_called_after_each_token_of_a_run() -> None:
    stop: StopFunction = lambda _, ids: ids[-2:] in ([1, 2], [3, 4], [2, 2])  # noqa: E731
    for case in range(40):
        rows = random_rows(case, 5, 2)
        options = {"eos_id": 0, "max_new_tokens": 12, "stop": stop}
        expected = plain_greedy(rows, [1, 2, 3], **options)
        for draft in (CachedScorer(Table(noisy(rows, case, 0.3))), PromptLookup()):
            _, result = run(rows, draft, [1, 2, 3], **options)
            assert (result.ids, result.finished, result.token_log_probs) == expected
    _, result = run(chain, max_new_tokens=20, stop=lambda _, ids: ids[-1] == 3)
    assert (result.ids, result.finished) == ([2, 3], True)
    assert (result.num_proposed, result.num_accepted) == (3, 1)


def test_a_dead_end_is_cut_off() -> None:
    def third_forbidden(log_probs: Tensor, context: Context) -> Tensor:
        return log_probs - INF if context.generated.shape[1] == 2 else log_probs

    for draft in (CachedScorer(Table(chain)), PromptLookup()):
        runs, result = run(chain, draft, [1, 2, 3, 4, 0, 1], rules=[third_forbidden])
        assert (result.ids, result.finished) == ([2, 3], False)
        assert (runs[-1], result.failure) == ([], "dead_end")  # as without a draft
    runs, result = run(chain, PromptLookup(), rules=[lambda log_probs, _: log_probs - INF])
    assert (result.ids, result.finished, result.log_prob, runs) == ([], False, 0.0, [[]])
    assert result.failure == "dead_end"
    _, result = run(chain, max_new_tokens=2)
    assert (result.finished, result.failure) == (False, None)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("rules", [[BannedTokens([3])], [BannedTokens([3]), normalize]])
def test_a_draft_proposes_no_forbidden_token(seed: int | None, rules: list[Rule]) -> None:
    rows: Rows = lambda ids: torch.tensor([0.02, 0.02, 0.9, 0.06]).log()  # noqa: E731
    options = {"eos_id": 3, "max_new_tokens": 3, "rules": rules, "seed": seed}
    _, result = run(rows, PromptLookup(), [2, 3], **options)
    assert result.ids[0] == 2  # and after that the lookup proposes 3
    assert (len(result.ids), 3 in result.ids) == (3, False)
    assert (result.num_target_calls, result.num_proposed) == (3, 0)


def test_the_memory_of_rules_is_separate_for_the_draft() -> None:
    """Draft and target may differ in device and precision."""

    def remembering(log_probs: Tensor, context: Context) -> Tensor:
        first = context.memory.setdefault("first", log_probs)
        assert first.dtype == log_probs.dtype
        return log_probs

    draft = CachedScorer(Table(lambda ids: chain(ids).float()))
    _, result = run(chain, draft, rules=[remembering])
    assert (result.ids, result.num_accepted) == ([2, 3, 4, 0], 3)


def test_scorers_can_have_been_used_before() -> None:
    """The target between calls, the draft before it became one."""
    rows = random_rows(3, 6, None)
    target, small = Table(rows), Table(rows)
    small.feed(torch.tensor([3, 3]))
    draft = CachedScorer(small)
    for prompt in ([1, 2], [1, 4], [5], [1, 2]):
        target.feed(torch.tensor([4, 4, 4]))
        options = {"eos_id": 0, "max_new_tokens": 9, "min_new_tokens": 4}
        _, result = run(target, draft, prompt, **options)
        assert result.ids == plain_greedy(rows, prompt, **options)[0]
        assert result.num_accepted == result.num_proposed
        for table in (target, small):
            assert table.held == (prompt + result.ids)[: table.end]


# --- Sampling -----------------------------------------------------------------------------------


SAMPLED_RULES: dict[str, list[Rule]] = {
    "no rules": [],
    "rules": [Avoid(), Temperature(1.3), TopK(3), MinLength([0], [2])],
}
NUM_SAMPLES = 500
PROMPT = [1, 2, 3, 1, 2, 3, 1]
TARGET = random_rows(5, 4, None)
TARGET_ORDER_2 = random_rows(8, 4, 2)
SPARSE = random_rows(9, 4, 1, holes=0.5)


def draft_named(name: str, rows: Rows) -> Draft:
    drafts: dict[str, Callable[[], Draft]] = {
        "identical": lambda: CachedScorer(Table(rows)),
        "close": lambda: CachedScorer(Table(noisy(rows, 3, 0.4))),
        "bad": lambda: CachedScorer(Table(random_rows(77, 4, 1))),
        "sparse": lambda: CachedScorer(Table(SPARSE)),
        "lookup": PromptLookup,
    }
    return drafts[name]()


def samples(
    rows: Rows, draft: str, rules: Sequence[Rule], number: int
) -> tuple[Counter[tuple[int, ...]], int, int]:
    counts: Counter[tuple[int, ...]] = Counter()
    proposed = accepted = 0
    for seed in range(number):
        options = {"max_new_tokens": 4, "num_draft_tokens": 2, "rules": rules, "seed": seed}
        _, result = run(rows, draft_named(draft, rows), PROMPT, **options)
        counts[tuple(result.ids)] += 1
        proposed += result.num_proposed
        accepted += result.num_accepted
    return counts, proposed, accepted


@pytest.mark.parametrize("rules", SAMPLED_RULES)
@pytest.mark.parametrize("draft", ["identical", "close", "bad", "sparse", "lookup"])
def test_samples_have_the_distribution_of_the_target(draft: str, rules: str) -> None:
    """Chi-square over every possible output of at most 4 tokens."""
    rows = TARGET if rules == "rules" else TARGET_ORDER_2
    counts, proposed, accepted = samples(rows, draft, SAMPLED_RULES[rules], NUM_SAMPLES)
    assert fits_outcomes(counts, every_outcome(rows, PROMPT, [0], 4, SAMPLED_RULES[rules]))
    assert proposed > NUM_SAMPLES / 2
    if draft == "identical":
        assert accepted == proposed
    else:
        assert 0 < accepted < proposed


def test_chi_square_rejects_another_target() -> None:
    """The test above can fail: these samples are not those of the target."""
    counts, _, _ = samples(TARGET_ORDER_2, "close", [], NUM_SAMPLES)
    other = noisy(TARGET_ORDER_2, 3, 0.4)
    assert not fits_outcomes(counts, every_outcome(other, PROMPT, [0], 4, []))


distributions = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        *[st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any) for _ in range(2)]
    )
)


@given(weights=distributions)
@settings(max_examples=30, deadline=None)
def test_accept_or_resample_has_exactly_the_targets_distribution(
    weights: tuple[list[int], list[int]],
) -> None:
    """Summed over all proposals and over a fine grid of both random numbers."""
    p, q = (torch.tensor(some, dtype=torch.float64) / sum(some) for some in weights)
    grid = [(i + 0.5) / 200 for i in range(200)]
    given_ = torch.zeros_like(p)
    for token in range(len(q)):
        if not q[token]:
            continue
        accepted = 0
        for number in grid:
            numbers = iter([number, 0.5])
            accepted += accept_or_resample(token, q, p, lambda numbers=numbers: next(numbers))[1]
        given_[token] += q[token] * accepted / len(grid)
        if accepted < len(grid):
            sampled = Counter(
                accept_or_resample(token, q, p, iter([BELOW_1, number]).__next__)[0]
                for number in grid
            )
            for other, count in sampled.items():
                rejected = 1 - accepted / len(grid)
                given_[other] += q[token] * rejected * count / len(grid)
    assert torch.allclose(given_, p, atol=0.02)


def test_accept_or_resample_if_p_and_q_differ_only_by_rounding() -> None:
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q = torch.tensor([math.nextafter(0.5, 1), 0.5], dtype=torch.float64)
    assert accept_or_resample(0, q, p, iter([BELOW_1, 0.9]).__next__) == (1, False)


@pytest.mark.parametrize("number", [0.0, 0.3, 0.5, BELOW_1])
def test_sample_token_returns_no_token_of_weight_0(number: float) -> None:
    weights = torch.tensor([0.0, 0.1, 0.0, 0.1, 0.0], dtype=torch.float64)
    assert sample_token(weights, number) == (1 if number < 0.5 else 3)


def test_a_seed_repeats_its_sample() -> None:
    def drawn(seed: int) -> SimpleNamespace:
        options = {"eos_id": 3, "max_new_tokens": 12, "min_new_tokens": 12, "seed": seed}
        return run(TARGET, draft_named("close", TARGET), PROMPT, **options)[1]

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed).ids) for seed in range(10)}) > 5
    for seed in range(10):
        ids = drawn(seed).ids
        parts = [TARGET(tuple(PROMPT + ids[:i]))[token].item() for i, token in enumerate(ids)]
        assert drawn(seed).token_log_probs == parts


# --- Drafts -------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 2), max_size=12))
def test_prompt_lookup_finds_the_longest_ngram(ids: list[int]) -> None:
    expected = None
    for size in (3, 2, 1):
        actual = [i for i in range(len(ids) - size) if ids[i : i + size] == ids[-size:]]
        if actual and expected is None:
            expected = ids[actual[-1] + size]
    log_probs = PromptLookup().next_log_probs(ids, 3)
    assert (log_probs is None) == (expected is None)
    if log_probs is not None:
        assert log_probs.exp().tolist() == [float(token == expected) for token in range(3)]


# --- What users get wrong -----------------------------------------------------------------------


class Flat(Table):
    """A scorer that returns only the last row."""

    def feed(self, tokens: Tensor) -> Tensor:
        return super().feed(tokens)[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, -2]}, "holds -2"),
        ({"prompt": [6, 1]}, "token id 6 .* outside the vocabulary"),
        ({"eos_id": 6}, "token id 6 .* outside the vocabulary"),
        ({"eos_id": [0, -1]}, "eos_id must be a token id"),
        ({"eos_id": []}, "eos_id must be a token id"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1, not 0"),
        ({"seed": -1}, "seed must be 0 or more, not -1"),
        ({"target": Table(lambda ids: chain(ids) + 1)}, "the target gave .* log_softmax"),
        ({"target": Table(lambda ids: chain(ids) * math.nan)}, "the target gave NaN"),
        ({"draft": CachedScorer(Table(lambda ids: chain(ids) * math.nan))}, "the draft gave NaN"),
        ({"draft": CachedScorer(Table(lambda ids: chain(ids)[1:]))}, "5 tokens .* one of 6"),
        ({"rules": [lambda log_probs, _: log_probs * math.nan]}, "a rule gave NaN at step 1"),
        ({"rules": [lambda log_probs, _: log_probs[:, 1:]]}, "it must keep"),
        ({"target": Flat(chain), "prompt": [1, 2]}, r"the target gave shape \(6,\) for 2 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_scorers_and_drafts_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {
        "target": Table(chain),
        "draft": CachedScorer(Table(chain)),
        "prompt": [1],
        "eos_id": 0,
        "max_new_tokens": 3,
    } | changes
    with pytest.raises(UserError, match=message):
        list(Speculation(**arguments))


@pytest.mark.parametrize("options", [{}, {"normalization": "gnmt", "length_penalty": 0.6}])
def test_an_output_with_a_draft_has_the_score_of_one_without(options: dict[str, Any]) -> None:
    model = model_of("gpt2")
    options = options | {"max_new_tokens": 8, "return_details": True}
    plain = model.generate(TEXTS[:2], **options)
    drafted = model.generate(TEXTS[:2], draft="lookup", **options)
    for [one], [other] in zip(plain, drafted, strict=True):
        assert one.ids == other.ids
        assert one.score == pytest.approx(other.score, abs=1e-4)
