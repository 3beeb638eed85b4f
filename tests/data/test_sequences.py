"""Batches of single sequences: plans, tensors, labels, segments, and packed sentences."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.labelled import LabelledStore
from heedful.data.sequences import (
    collate_labelled,
    collate_sequences,
    pack_sentences,
    plan_sequences,
)
from heedful.data.store import IdStore, pack_ids
from heedful.errors import UserError

SEQUENCES = st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=9)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=100),
    max_tokens=st.one_of(st.none(), st.integers(40, 200)),
    max_sentences=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
    pad_multiple=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_is_a_partition_within_its_limits(
    lengths: list[int],
    max_tokens: int | None,
    max_sentences: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    pad_multiple: int,
) -> None:
    def plan() -> list[list[int]]:
        batches = plan_sequences(
            np.array(lengths, dtype=np.int64),
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
            pad_multiple=pad_multiple,
        )
        return [batch.tolist() for batch in batches]

    batches = plan()
    assert plan() == batches
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_sentences
        width = -(-max(lengths[i] for i in batch) // pad_multiple) * pad_multiple
        assert max_tokens is None or len(batch) * width <= max_tokens


def test_a_budget_of_tokens_is_used_and_epochs_differ() -> None:
    lengths = np.random.default_rng(0).integers(3, 50, 5000)
    plans = [
        plan_sequences(lengths, max_tokens=1000, max_sentences=None, seed=1, epoch=epoch)
        for epoch in (0, 1)
    ]
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in plans[0])
    assert lengths.sum() / padded > 0.97
    assert padded / len(plans[0]) > 0.9 * 1000  # no room is kept for a second side
    groups = [{frozenset(batch.tolist()) for batch in plan} for plan in plans]
    assert len(groups[0] & groups[1]) < len(groups[0]) / 2


def test_limits_that_cannot_be() -> None:
    lengths = np.array([3, 9])

    def plan(max_tokens: int | None, max_sentences: int | None, pad_multiple: int = 1) -> int:
        return len(
            plan_sequences(
                lengths,
                max_tokens=max_tokens,
                max_sentences=max_sentences,
                seed=0,
                epoch=0,
                pad_multiple=pad_multiple,
            )
        )

    assert plan(9, None) == 2
    with pytest.raises(UserError, match=r"sequence 2 alone takes 9 tokens .*max_tokens 8; raise"):
        plan(8, None)
    with pytest.raises(UserError, match=r"sequence 2 alone takes 16 tokens"):
        plan(15, None, 8)
    with pytest.raises(UserError, match="no limit"):
        plan(None, None)
    with pytest.raises(UserError, match="at least 1"):
        plan(0, None)


@given(
    sequences=SEQUENCES,
    pad_id=st.sampled_from([0, 2]),
    pad_multiple=st.sampled_from([1, 4]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_batch_holds_its_sequences_labels_and_segments(
    sequences: list[list[int]], pad_id: int, pad_multiple: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=9))
    seconds = [data.draw(st.integers(0, len(ids))) for ids in sequences]
    labels = np.arange(len(sequences)) % 3
    ids = pack_ids(sequences, 100)
    names = ("x", "y", "z")
    pairs = LabelledStore(ids, labels, names, np.array(seconds))
    batch = collate_labelled(pairs, np.array(chosen), pad_id=pad_id, pad_multiple=pad_multiple)
    plain = collate_sequences(ids, np.array(chosen), pad_id=pad_id, pad_multiple=pad_multiple)
    single = collate_labelled(
        LabelledStore(ids, labels, names, None),
        np.array(chosen),
        pad_id=pad_id,
        pad_multiple=pad_multiple,
    )
    assert single.segments is None
    assert batch.segments is not None
    width = -(-max(len(sequences[i]) for i in chosen) // pad_multiple) * pad_multiple
    for one in (batch, plain, single):
        assert one.ids.shape == (len(chosen), width)
        assert one.indices.tolist() == chosen
        assert one.lengths.tolist() == [len(sequences[i]) for i in chosen]
        assert one.num_tokens == sum(len(sequences[i]) for i in chosen)
        assert one.ids.dtype == one.lengths.dtype == torch.int64
        for row, i in enumerate(chosen):
            assert one.ids[row].tolist() == sequences[i] + [pad_id] * (width - len(sequences[i]))
    assert batch.labels.tolist() == single.labels.tolist() == [i % 3 for i in chosen]
    for row, i in enumerate(chosen):
        length = len(sequences[i])
        assert batch.segments[row].tolist() == (
            [0] * seconds[i] + [1] * (length - seconds[i]) + [0] * (width - length)
        )


@given(lengths=st.lists(st.integers(0, 9), max_size=40), max_length=st.integers(9, 25))
@settings(max_examples=200, deadline=None)
def test_packed_sentences_are_whole_in_order_and_leave_no_room_for_the_next(
    lengths: list[int], max_length: int
) -> None:
    borders = pack_sentences(np.array(lengths, dtype=np.int64), max_length).tolist()
    assert borders[0] == 0
    assert borders[-1] == len(lengths)
    for start, end in pairwise(borders):
        assert start < end
        assert sum(lengths[start:end]) <= max_length
        assert end == len(lengths) or sum(lengths[start : end + 1]) > max_length


def test_groups_are_a_store_on_the_same_ids() -> None:
    store = pack_ids([[1, 2], [3], [4, 5, 6], [7]], 10)
    borders = pack_sentences(store.lengths, 4)
    groups = IdStore(store.ids, store.offsets[borders])
    assert [groups[i].tolist() for i in range(len(groups))] == [[1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UserError, match="sentence 3 has 3 tokens, more than max_length 2"):
        pack_sentences(store.lengths, 2)
