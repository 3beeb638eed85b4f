"""Sampling: frequencies, independence of the batch, ends, streaming, and greedy without seeds."""

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chance import fits_outcomes
from heedful.errors import UserError
from heedful.generation import Hypothesis, sample, sample_steps
from heedful.generation.outputs import StopStrings, cut
from heedful.generation.rules import TopK, sampling_rules
from heedful.generation.sampling import inverse_cdf
from heedful.generation.token_rules import BannedTokens, PrefixFunction
from tables import INF, Remembered, Row, from_rows, from_table, parts_of, random_rows, remembering

EOS, SIZE = 0, 8


def rows_of(seed: int) -> Row:
    return random_rows(seed, SIZE, eos_bias=-0.5)


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    return from_rows(rows_of(seed))


def always(*probabilities: float) -> Callable[[Tensor], Tensor]:
    return from_table({}, list(probabilities))


# --- Frequencies --------------------------------------------------------------------------------


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
def test_token_frequencies_equal_their_probabilities(rules: list, expected: list[float]) -> None:
    number = 4000
    actual = sample(
        always(0.1, 0.05, 0.4, 0.15, 0.3), torch.zeros(number, 1, dtype=torch.long), rules=rules,
        eos_id=1, max_new_tokens=1, seeds=range(number),
    )  # fmt: skip
    counts = Counter(hypothesis.ids[0] for hypothesis in actual)
    shares = dict(enumerate(p / sum(expected) for p in expected))
    assert fits_outcomes(counts, shares)
    wrong = shares | {2: shares[2] + 0.08, 4: shares[4] - 0.08}
    assert 2 not in counts or not fits_outcomes(counts, wrong)


def test_frequencies_of_token_pairs_equal_their_probabilities() -> None:
    """No random number is used twice or shared between the samples of a sentence."""
    function, number = random_function(5), 3000
    actual = sample(function, [[3]], eos_id=EOS, max_new_tokens=2, seeds=[11], num_samples=number)
    counts = Counter(tuple(hypothesis.ids) for hypothesis in actual)
    row = rows_of(5)
    chain = {
        ids: math.exp(sum(parts_of(row, (3,), ids)))
        for ids in [(EOS,), *((a, b) for a in range(1, SIZE) for b in range(SIZE))]
    }
    assert fits_outcomes(counts, chain)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), u=st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_selects_the_token_of_the_interval(seed: int, u: float) -> None:
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
def test_the_ends_of_the_unit_interval_never_select_impossible_tokens(u: float) -> None:
    for size in (3, 1000, 50_000):
        weights = torch.full((1, size), -INF)
        weights[0, 1:-1] = torch.randn(size - 2, generator=torch.Generator().manual_seed(size))
        token = int(inverse_cdf(weights, torch.tensor([u], dtype=torch.float64)))
        assert token == (1 if u == 0 else size - 2)


# --- Independence -------------------------------------------------------------------------------


def test_more_samples_do_not_change_the_first_ones() -> None:
    options = {"eos_id": EOS, "max_new_tokens": 6, "seeds": [3, 4]}
    few = sample(random_function(1), [[1], [2]], num_samples=2, **options)
    many = sample(random_function(1), [[1], [2]], num_samples=5, **options)
    assert many[:2] == few[:2]
    assert many[5:7] == few[2:]
    assert len({tuple(hypothesis.ids) for hypothesis in many}) > 5


# --- Reported values ----------------------------------------------------------------------------


# --- Ends ---------------------------------------------------------------------------------------


def test_a_dead_end_ends_only_its_row() -> None:
    def allowed(sentence: int, ids: list[int]) -> list[int]:
        return [1] if sentence == 0 or len(ids) < 2 else [4]

    function, rules = always(0.1, 0.5, 0.4, 0.0, 0.0), [PrefixFunction(allowed)]
    steps = list(sample_steps(function, [[1], [2]], rules=rules, eos_id=0, max_new_tokens=4,
                              seeds=[1, 1]))  # fmt: skip
    assert [(step.rows, step.tokens, step.ended) for step in steps] == [
        ([0, 1], [1, 1], {}), ([0, 1], [1, 1], {}), ([0], [1], {1: "dead_end"}),
        ([0], [1], {0: "length"}),
    ]  # fmt: skip
    actual = sample(function, [[1], [2]], rules=rules, eos_id=0, max_new_tokens=4, seeds=[1, 1])
    assert [(h.ids, h.finished) for h in actual] == [([1] * 4, False), ([1] * 2, False)]
    [nothing] = sample(function, [[1]], rules=[BannedTokens([0, 1, 2])], eos_id=0,
                       max_new_tokens=4, seeds=[1])  # fmt: skip
    assert nothing == Hypothesis([], 0.0, False, 0.0, [], "dead_end")


def test_the_state_is_reordered_after_a_dead_end() -> None:
    """The second of three rows has no possible token in the second step, and leaves the state."""

    def allowed(sentence: int, ids: list[int]) -> list[int]:
        return [1] if sentence == 1 and ids else [2]

    rules = [BannedTokens([1]), PrefixFunction(allowed)]
    options = {"rules": rules, "eos_id": EOS, "max_new_tokens": 4, "seeds": [1, 2, 3]}
    starts, state = [[1], [2], [3]], Remembered(3)
    actual = sample(remembering(rows_of(2)), starts, state=state, **options)
    assert [h.ids for h in actual] == [[2] * 4, [2], [2] * 4]
    assert state.prefixes[:, 0].tolist() == [1, 3]
    assert actual == sample(random_function(2), starts, **options)


def decode(ids: list[int]) -> str:
    return "".join(".ab\nc"[token] for token in ids)


