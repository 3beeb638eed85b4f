"""Searches with several ends and with logit rules, against exhaustive search."""

import itertools
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import beam_search, greedy_search
from heedful.generation.rules import (
    BannedTokens,
    ForcedTokens,
    NoRepeatNgram,
    PrefixFunction,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
)

SIZE = 5


@cache
def row_of(seed: int, prefix: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**40)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64).log_softmax(dim=0)


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    return lambda prefixes: torch.stack([row_of(seed, tuple(p)) for p in prefixes.tolist()])


def whole_space(
    seed: int, ends: set[int], shortest: int, longest: int, scale: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Mean log-probability, times `scale`, of all that a search may return."""
    space = {}
    for length in range(1, longest + 1):
        for ids in itertools.product(range(SIZE), repeat=length):
            if ends & set(ids[:-1]) or (ids[-1] in ends and length < shortest):
                continue
            if ids[-1] in ends or length == longest:
                parts = [float(row_of(seed, ids[:i])[ids[i]]) for i in range(length)]
                space[ids] = scale * sum(parts) / length
    return space


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 30),
    ends=st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE - 1),
    longest=st.integers(1, 3),
    least=st.integers(0, 3),
    num_return=st.integers(1, 6),
)
def test_any_of_several_ends_ends_a_hypothesis(
    seed: int, ends: set[int], longest: int, least: int, num_return: int
) -> None:
    shortest = min(least, longest)
    space = whole_space(seed, ends, shortest, longest)
    best = sorted(space.values(), reverse=True)[:num_return]
    [found] = beam_search(
        random_function(seed), [[]], beam_size=SIZE**longest + num_return, eos_id=sorted(ends),
        max_new_tokens=longest, min_new_tokens=shortest, num_return=num_return,
    )  # fmt: skip
    assert [h.score for h in found] == pytest.approx(best)
    for hypothesis in found:
        assert space[tuple(hypothesis.ids)] == pytest.approx(hypothesis.score)
        assert hypothesis.finished == (hypothesis.ids[-1] in ends)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 30),
    ends=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=3, unique=True),
    beam=st.integers(1, 3),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
)
def test_small_beams_go_on_beside_several_ends(
    seed: int, ends: list[int], beam: int, stop: str
) -> None:
    """As many as the beam holds go on, however many ends were likelier."""
    widths = []

    def function(prefixes: Tensor) -> Tensor:
        assert not set(prefixes.flatten().tolist()) & set(ends)
        widths.append(len({tuple(p) for p in prefixes.tolist()}))
        return random_function(seed)(prefixes)

    [found] = beam_search(
        function, [[]], beam_size=beam, num_return=beam, eos_id=ends, max_new_tokens=3, stop=stop,
        force_eos=False, length_penalty=20.0,
    )  # fmt: skip
    going_on = SIZE - len(ends)
    assert widths == [1, min(beam, going_on), min(beam, going_on**2)][: len(widths)]
    assert len(widths) == 3 or stop != "optimal"  # with such a penalty the longest are the best
    assert len({tuple(h.ids) for h in found}) == len(found)


def test_the_first_of_several_ends_is_the_forced_one() -> None:
    options = {"beam_size": 2, "max_new_tokens": 3, "min_new_tokens": 3, "force_eos": True}
    for ends in ([3, 1], [1, 3]):
        [[found]] = beam_search(random_function(1), [[]], eos_id=ends, **options)
        assert found.ids[-1] == ends[0]
        assert not found.finished
    [[found]] = greedy_search(
        random_function(1), [[]], eos_id=[0, 2], max_new_tokens=4, forced_prefix=[[1, 2]]
    )
    assert (found.ids, found.finished) == ([1, 2], True)
    with pytest.raises(UserError, match=r"holds EOS \(2\) before"):
        greedy_search(
            random_function(1), [[]], eos_id=[0, 2], max_new_tokens=4, forced_prefix=[[2, 1]]
        )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 30))
def test_scores_are_those_under_the_rules(seed: int) -> None:
    space = whole_space(seed, {0}, 0, 3, scale=2.0)
    space = {ids: score for ids, score in space.items() if 2 not in ids and ids[:2] != (1, 3)}
    [[found]] = beam_search(
        random_function(seed), [[]], beam_size=125, eos_id=0, max_new_tokens=3,
        rules=[
            Temperature(0.5),
            BannedTokens([2]),
            PrefixFunction(lambda _, ids: [0, 1, 2, 4] if ids == [1] else range(SIZE)),
        ],
    )  # fmt: skip
    assert found.score == pytest.approx(max(space.values()))
    assert space[tuple(found.ids)] == pytest.approx(found.score)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 30),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
)
def test_rules_see_each_beam_with_its_own_sentence(
    seed: int, lengths: list[int], stop: str
) -> None:
    """The batch, whose sentences leave at different steps, gives what each sentence alone gives."""
    prompts = [[(seed + i * j) % SIZE for j in range(i + 1)] for i in range(len(lengths))]
    rules = [RepetitionPenalty(1.7), NoRepeatNgram(2, include_prompt=True), BannedTokens([[1, 2]])]

    def search(of: list[int]) -> list:
        return beam_search(
            random_function(seed), [[4, i % 2] for i in of], beam_size=3, num_return=3, eos_id=0,
            max_new_tokens=[lengths[i] for i in of], rules=rules, prompts=[prompts[i] for i in of],
            stop=stop,
        )  # fmt: skip

    together = search(list(range(len(lengths))))
    assert together == [search([i])[0] for i in range(len(lengths))]


def test_a_cut_leaves_something_where_eos_may_not_come() -> None:
    likely_end = torch.tensor([[0.9, 0.06, 0.04]], dtype=torch.float64).log()
    [[found]] = beam_search(
        lambda prefixes: likely_end.expand(len(prefixes), -1), [[]], beam_size=2, eos_id=0,
        max_new_tokens=3, min_new_tokens=3, rules=[TopK(1)],
    )  # fmt: skip
    assert found.ids == [1, 1, 0]


def test_forced_prefix_wins_over_rules_and_is_scored_by_the_model() -> None:
    rules = [BannedTokens([3]), Temperature(0.5)]
    [[found]] = beam_search(
        random_function(2), [[]], beam_size=2, eos_id=0, max_new_tokens=2, min_new_tokens=2,
        rules=rules, forced_prefix=[[3]],
    )  # fmt: skip
    assert found.ids[0] == 3
    assert found.token_log_probs[0] == float(row_of(2, ())[3])
    assert found.token_log_probs[1] == pytest.approx(2 * float(row_of(2, (3,))[found.ids[1]]))


def test_a_rule_may_force_the_first_token() -> None:
    """As encoder-decoders do that start with a language's token."""
    [[found]] = beam_search(
        random_function(2),
        [[]],
        beam_size=3,
        eos_id=0,
        max_new_tokens=4,
        rules=[ForcedTokens({0: 3})],
    )
    assert found.ids[0] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eos_id": []}, "eos_id"),
        ({"eos_id": [0, SIZE]}, "outside the vocabulary"),
        ({"prompts": [[1], [2]]}, "1 sentences"),
        ({"rules": [PresencePenalty(-9.0)]}, "a rule gave .* no negative penalty"),
        ({"rules": [lambda log_probs, _: log_probs * math.nan]}, "a rule gave NaN"),
        ({"rules": [lambda log_probs, _: log_probs[:, 1:]]}, "must keep"),
        ({"stop": "never"}, "optimal, beam_full, heuristic"),
    ],
)
def test_bad_arguments(options: dict[str, object], says: str) -> None:
    good = {"start": [[1]], "beam_size": 2, "eos_id": 0, "max_new_tokens": 5, "min_new_tokens": 5}
    with pytest.raises(UserError, match=says):
        beam_search(random_function(0), **(good | options))


def test_log_probabilities_are_checked_before_the_rules() -> None:
    for value, says in ((1.0, "next_log_probs gave 1 .*log_softmax"), (math.nan, "next_log_probs")):
        with pytest.raises(UserError, match=says):
            beam_search(
                lambda prefixes, value=value: torch.full((len(prefixes), 3), value), [[]],
                beam_size=2, eos_id=0, max_new_tokens=2, rules=[BannedTokens([0, 1, 2])],
            )  # fmt: skip
