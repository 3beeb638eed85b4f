"""Sampling: frequencies, independence of the batch, ends, streaming, and greedy without seeds."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import Hypothesis, greedy_search, sample, sample_steps
from heedful.generation.rules import (
    BannedTokens,
    ForcedTokens,
    NoRepeatNgram,
    PrefixFunction,
    RepetitionPenalty,
    Temperature,
    TopK,
    sampling_rules,
)
from heedful.generation.sampling import SampledStep, StopStrings, cut, inverse_cdf
from tables import Remembered, remembering

INF = math.inf
EOS, SIZE = 0, 8


@cache
def row_of(seed: int, prefix: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**40)
    logits = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    logits[EOS] -= 0.5
    return logits.log_softmax(dim=0)


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    return lambda prefixes: torch.stack([row_of(seed, tuple(p)) for p in prefixes.tolist()])


def always(*probabilities: float) -> Callable[[Tensor], Tensor]:
    log_probs = torch.tensor(probabilities, dtype=torch.float64).log()
    return lambda prefixes: log_probs.expand(len(prefixes), -1)


# --- Frequencies --------------------------------------------------------------------------------


def chi_square_of(counts: Counter, probabilities: dict) -> float:
    """The statistic, less what its mean and three times its deviation allow."""
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in probabilities.items() if p > 0}
    value = sum((counts[o] - total * p) ** 2 / (total * p) for o, p in probabilities.items() if p)
    freedom = sum(p > 0 for p in probabilities.values()) - 1
    return value - freedom - 3.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], [0.1, 0.05, 0.4, 0.15, 0.3]),
        ([TopK(2)], [0, 0, 4 / 7, 0, 3 / 7]),
        (sampling_rules(temperature=0.5), [0.01, 0.0025, 0.16, 0.0225, 0.09]),
        (sampling_rules(top_p=0.8, banned=[2]), [1 / 6, 0, 0, 1 / 4, 1 / 2]),
    ],
    ids=["none", "top-k", "temperature", "top-p after a ban"],
)
def test_tokens_come_as_often_as_their_probability_says(rules: list, expected: list[float]) -> None:
    number = 4000
    found = sample(
        always(0.1, 0.05, 0.4, 0.15, 0.3), torch.zeros(number, 1, dtype=torch.long), rules=rules,
        eos_id=1, max_new_tokens=1, seeds=range(number),
    )  # fmt: skip
    counts = Counter(hypothesis.ids[0] for hypothesis in found)
    shares = dict(enumerate(p / sum(expected) for p in expected))
    assert chi_square_of(counts, shares) < 0
    wrong = shares | {2: shares[2] + 0.08, 4: shares[4] - 0.08}
    assert 2 not in counts or chi_square_of(counts, wrong) > 0


def test_pairs_come_as_often_as_the_chain_says() -> None:
    """So that a row's numbers are not used twice, nor shared between the samples of a sentence."""
    function, number = random_function(5), 3000
    found = sample(function, [[3]], eos_id=EOS, max_new_tokens=2, seeds=[11], num_samples=number)
    counts = Counter(tuple(hypothesis.ids) for hypothesis in found)
    first = row_of(5, (3,)).exp().tolist()
    chain = {(EOS,): first[EOS]} | {
        (a, b): first[a] * float(row_of(5, (3, a)).exp()[b])
        for a in range(1, SIZE)
        for b in range(SIZE)
    }
    assert chi_square_of(counts, chain) < 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), u=st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_takes_the_token_in_whose_part_the_number_falls(seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(7, generator=generator, dtype=torch.float64)
    weights[torch.rand(7, generator=generator) < 0.4] = 0
    weights[3] += 0.01
    token = int(inverse_cdf(weights.log()[None], torch.tensor([u], dtype=torch.float64)))
    below, total = float(weights[:token].sum()), float(weights.sum())
    assert weights[token] > 0
    assert below <= u * total + 1e-12
    assert u * total <= below + float(weights[token]) + 1e-12


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_pick_no_impossible_token(u: float) -> None:
    for size in (3, 1000, 50_000):
        weights = torch.full((1, size), -INF)
        weights[0, 1:-1] = torch.randn(size - 2, generator=torch.Generator().manual_seed(size))
        token = int(inverse_cdf(weights, torch.tensor([u], dtype=torch.float64)))
        assert token == (1 if u == 0 else size - 2)


# --- Independence -------------------------------------------------------------------------------

batches = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 50),
        "limits": st.lists(st.integers(1, 7), min_size=1, max_size=5),
        "num_samples": st.integers(1, 3),
        "rules": st.sampled_from(
            [
                (),
                sampling_rules(temperature=0.8, top_k=5, top_p=0.9),
                sampling_rules(repetition_penalty=1.5, frequency_penalty=0.5, min_p=0.05),
                sampling_rules(no_repeat_ngram_size=1, typical_p=0.8, banned=[1, [2, 3]]),
            ]
        ),
    }
)


