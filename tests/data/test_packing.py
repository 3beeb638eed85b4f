"""Packing: every token a target once, windows that are the stream's, documents kept apart."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heedful.data.packing import (
    PackedBatch,
    evaluation_batches,
    load_windows,
    packed_plan,
    stride_windows,
)
from heedful.data.store import IdStore, pack_ids
from heedful.errors import UserError

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)
PLANS = {
    "context": st.integers(1, 9),
    "batch_size": st.integers(1, 5),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 1000),
    "shuffle": st.booleans(),
}


def store_of(lengths: list[int]) -> IdStore:
    """Documents whose tokens are all different: token i of the store has the id i."""
    ends = np.cumsum([0, *lengths])
    return pack_ids([range(a, b) for a, b in pairwise(ends)], 2**16)


def document_of(store: IdStore) -> np.ndarray:
    """For each id of `store_of` the document that holds it."""
    return np.repeat(np.arange(len(store)), store.lengths)


@given(lengths=LENGTHS, plan=st.fixed_dictionaries(PLANS), isolate=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_token_is_a_target_once_up_to_the_stated_drop(
    lengths: list[int], plan: dict[str, int], isolate: bool
) -> None:
    context, total = plan["context"], sum(lengths)
    assume(total > context)
    store = store_of(lengths)
    batches = packed_plan(store.lengths, **plan)  # type: ignore[arg-type]
    assert [len(b.starts) for b in batches[:-1]] == [plan["batch_size"]] * (len(batches) - 1)
    assert 1 <= len(batches[-1].starts) <= plan["batch_size"]
    stream = [i for d in batches[0].stream.order.tolist() for i in store[d].tolist()]
    assert sorted(stream) == list(range(total))  # every document once, whole
    after = dict(pairwise(stream))
    document = document_of(store)
    targets: list[int] = []
    scored_targets = 0
    for windows in batches:
        batch = load_windows(store, windows, isolate=isolate)
        assert batch.ids.shape == batch.targets.shape == (len(windows.starts), context)
        assert batch.lengths is None
        assert batch.num_tokens == batch.ids.numel()
        assert batch.num_targets == int(batch.scored.sum())
        scored_targets += batch.num_targets
        targets += batch.targets.flatten().tolist()
        for ids, next_ids in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            assert ids[1:] == next_ids[:-1]
            assert [after[i] for i in ids] == next_ids
    # The targets are one run of the stream: it begins at phase + 1 and leaves no window at the end.
    first = min(map(stream.index, targets))
    assert Counter(targets) == Counter(stream[first : first + len(targets)])
    assert 1 <= first <= context
    assert total - (first + len(targets)) < context
    if not plan["shuffle"]:
        assert first == 1
        assert targets == stream[1 : 1 + len(targets)]
    same = [document[t] == document[stream[stream.index(t) - 1]] for t in targets]
    assert scored_targets == (sum(same) if isolate else len(targets))


@given(lengths=LENGTHS, plan=st.fixed_dictionaries(PLANS))
@settings(max_examples=200, deadline=None)
def test_isolated_windows_never_score_across_documents(
    lengths: list[int], plan: dict[str, int]
) -> None:
    assume(sum(lengths) > plan["context"])
    store = store_of(lengths)
    document = document_of(store)
    for windows in packed_plan(store.lengths, **plan):  # type: ignore[arg-type]
        batch = load_windows(store, windows, isolate=True)
        of_input, of_target = document[batch.ids.numpy()], document[batch.targets.numpy()]
        assert (batch.scored.numpy() == (of_input == of_target)).all()
        if batch.documents is None:
            assert (of_input == of_input[:, :1]).all()
            continue
        assert (of_input != of_input[:, :1]).any()
        numbers = batch.documents.numpy()
        assert (numbers[:, 0] == 0).all()
        steps = np.diff(numbers, axis=1)
        assert (steps == (np.diff(of_input, axis=1) != 0)).all()  # 0, 1, 2, ... without a gap


def tensors(batch: PackedBatch) -> list[list[list[int]]]:
    return [batch.ids.tolist(), batch.targets.tolist(), batch.scored.tolist()]


@given(lengths=LENGTHS, plan=st.fixed_dictionaries(PLANS))
@settings(max_examples=60, deadline=None)
def test_plans_are_pure(lengths: list[int], plan: dict[str, int]) -> None:
    assume(sum(lengths) > plan["context"])
    store = store_of(lengths)
    first, again = (
        [
            tensors(load_windows(store, windows, isolate=True))
            for windows in packed_plan(np.array(lengths), **plan)  # type: ignore[arg-type]
        ]
        for _ in range(2)
    )
    assert first == again


def inputs(store: IdStore, *, seed: int, epoch: int, shuffle: bool = True) -> list[list[int]]:
    plan = packed_plan(
        store.lengths, context=8, batch_size=4, seed=seed, epoch=epoch, shuffle=shuffle
    )
    return [
        row for windows in plan for row in load_windows(store, windows, isolate=False).ids.tolist()
    ]


def test_one_long_document_is_cut_elsewhere_in_another_epoch() -> None:
    store = store_of([1000])
    starts = [min(row[0] for row in inputs(store, seed=3, epoch=epoch)) for epoch in range(200)]
    assert set(starts) == set(range(8))  # every phase, so that no token is left out for good
    assert inputs(store, seed=3, epoch=0) != inputs(store, seed=4, epoch=0)
    plain = inputs(store, seed=3, epoch=0, shuffle=False)
    assert plain == inputs(store, seed=9, epoch=7, shuffle=False)
    assert plain == [list(range(i, i + 8)) for i in range(0, 992, 8)]


def test_windows_and_documents_are_shuffled() -> None:
    store = store_of([1000])
    starts = [row[0] for row in inputs(store, seed=0, epoch=0)]
    assert abs(np.corrcoef(starts, np.arange(len(starts)))[0, 1]) < 0.3
    lengths = np.full(100, 5)
    orders = [
        packed_plan(lengths, context=8, batch_size=4, seed=seed, epoch=epoch)[0].stream.order
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_packing_of_a_small_text() -> None:
    # Marked documents, BOS 1 and EOS 2: `1 5 6 2`, `1 7 2`, nothing, `1 8 9 2`.
    store = pack_ids([[1, 5, 6, 2], [1, 7, 2], [], [1, 8, 9, 2]], 10)
    arguments = {"context": 5, "batch_size": 2, "seed": 0, "epoch": 0, "shuffle": False}
    (windows,) = packed_plan(store.lengths, **arguments)  # type: ignore[arg-type]
    batch = load_windows(store, windows, isolate=True)
    assert batch.ids.tolist() == [[1, 5, 6, 2, 1], [7, 2, 1, 8, 9]]
    assert batch.targets.tolist() == [[5, 6, 2, 1, 7], [2, 1, 8, 9, 2]]
    assert batch.scored.int().tolist() == [[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert (batch.num_targets, batch.num_tokens) == (8, 10)
    joined = load_windows(store, windows, isolate=False)
    assert joined.documents is None
    assert joined.num_targets == 10
    assert joined.ids.tolist() == batch.ids.tolist()
    assert {t.dtype for t in (batch.ids, batch.targets, batch.documents)} == {torch.int64}


def test_a_window_of_one_document_needs_no_mask_but_its_last_target_may_be_the_next_ones() -> None:
    store = pack_ids([[1, 2, 3], [4]], 10)
    (windows,) = packed_plan(store.lengths, context=3, batch_size=1, seed=0, epoch=0, shuffle=False)
    batch = load_windows(store, windows, isolate=True)
    assert batch.documents is None
    assert batch.scored.tolist() == [[True, True, False]]


def test_plans_that_cannot_be() -> None:
    lengths = np.array([3, 4])
    plan = packed_plan(lengths, context=6, batch_size=1, seed=0, epoch=0)
    assert [len(windows.starts) for windows in plan] == [1]
    with pytest.raises(UserError, match=r"has 7 tokens, but a window of context 7 needs 8; lower"):
        packed_plan(lengths, context=7, batch_size=1, seed=0, epoch=0)
    with pytest.raises(UserError, match="has 0 tokens"):
        packed_plan(np.zeros(0, np.int64), context=7, batch_size=1, seed=0, epoch=0)
    for context, batch_size in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="at least 1"):
            packed_plan(lengths, context=context, batch_size=batch_size, seed=0, epoch=0)
    with pytest.raises(AssertionError, match="another store"):
        load_windows(store_of([3, 5]), plan[0], isolate=True)


def test_a_large_store_is_planned_without_a_loop_over_tokens() -> None:
    lengths = np.full(100_000, 1000)  # 10^8 tokens
    plan = packed_plan(lengths, context=1024, batch_size=64, seed=0, epoch=0)
    assert sum(len(windows.starts) for windows in plan) in (97655, 97656)
    assert plan[0].stream is plan[-1].stream
    assert sum(windows.starts.nbytes for windows in plan) < 10**6


@given(length=st.integers(0, 60), context=st.integers(1, 12), data=st.data())
@settings(max_examples=300, deadline=None)
def test_stride_windows_score_each_token_once_with_the_context_that_the_stride_allows(
    length: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    windows = stride_windows(length, context=context, stride=stride)
    scored = [i for w in windows for i in range(w.first_scored, w.end)]
    assert scored == list(range(1, length))
    for number, (start, end, first_scored) in enumerate(windows):
        assert start == number * stride
        assert start < first_scored < end
        assert end - start <= context + 1
        assert number == 0 or first_scored - start == context - stride + 1
        assert end == min(start + context + 1, length)
    if stride == context:
        used = [i for w in windows for i in range(w.start, w.end - 1)]
        assert used == list(range(max(length - 1, 0)))
    if stride == 1:
        told_from = [i - w.start for w in windows for i in range(w.first_scored, w.end)]
        assert told_from == [min(i, context) for i in range(1, length)]


def test_stride_windows_of_a_small_text() -> None:
    assert stride_windows(10, context=4, stride=2) == [(0, 5, 1), (2, 7, 5), (4, 9, 7), (6, 10, 9)]
    assert stride_windows(9, context=4, stride=4) == [(0, 5, 1), (4, 9, 5)]
    assert stride_windows(3, context=4, stride=4) == [(0, 3, 1)]
    assert stride_windows(1, context=4, stride=4) == stride_windows(0, context=4, stride=4) == []
    for context, stride in ((4, 5), (4, 0), (0, 0)):
        with pytest.raises(UserError, match="must be from 1 to context"):
            stride_windows(9, context=context, stride=stride)


@given(lengths=LENGTHS, context=st.integers(1, 9), batch_size=st.integers(1, 5), data=st.data())
@settings(max_examples=200, deadline=None)
def test_evaluation_scores_every_token_but_the_first_of_its_document(
    lengths: list[int], context: int, batch_size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    store, pad_id = store_of(lengths), 60_000
    batches = list(
        evaluation_batches(
            store, context=context, stride=stride, batch_size=batch_size, pad_id=pad_id
        )
    )
    scored: list[int] = []
    seen: list[tuple[int, int, int]] = []  # document, first input, number of inputs
    for batch in batches:
        assert batch.lengths is not None
        assert batch.indices is not None
        assert batch.documents is None
        assert len(batch.ids) <= batch_size
        assert batch.ids.shape[1] == int(batch.lengths.max())
        assert batch.num_targets == int(batch.scored.sum())
        assert batch.num_tokens == int(batch.lengths.sum())
        scored += batch.targets[batch.scored].tolist()
        for row, size in enumerate(batch.lengths.tolist()):
            first = int(batch.ids[row, 0])
            document = store[int(batch.indices[row])].tolist()
            at = document.index(first)
            assert batch.ids[row, :size].tolist() == document[at : at + size]
            assert batch.targets[row, :size].tolist() == document[at + 1 : at + 1 + size]
            for padded in (batch.ids[row, size:], batch.targets[row, size:]):
                assert padded.tolist() == [pad_id] * len(padded)
            assert not batch.scored[row, size:].any()
            seen.append((int(batch.indices[row]), at, size))
    firsts = set(store.offsets[:-1][store.lengths > 0].tolist())
    assert sorted(scored) == [i for i in range(sum(lengths)) if i not in firsts]
    assert sorted(seen) == sorted(
        (number, window.start, window.end - window.start - 1)
        for number, length in enumerate(lengths)
        for window in stride_windows(length, context=context, stride=stride)
    )
    widths = [size for _, _, size in seen]
    assert widths == sorted(widths, reverse=True)


def test_a_corpus_may_be_scored_as_one_text() -> None:
    store = store_of([3, 4, 2])
    whole = IdStore(store.ids, store.offsets[[0, -1]])
    (batch,) = evaluation_batches(whole, context=100, stride=100, batch_size=4, pad_id=0)
    assert batch.targets.tolist() == [list(range(1, 9))]
    assert batch.num_targets == 8
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        evaluation_batches(whole, context=4, stride=4, batch_size=0, pad_id=0)
