"""Plans of batches: every row is in one batch, every token is a target once; plans are pure
functions."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import pack_rows, plan_batches, plan_evaluation_windows, plan_windows
from heedful.errors import UserError

PLANS = {
    "max_tokens": st.one_of(st.none(), st.integers(96, 400)),
    "max_sentences": st.one_of(st.none(), st.integers(1, 20)),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 1000),
    "shuffle": st.booleans(),
}


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=200),
    one_side=st.booleans(),
    plan=st.fixed_dictionaries(PLANS),
)
@settings(max_examples=250, deadline=None)
def test_a_plan_is_a_partition_within_its_limits(
    lengths: list[tuple[int, int]], one_side: bool, plan: dict[str, Any]
) -> None:
    table = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    sides = [table[:, 0].copy()] if one_side else [table[:, 0].copy(), table[:, 1].copy()]
    if plan["max_tokens"] is None and plan["max_sentences"] is None:
        plan["max_sentences"] = 7
    batches = plan_batches(*sides, **plan)
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(table)))
    for batch in batches:
        assert 1 <= len(batch) <= (plan["max_sentences"] or len(batch))
        width = sum(int(side[batch].max()) for side in sides)
        assert plan["max_tokens"] is None or len(batch) * width <= plan["max_tokens"]
    again = plan_batches(*(side.copy() for side in sides), **plan)
    assert [b.tolist() for b in again] == [b.tolist() for b in batches]


def random_lengths(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as in a translation corpus: about normal, similar on both sides."""
    rng = np.random.default_rng(seed)
    src = np.clip(rng.normal(15, 5, number), 3, 50).astype(np.int64)
    tgt = np.clip(src + rng.normal(0, 3, number), 3, 50).astype(np.int64)
    return src, tgt


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_epochs_and_seeds_differ_in_batches_and_in_their_order(seed: int, epoch: int) -> None:
    def plan(seed: int, epoch: int) -> list[frozenset[int]]:
        limits: dict[str, Any] = {"max_tokens": 400, "max_sentences": None}
        batches = plan_batches(*random_lengths(500), **limits, seed=seed, epoch=epoch)
        return [frozenset(batch.tolist()) for batch in batches]

    first, later, other = plan(seed, epoch), plan(seed, epoch + 1), plan(seed + 1, epoch)
    for changed in (later, other):
        assert len(set(first) & set(changed)) < len(first) / 2


def test_batches_are_not_ordered_by_length() -> None:
    src, tgt = random_lengths(2000)
    batches = plan_batches(src, tgt, max_tokens=400, max_sentences=None, seed=1, epoch=0)
    means = [src[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.25


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_sides", [1, 2])
def test_batches_have_similar_lengths(num_sides: int, shuffle: bool) -> None:
    sides = random_lengths(20_000)[:num_sides]
    limits: dict[str, Any] = {"max_tokens": 4000, "max_sentences": None, "shuffle": shuffle}
    batches = plan_batches(*sides, **limits, seed=1, epoch=0)
    padded = sum(len(b) * sum(int(side[b].max()) for side in sides) for b in batches)
    assert sum(side.sum() for side in sides) / padded > 0.93
    assert padded / len(batches) > 0.9 * 4000  # and the budget is used


def test_plans_without_shuffling_ignore_the_seed_and_start_with_the_longest() -> None:
    src, tgt = random_lengths(300)
    limits: dict[str, Any] = {"max_tokens": None, "max_sentences": 16, "shuffle": False}
    plans = [plan_batches(src, tgt, **limits, seed=s, epoch=e) for s, e in ((0, 0), (5, 9))]
    assert [b.tolist() for b in plans[0]] == [b.tolist() for b in plans[1]]
    assert src[plans[0][0]].max() == src.max()
    assert src[plans[0][-1]].min() == src.min()


@pytest.mark.parametrize(
    ("num_sides", "longest", "message"),
    [
        (2, 17, r"pair 2 alone takes 17 tokens .9 source . 8.*batch_tokens 16"),
        (1, 9, r"sequence 2 alone takes 9 tokens .*batch_tokens 8; raise"),
    ],
)
def test_a_row_that_is_longer_than_a_batch(num_sides: int, longest: int, message: str) -> None:
    sides = [np.array([3, 9]), np.array([4, 8])][:num_sides]
    limits: dict[str, Any] = {"max_sentences": None, "seed": 0, "epoch": 0}
    with pytest.raises(UserError, match=message):
        plan_batches(*sides, max_tokens=longest - 1, **limits)
    assert len(plan_batches(*sides, max_tokens=longest, **limits)) == 2


@given(lengths=st.lists(st.integers(0, 9), max_size=40), max_length=st.integers(9, 25))
@settings(max_examples=200, deadline=None)
def test_packed_rows_are_filled_with_whole_texts_in_order(
    lengths: list[int], max_length: int
) -> None:
    borders = pack_rows(np.array(lengths, dtype=np.int64), max_length).tolist()
    assert borders[0] == 0
    assert borders[-1] == len(lengths)
    for start, end in pairwise(borders):
        assert start < end
        assert sum(lengths[start:end]) <= max_length
        assert end == len(lengths) or sum(lengths[start : end + 1]) > max_length


def test_packed_rows_are_views_of_the_same_ids() -> None:
    texts = pack_ids([[1, 2], [3], [4, 5, 6], [7]], 10)
    groups = Sequences(texts.ids, texts.offsets[pack_rows(texts.lengths, 4)])
    assert [groups[i].tolist() for i in range(len(groups))] == [[1, 2, 3], [4, 5, 6, 7]]


def test_windows_and_texts_are_shuffled_and_every_phase_occurs() -> None:
    def starts(seed: int, epoch: int) -> list[int]:
        batches = plan_windows(np.array([1000]), context=8, batch_size=4, seed=seed, epoch=epoch)
        return [int(start) for batch in batches for start in batch.starts]

    assert {min(starts(3, epoch)) for epoch in range(200)} == set(range(8))
    assert starts(3, 0) != starts(4, 0)
    first = starts(0, 0)
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.3
    orders = {
        tuple(plan_windows(np.full(100, 5), context=8, batch_size=4, seed=s, epoch=e)[0].order)
        for s, e in ((0, 0), (0, 1), (1, 0))
    }
    assert len(orders) == 3


def test_impossible_windows_are_refused() -> None:
    plan: dict[str, Any] = {"seed": 0, "epoch": 0}
    assert len(plan_windows(np.array([3, 4]), context=6, batch_size=1, **plan)) == 1
    with pytest.raises(UserError, match=r"has 7 tokens, but a window of context 7 needs 8; lower"):
        plan_windows(np.array([3, 4]), context=7, batch_size=1, **plan)
    with pytest.raises(UserError, match="has 0 tokens"):
        plan_windows(np.zeros(0, np.int64), context=7, batch_size=1, **plan)
    for stride in (0, 5):
        with pytest.raises(UserError, match="must be from 1 to context 4"):
            plan_evaluation_windows(np.array([9]), context=4, stride=stride)


def test_large_texts_are_planned_without_a_loop_over_tokens() -> None:
    plan = plan_windows(np.full(100_000, 1000), context=1024, batch_size=64, seed=0, epoch=0)
    assert sum(len(windows.starts) for windows in plan) in (97655, 97656)  # of 10^8 tokens
    assert plan[0].order is plan[-1].order
    assert sum(windows.starts.nbytes for windows in plan) < 10**6