@settings(max_examples=40, deadline=None)
@given(case=batches, data=st.data())
def test_a_sample_depends_on_neither_batch_nor_order_nor_state(
    case: dict, data: st.DataObject
) -> None:
    limits, copies = case["limits"], case["num_samples"]
    batch = range(len(limits))
    seeds = [data.draw(st.integers(0, 2**63)) for _ in batch]
    prompts = [data.draw(st.lists(st.integers(0, 7), max_size=4)) for _ in batch]
    least = [data.draw(st.integers(0, limit)) for limit in limits]

    def found(of: list[int], state: Remembered | None = None) -> list[Hypothesis]:
        return sample(
            random_function(case["seed"])
            if state is None
            else remembering(partial(row_of, case["seed"])),
            torch.tensor([[5, sentence % 3 + 1] for sentence in of]),
            rules=case["rules"],
            eos_id=EOS,
            max_new_tokens=[limits[sentence] for sentence in of],
            min_new_tokens=[least[sentence] for sentence in of],
            seeds=[seeds[sentence] for sentence in of],
            prompts=[prompts[sentence] for sentence in of],
            num_samples=copies,
            state=state,
        )

    together = found(list(batch))
    assert len(together) == len(limits) * copies
    assert together == [one for sentence in batch for one in found([sentence])]
    order = data.draw(st.permutations(batch))
    again = found(list(order))
    for place, sentence in enumerate(order):
        here, there = place * copies, sentence * copies
        assert again[here : here + copies] == together[there : there + copies]
    assert found(list(batch), Remembered(len(limits))) == together
    for row, hypothesis in enumerate(together):
        sentence = row // copies
        assert least[sentence] <= len(hypothesis.ids) <= limits[sentence]
        assert EOS not in hypothesis.ids[:-1]
        assert hypothesis.finished == (hypothesis.ids[-1] == EOS)


def test_more_samples_leave_the_first_ones_as_they_were() -> None:
    options = {"eos_id": EOS, "max_new_tokens": 6, "seeds": [3, 4]}
    few = sample(random_function(1), [[1], [2]], num_samples=2, **options)
    many = sample(random_function(1), [[1], [2]], num_samples=5, **options)
    assert many[:2] == few[:2]
    assert many[5:7] == few[2:]
    assert len({tuple(hypothesis.ids) for hypothesis in many}) > 5


def test_the_loop_never_looks_into_start() -> None:
    """Left padding, or EOS in the prompt, changes nothing; rules see `prompts` alone."""
    rules = [RepetitionPenalty(1.4), NoRepeatNgram(2, include_prompt=True)]
    options = {"rules": rules, "eos_id": EOS, "max_new_tokens": 6, "seeds": [1, 2]}
    function = always(0.1, 0.3, 0.2, 0.2, 0.2)
    prompts = [[3], [2, 1]]
    padded = sample(function, [[EOS, EOS, 3], [EOS, 2, 1]], prompts=prompts, **options)
    assert padded == sample(function, [[7, 4], [4, 4]], prompts=prompts, **options)


