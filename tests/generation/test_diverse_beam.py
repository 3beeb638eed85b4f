"""Diverse beam search: one group is the plain search, and groups are penalized for equal tokens."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.generation import beam_search
from tables import Row, from_rows, from_table, parts_of, random_rows

EOS, SIZE = 0, 7
Open = tuple[tuple[int, ...], float, float]  # ids, log-probability, value for the ranking


def plain_diverse(
    row: Row, start: tuple[int, ...], width: int, groups: int, penalty: float, longest: int
) -> dict[tuple[int, ...], float]:
    """Every hypothesis that the groups find when none stops early: ids and log-probability."""
    beams: list[list[Open]] = [[((), 0.0, 0.0)] for _ in range(groups)]
    actual: dict[tuple[int, ...], float] = {}
    for length in range(1, longest + 1):
        counts: Counter[int] = Counter()
        for group in range(groups):
            candidates: list[Open] = []
            for ids, log_prob, key in beams[group]:
                for token, part in enumerate(row(start + ids)):
                    charge = penalty * counts[token]
                    candidates.append(((*ids, token), log_prob + part, key + part - charge))
            candidates.sort(key=lambda candidate: -candidate[2])
            actual |= {ids: log_prob for ids, log_prob, _ in candidates if ids[-1] == EOS}
            beams[group] = [one for one in candidates if one[0][-1] != EOS][:width]
            counts.update(ids[-1] for ids, _, _ in beams[group])
        if length == longest:
            actual |= {ids: log_prob for beam in beams for ids, log_prob, _ in beam}
    return actual


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 50),
    width=st.integers(1, 3),
    groups=st.integers(2, 4),
    penalty=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    longest=st.integers(1, 5),
)
def test_groups_equal_a_plain_implementation(
    seed: int, width: int, groups: int, penalty: float, longest: int
) -> None:
    """Also that `optimal` may stop early: the plain search continues to the limit."""
    row = random_rows(seed, SIZE)
    expected = plain_diverse(row, (1,), width, groups, penalty, longest)
    best = sorted(expected.items(), key=lambda one: -one[1])[:width]
    [actual] = beam_search(
        from_rows(row), [[1]], beam_size=width * groups, num_groups=groups, eos_id=EOS,
        diversity_penalty=penalty, max_new_tokens=longest, normalization="none", num_return=width,
    )  # fmt: skip
    assert [tuple(h.ids) for h in actual] == [ids for ids, _ in best]
    assert [h.log_prob for h in actual] == pytest.approx([log_prob for _, log_prob in best])
    for hypothesis in actual:
        parts = parts_of(row, (1,), hypothesis.ids)
        assert hypothesis.token_log_probs == pytest.approx(parts)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 50),
    beam=st.integers(1, 4),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
)
def test_one_group_equals_the_plain_search(seed: int, beam: int, stop: str) -> None:
    options = {
        "beam_size": beam, "num_return": beam, "eos_id": EOS, "max_new_tokens": [5, 3],
        "stop": stop, "no_repeat_ngram_size": 2,
    }  # fmt: skip
    function = from_rows(random_rows(seed, SIZE))
    plain = beam_search(function, [[1], [2]], **options)
    assert (
        beam_search(function, [[1], [2]], num_groups=1, diversity_penalty=3.0, **options) == plain
    )
    # Without a penalty each group is the plain search with its part of the beam.
    options |= {"beam_size": 3 * beam}
    assert (
        beam_search(function, [[1], [2]], num_groups=3, diversity_penalty=0.0, **options) == plain
    )


def test_groups_differ_from_the_critical_penalty_on() -> None:
    """Two groups of one: the second takes the second-best first token from ln(.5 / .3) nats on."""
    function = from_table({(): [0.0, 0.5, 0.3, 0.2]}, [1.0, 0.0, 0.0, 0.0])

    def first_tokens(groups: int, penalty: float) -> list[int]:
        [actual] = beam_search(
            function, [[]], beam_size=groups, num_groups=groups, num_return=groups, eos_id=EOS,
            max_new_tokens=3, diversity_penalty=penalty, normalization="none",
        )  # fmt: skip
        return [hypothesis.ids[0] for hypothesis in actual]

    edge = math.log(0.5 / 0.3)
    assert first_tokens(2, edge - 0.01) == [1]
    assert first_tokens(2, edge + 0.01) == [1, 2]
    # A third group has one penalty each for 1 and 2, and selects 3 if the penalty is large enough.
    assert first_tokens(3, math.log(0.5 / 0.2) - 0.01) == [1, 2]
    assert first_tokens(3, math.log(0.5 / 0.2) + 0.01) == [1, 2, 3]


def test_penalties_of_a_hypothesis_accumulate() -> None:
    """As in the authors' code. Group one takes 1 and 2; with the penalty the other leads with 3."""
    function = from_table({(): [0.0, 0.5, 0.3, 0.2]}, [0.0, 0.5, 0.5, 0.0])
    [actual] = beam_search(
        function, [[]], beam_size=4, num_groups=2, num_return=4, eos_id=EOS, max_new_tokens=2,
        diversity_penalty=1.0, normalization="none",
    )  # fmt: skip
    # In the second step both tokens cost the same. By probability (1, .) would go before (3, .);
    # it still bears the charge of the first step: ln .5 - 1 is below ln .2.
    assert [tuple(h.ids) for h in actual] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert actual[2].log_prob == pytest.approx(math.log(0.2 * 0.5))


def test_a_group_stays_open_for_a_penalized_hypothesis() -> None:
    """In group two the open (3) ranks first and cannot beat EOS at .08; the penalized (1) can."""
    table = {
        (): [0.08, 0.78, 0.08, 0.06], (1,): [0.0, 0.4, 0.35, 0.25], (3,): [0.0, 0.0, 0.0, 1.0],
        (1, 3): [1.0, 0.0, 0.0, 0.0],
    }  # fmt: skip
    function = from_table(table, [0.0, 1 / 3, 1 / 3, 1 / 3])
    [[actual]] = beam_search(
        function, [[]], beam_size=4, num_groups=2, eos_id=EOS, max_new_tokens=3,
        diversity_penalty=4.0, normalization="none",
    )  # fmt: skip
    assert (actual.ids, actual.finished) == ([1, 3, EOS], True)
    assert actual.log_prob == pytest.approx(math.log(0.78 * 0.25))


def test_rows_that_only_fill_the_beam_cause_no_penalty() -> None:
    """In the second step group one has (1, 1) and a copy of it; (3, 1) is penalized for one of
    them."""
    table = {
        (): [0.0, 0.4, 0.3, 0.2, 0.1], (1,): [0.0, 1.0, 0.0, 0.0, 0.0],
        (3,): [0.0, 0.8, 0.15, 0.05, 0.0],
    }  # fmt: skip

    function = from_table(table, [1.0, 0.0, 0.0, 0.0, 0.0])
    [actual] = beam_search(
        function, [[]], beam_size=4, num_groups=2, num_return=4, eos_id=EOS, max_new_tokens=2,
        diversity_penalty=2.0, normalization="none",
    )  # fmt: skip
    assert [h.ids for h in actual] == [[1, 1], [2, EOS], [3, 1], [4, EOS]]