class Characters:
    """Counts what is decoded; the tokens are characters."""

    errors = "replace"
    num_decoded = 0

    def skips(self, token: int) -> bool:
        return False

    def added_bytes(self, last: int | None, rows: list[list[int]]) -> list[bytes]:
        self.num_decoded += sum(map(len, rows))
        return [decode(row).encode() for row in rows]


def stops(*strings: str) -> StopStrings:
    decoder: Any = Characters()
    return StopStrings(decoder, strings)


def test_stop_strings_end_a_row_across_tokens() -> None:
    def script(prefixes: Tensor) -> Tensor:
        text = [2, 1, 4, 4, 1, 3, 3, 2, 2]
        out = torch.full((len(prefixes), 5), -INF)
        out[:, text[prefixes.shape[1] - 1]] = 0.0
        return out

    options = {"eos_id": 0, "max_new_tokens": 9, "seeds": None}
    [actual] = sample(script, [[1]], stop=stops("ca", "\n\n"), **options)
    assert (decode(actual.ids), actual.finished) == ("bacca", True)
    assert cut(decode(actual.ids), ["ca", "\n\n"]) == "bac"
    [actual] = sample(script, [[1]], stop=stops("\n\n"), **options)
    assert decode(actual.ids) == "bacca\n\n"
    [actual] = sample(script, [[1]], stop=stops("b"), min_new_tokens=4, **options)
    assert decode(actual.ids) == "bacc"
    [actual] = sample(script, [[1]], stop=stops("bb"), **options)
    assert (decode(actual.ids), actual.finished) == ("bacca\n\nbb", True)
    [actual] = sample(script, [[1]], stop=stops("x"), **options)
    assert (decode(actual.ids), actual.finished) == ("bacca\n\nbb", False)


def test_stop_strings_decode_each_token_once() -> None:
    """Of samples that begin alike, too."""
    stop = stops("ca", "\n\n")
    rows = [[1, 2, 1, 2] * 50 + [4, 1], [1, 2, 1, 1] * 50 + [3, 3]]
    for size in range(1, 202):
        for row in rows:
            assert not stop(0, row[:size])
    assert [stop(0, row) for row in rows] == [True, True]
    assert stop.decoder.num_decoded == sum(map(len, rows))


def test_cut_ends_at_the_first_stop_string() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("abcd", ["bcd", "abc"]) == ""
    assert cut("abcd", ["x"]) == "abcd"
    assert cut("abcd", []) == "abcd"


def test_stop_is_called_with_the_sentence_of_its_sample() -> None:
    actual = sample(
        always(0.0, 0.5, 0.5), [[1], [2]], eos_id=0, max_new_tokens=5, seeds=[1, 2], num_samples=2,
        stop=lambda sentence, ids: len(ids) == sentence + 2,
    )  # fmt: skip
    assert [len(hypothesis.ids) for hypothesis in actual] == [2, 2, 3, 3]
    assert all(hypothesis.finished for hypothesis in actual)


# --- Streaming ----------------------------------------------------------------------------------


def test_streamed_steps_equal_the_sample() -> None:
    options = {"eos_id": EOS, "max_new_tokens": 6, "seeds": [1, 2, 3], "num_samples": 2}
    steps = list(sample_steps(random_function(4), [[1], [2], [3]], **options))
    whole = sample(random_function(4), [[1], [2], [3]], **options)
    ids: list[list[int]] = [[] for _ in whole]
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            ids[row].append(token)
    assert ids == [hypothesis.ids for hypothesis in whole]
    ends = {row: end for step in steps for row, end in step.ended.items()}
    assert [ends[row] == "eos" for row in range(6)] == [one.finished for one in whole]


def test_steps_are_lazy_and_keep_gradients_enabled() -> None:
    calls = []

    def counted(prefixes: Tensor) -> Tensor:
        calls.append(prefixes.shape[1])
        assert not torch.is_grad_enabled()
        return always(0.0, 0.5, 0.5)(prefixes)

    steps = iter(sample_steps(counted, [[1]], eos_id=0, max_new_tokens=4, seeds=[1]))
    assert calls == []
    for number in range(1, 4):
        next(steps)
        assert len(calls) == number
        assert torch.is_grad_enabled()


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seeds": [1]}, "2 sentences"),
        ({"seeds": [1, -2]}, "0 or more"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 2, "seeds": None}, "the same"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], says: str) -> None:
    good = {"start": [[1], [2]], "eos_id": EOS, "max_new_tokens": 5, "seeds": [1, 2]}
    with pytest.raises(UserError, match=says):
        sample(random_function(0), **(good | options))


def test_wrong_arguments_are_refused_at_the_call() -> None:
    with pytest.raises(UserError, match="seeds"):
        sample_steps(random_function(0), [[1]], eos_id=0, max_new_tokens=2, seeds=[])
    limits = {"eos_id": 0, "max_new_tokens": 2, "seeds": [1]}
    with pytest.raises(UserError, match="on_done"):
        sample_steps(random_function(0), [[1]], on_done=lambda sentence, results: None, **limits)
    decoder: Any = Characters()
    for strings, says in (("stop", "list"), (["a", ""], "empty")):
        with pytest.raises(UserError, match=says):
            StopStrings(decoder, strings)
        with pytest.raises(UserError, match=says):
            cut("text", strings)


def test_random_numbers_are_those_of_python() -> None:
    """Documented by its result: the same seed gives the same sample on every machine."""
    uniform = random.Random(7).random()
    [actual] = sample(always(0.25, 0.25, 0.25, 0.25), [[1]], eos_id=0, max_new_tokens=1, seeds=[7])
    assert actual.ids == [int(uniform * 4)]