def test_rows_that_are_done_leave_the_batch() -> None:
    shapes = []

    def counted(prefixes: Tensor) -> Tensor:
        shapes.append(tuple(prefixes.shape))
        return always(0.0, 0.5, 0.5)(prefixes)

    sample(counted, [[1], [2], [1]], eos_id=EOS, max_new_tokens=[2, 4, 1], seeds=[1, 2, 3],
           num_samples=2)  # fmt: skip
    assert shapes == [(3, 1), (4, 2), (2, 3), (2, 4)]


# --- What is reported ---------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 50), longest=st.integers(1, 8), least=st.integers(0, 8))
def test_without_seeds_and_rules_it_is_greedy_search(seed: int, longest: int, least: int) -> None:
    starts = [[1], [2], [3]]
    options = {
        "eos_id": [EOS, 4],
        "max_new_tokens": [longest, 1, 6],
        "min_new_tokens": min(least, longest, 1),
    }
    expected = greedy_search(random_function(seed), starts, **options)
    found = sample(random_function(seed), starts, seeds=None, **options)
    assert [[hypothesis] for hypothesis in found] == expected


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 50))
def test_greedy_under_rules_takes_what_greedy_search_takes(seed: int) -> None:
    rules = sampling_rules(repetition_penalty=2.0, no_repeat_ngram_size=2, banned=[3])
    shared = {"eos_id": EOS, "max_new_tokens": 8, "rules": rules, "prompts": [[1, 2], [4]]}
    found = sample(random_function(seed), [[1], [2]], seeds=None, **shared)
    expected = greedy_search(random_function(seed), [[1], [2]], **shared)
    assert [hypothesis.ids for hypothesis in found] == [one.ids for [one] in expected]


def test_log_probabilities_are_the_models_before_rules() -> None:
    rules = [Temperature(0.3), TopK(3), ForcedTokens({1: 6})]
    [found] = sample(
        random_function(2), [[1]], rules=rules, eos_id=EOS, max_new_tokens=5, min_new_tokens=5,
        seeds=[9],
    )  # fmt: skip
    parts = [float(row_of(2, (1, *found.ids[:i]))[found.ids[i]]) for i in range(5)]
    assert found.ids[1] == 6
    assert found.token_log_probs == parts
    assert found.log_prob == pytest.approx(sum(parts))
    assert found.score == pytest.approx(sum(parts) / 5)


# --- Ends ---------------------------------------------------------------------------------------


def test_each_of_several_ends_ends_and_none_comes_too_early() -> None:
    function = always(0.2, 0.2, 0.3, 0.3)
    options = {"eos_id": (0, 1), "max_new_tokens": 12, "num_samples": 40, "seeds": [5]}
    free = sample(function, [[2]], **options)
    assert {hypothesis.ids[-1] for hypothesis in free if hypothesis.finished} == {0, 1}
    assert min(len(hypothesis.ids) for hypothesis in free) == 1
    late = sample(function, [[2]], min_new_tokens=4, **options)
    assert min(len(hypothesis.ids) for hypothesis in late) == 4
    assert all(not {0, 1} & set(hypothesis.ids[:-1]) for hypothesis in late)


def test_a_cut_to_the_likeliest_leaves_something_where_eos_may_not_come() -> None:
    [found] = sample(
        always(0.9, 0.06, 0.04), [[1]], rules=[TopK(1)], eos_id=0, max_new_tokens=3,
        min_new_tokens=3, seeds=[1],
    )  # fmt: skip
    assert found.ids == [1, 1, 0]


def test_dead_end_ends_the_row_alone() -> None:
    def allowed(sentence: int, ids: list[int]) -> list[int]:
        return [1] if sentence == 0 or len(ids) < 2 else [4]

    function, rules = always(0.1, 0.5, 0.4, 0.0, 0.0), [PrefixFunction(allowed)]
    steps = list(sample_steps(function, [[1], [2]], rules=rules, eos_id=0, max_new_tokens=4,
                              seeds=[1, 1]))  # fmt: skip
    assert [(step.rows, step.tokens, step.ended) for step in steps] == [
        ([0, 1], [1, 1], {}), ([0, 1], [1, 1], {}), ([0], [1], {1: "dead_end"}),
        ([0], [1], {0: "length"}),
    ]  # fmt: skip
    found = sample(function, [[1], [2]], rules=rules, eos_id=0, max_new_tokens=4, seeds=[1, 1])
    assert [(h.ids, h.finished) for h in found] == [([1] * 4, False), ([1] * 2, False)]
    [nothing] = sample(function, [[1]], rules=[BannedTokens([0, 1, 2])], eos_id=0,
                       max_new_tokens=4, seeds=[1])  # fmt: skip
    assert nothing == Hypothesis([], 0.0, False, 0.0, [])


def test_state_follows_the_rows_behind_a_dead_end() -> None:
    """The second of three rows dies without a token in the second step, and leaves the state."""

    def allowed(sentence: int, ids: list[int]) -> list[int]:
        return [1] if sentence == 1 and ids else [2]

    rules = [BannedTokens([1]), PrefixFunction(allowed)]
    options = {"rules": rules, "eos_id": EOS, "max_new_tokens": 4, "seeds": [1, 2, 3]}
    starts, state = [[1], [2], [3]], Remembered(3)
    found = sample(remembering(partial(row_of, 2)), starts, state=state, **options)
    assert [h.ids for h in found] == [[2] * 4, [2], [2] * 4]
    assert state.prefixes[:, 0].tolist() == [1, 3]
    assert found == sample(random_function(2), starts, **options)


def decode(ids: list[int]) -> str:
    return "".join(".ab\nc"[token] for token in ids)


def test_stop_strings_end_a_row_across_tokens() -> None:
    def script(prefixes: Tensor) -> Tensor:
        text = [2, 1, 4, 4, 1, 3, 3, 2, 2]
        out = torch.full((len(prefixes), 5), -INF)
        out[:, text[prefixes.shape[1] - 1]] = 0.0
        return out

    options = {"eos_id": 0, "max_new_tokens": 9, "seeds": None}
    [found] = sample(script, [[1]], stop=StopStrings(decode, ["ca", "\n\n"]), **options)
    assert (decode(found.ids), found.finished) == ("bacca", True)
    assert cut(decode(found.ids), ["ca", "\n\n"]) == "bac"
    [found] = sample(script, [[1]], stop=StopStrings(decode, ["\n\n"]), **options)
    assert decode(found.ids) == "bacca\n\n"
    [found] = sample(script, [[1]], stop=StopStrings(decode, ["b"]), min_new_tokens=4, **options)
    assert decode(found.ids) == "bacc"
    [found] = sample(script, [[1]], stop=StopStrings(decode, ["bb"]), **options)
    assert (decode(found.ids), found.finished) == ("bacca\n\nbb", True)
    [found] = sample(script, [[1]], stop=StopStrings(decode, ["x"]), **options)
    assert (decode(found.ids), found.finished) == ("bacca\n\nbb", False)


def test_cut_takes_the_first_place_of_any() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("abcd", ["bcd", "abc"]) == ""
    assert cut("abcd", ["x"]) == "abcd"
    assert cut("abcd", []) == "abcd"


def test_stop_is_asked_with_the_sentence_of_its_sample() -> None:
    found = sample(
        always(0.0, 0.5, 0.5), [[1], [2]], eos_id=0, max_new_tokens=5, seeds=[1, 2], num_samples=2,
        stop=lambda sentence, ids: len(ids) == sentence + 2,
    )  # fmt: skip
    assert [len(hypothesis.ids) for hypothesis in found] == [2, 2, 3, 3]
    assert all(hypothesis.finished for hypothesis in found)


# --- Streaming ----------------------------------------------------------------------------------


def test_steps_are_the_sample_as_it_comes() -> None:
    options = {"eos_id": EOS, "max_new_tokens": 6, "seeds": [1, 2, 3], "num_samples": 2}
    steps = list(sample_steps(random_function(4), [[1], [2], [3]], **options))
    whole = sample(random_function(4), [[1], [2], [3]], **options)
    ids: list[list[int]] = [[] for _ in whole]
    for step in steps:
        assert step.sentences == [row // 2 for row in step.rows]
        for row, token in zip(step.rows, step.tokens, strict=True):
            ids[row].append(token)
    assert ids == [hypothesis.ids for hypothesis in whole]
    ends = {row: end for step in steps for row, end in step.ended.items()}
    assert [ends[row] == "eos" for row in range(6)] == [one.finished for one in whole]


def test_steps_come_one_at_a_time_and_leave_gradients_on() -> None:
    calls = []

    def counted(prefixes: Tensor) -> Tensor:
        calls.append(prefixes.shape[1])
        assert not torch.is_grad_enabled()
        return always(0.0, 0.5, 0.5)(prefixes)

    steps: Iterator[SampledStep] = sample_steps(
        counted, [[1]], eos_id=0, max_new_tokens=4, seeds=[1]
    )
    assert calls == []
    for number in range(1, 4):
        next(steps)
        assert len(calls) == number
        assert torch.is_grad_enabled()


def test_no_sentences() -> None:
    assert sample(random_function(0), [], eos_id=0, max_new_tokens=3, seeds=[]) == []


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seeds": [1]}, "2 sentences"),
        ({"seeds": [1, -2]}, "0 or more"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 2, "seeds": None}, "the same"),
        ({"eos_id": []}, "eos_id"),
        ({"eos_id": [1, -1]}, "eos_id"),
        ({"eos_id": [1, SIZE]}, "outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 6}, "above max_new_tokens"),
        ({"prompts": [[1]]}, "2 sentences"),
        ({"start": [[1], [1, 2]]}, "equally long"),
        ({"rules": [lambda log_probs, _: log_probs * math.nan]}, "a rule gave NaN"),
    ],
)
def test_bad_arguments(options: dict[str, object], says: str) -> None:
    good = {"start": [[1], [2]], "eos_id": EOS, "max_new_tokens": 5, "seeds": [1, 2]}
    with pytest.raises(UserError, match=says):
        sample(random_function(0), **(good | options))


def test_bad_arguments_show_at_the_call_and_bad_numbers_at_their_step() -> None:
    with pytest.raises(UserError, match="seeds"):
        sample_steps(random_function(0), [[1]], eos_id=0, max_new_tokens=2, seeds=[])
    options = {"eos_id": 0, "max_new_tokens": 2, "seeds": [1]}
    with pytest.raises(UserError, match="NaN at step 1"):
        sample(lambda prefixes: torch.full((1, 4), math.nan), [[1]], **options)
    with pytest.raises(UserError, match="log_softmax"):
        sample(lambda prefixes: torch.ones(1, 4), [[1]], **options)
    for strings, says in (("stop", "list"), (["a", ""], "empty")):
        with pytest.raises(UserError, match=says):
            StopStrings(decode, strings)
        with pytest.raises(UserError, match=says):
            cut("text", strings)


def test_generators_are_pythons_own() -> None:
    """Documented by its result: the same seed gives the same sample on every machine."""
    uniform = random.Random(7).random()
    [found] = sample(always(0.25, 0.25, 0.25, 0.25), [[1]], eos_id=0, max_new_tokens=1, seeds=[7])
    assert found.ids == [int(uniform * 4)]
