"""Batches: the laws of an epoch's plan, and tensors that hold what the store holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.batches import collate, plan_epoch
from heedful.data.pair_store import PairStore, encode_pairs
from heedful.data.store import pack_ids
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=200)
PLANS = {
    "max_tokens": st.one_of(st.none(), st.integers(96, 400)),
    "max_sentences": st.one_of(st.none(), st.integers(1, 20)),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 1000),
    "shuffle": st.booleans(),
    "pad_multiple": st.sampled_from([1, 2, 8]),
}


def columns(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def rounded(lengths: np.ndarray, multiple: int) -> int:
    return int(-(-lengths.max() // multiple) * multiple)


@given(lengths=LENGTHS, plan=st.fixed_dictionaries(PLANS))
@settings(max_examples=200, deadline=None)
def test_a_plan_is_a_partition_within_its_limits(
    lengths: list[tuple[int, int]], plan: dict[str, int | None]
) -> None:
    src, tgt = columns(lengths)
    if plan["max_tokens"] is None and plan["max_sentences"] is None:
        plan["max_sentences"] = 7
    batches = plan_epoch(src, tgt, **plan)  # type: ignore[arg-type]
    indices = [int(i) for batch in batches for i in batch]
    assert sorted(indices) == list(range(len(src)))
    for batch in batches:
        assert len(batch) > 0
        if plan["max_sentences"] is not None:
            assert len(batch) <= plan["max_sentences"]
        if plan["max_tokens"] is not None:
            multiple = plan["pad_multiple"] or 1
            width = rounded(src[batch], multiple) + rounded(tgt[batch], multiple)
            assert len(batch) * width <= plan["max_tokens"]
    again = plan_epoch(src.copy(), tgt.copy(), **plan)  # type: ignore[arg-type]
    assert [b.tolist() for b in again] == [b.tolist() for b in batches]


def random_lengths(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as of a translation corpus: about normal, the two sides alike."""
    rng = np.random.default_rng(seed)
    src = np.clip(rng.normal(15, 5, number), 3, 50).astype(np.int64)
    tgt = np.clip(src + rng.normal(0, 3, number), 3, 50).astype(np.int64)
    return src, tgt


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_epochs_and_seeds_differ_in_what_goes_together_and_in_order(seed: int, epoch: int) -> None:
    src, tgt = random_lengths(500)

    def plan(seed: int, epoch: int) -> list[frozenset[int]]:
        batches = plan_epoch(src, tgt, max_tokens=400, max_sentences=None, seed=seed, epoch=epoch)
        return [frozenset(batch.tolist()) for batch in batches]

    first, later, other = plan(seed, epoch), plan(seed, epoch + 1), plan(seed + 1, epoch)
    for changed in (later, other):
        assert len(set(first) & set(changed)) < len(first) / 2
    assert plan(seed, epoch) == first


def test_the_order_of_batches_is_not_that_of_lengths() -> None:
    src, tgt = random_lengths(2000)
    batches = plan_epoch(src, tgt, max_tokens=400, max_sentences=None, seed=1, epoch=0)
    means = [src[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.25


@pytest.mark.parametrize("shuffle", [True, False])
def test_similar_lengths_go_together(shuffle: bool) -> None:
    src, tgt = random_lengths(20_000)
    batches = plan_epoch(
        src, tgt, max_tokens=4000, max_sentences=None, seed=1, epoch=0, shuffle=shuffle
    )
    padded = sum(len(b) * int(src[b].max() + tgt[b].max()) for b in batches)
    assert (src + tgt).sum() / padded > 0.93
    assert padded / len(batches) > 0.93 * 4000  # and the budget is used


def test_without_shuffling_seed_and_epoch_do_nothing_and_the_longest_come_first() -> None:
    src, tgt = random_lengths(300)
    plans = [
        plan_epoch(src, tgt, max_tokens=None, max_sentences=16, seed=s, epoch=e, shuffle=False)
        for s, e in ((0, 0), (5, 9))
    ]
    assert [b.tolist() for b in plans[0]] == [b.tolist() for b in plans[1]]
    assert src[plans[0][0]].max() == src.max()
    assert src[plans[0][-1]].min() == src.min()


def test_limits_that_cannot_be() -> None:
    src, tgt = np.array([3, 9]), np.array([4, 8])
    with pytest.raises(
        UserError, match=r"pair 2 alone takes 17 tokens .9 source . 8.*max_tokens 16"
    ):
        plan_epoch(src, tgt, max_tokens=16, max_sentences=None, seed=0, epoch=0)
    with pytest.raises(UserError, match="takes 24 tokens"):
        plan_epoch(src, tgt, max_tokens=17, max_sentences=None, seed=0, epoch=0, pad_multiple=8)
    assert plan_epoch(src, tgt, max_tokens=17, max_sentences=None, seed=0, epoch=0)
    with pytest.raises(UserError, match="no limit"):
        plan_epoch(src, tgt, max_tokens=None, max_sentences=None, seed=0, epoch=0)
    with pytest.raises(UserError, match="at least 1"):
        plan_epoch(src, tgt, max_tokens=None, max_sentences=0, seed=0, epoch=0)


IDS = st.lists(st.integers(0, 99), max_size=7)  # pad, bos and eos may stand inside a sentence


@given(
    pairs=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=9),
    pad_id=st.sampled_from([0, 2]),  # pad may equal eos
    pad_multiple=st.sampled_from([1, 4]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_batch_holds_its_pairs(
    pairs: list[tuple[list[int], list[int]]], pad_id: int, pad_multiple: int, data: st.DataObject
) -> None:
    eos, bos = 2, 1
    src, tgt = [[*s, eos] for s, _ in pairs], [[*t, eos] for _, t in pairs]
    store = PairStore(pack_ids(src, 100), pack_ids(tgt, 100))
    chosen = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=9))
    batch = collate(store, np.array(chosen), bos_id=bos, pad_id=pad_id, pad_multiple=pad_multiple)
    assert batch.indices.tolist() == chosen
    width = -(-max(len(tgt[i]) for i in chosen) // pad_multiple) * pad_multiple
    assert batch.tgt_in.shape == batch.tgt_out.shape == (len(chosen), width)
    for row, i in enumerate(chosen):
        n, m = int(batch.src_lengths[row]), int(batch.tgt_lengths[row])
        assert batch.src[row, :n].tolist() == src[i]
        assert batch.tgt_out[row, :m].tolist() == tgt[i]
        assert batch.tgt_in[row, :m].tolist() == [bos, *tgt[i][:-1]]
        for padding in (batch.src[row, n:], batch.tgt_in[row, m:], batch.tgt_out[row, m:]):
            assert padding.tolist() == [pad_id] * len(padding)
    assert batch.num_targets == sum(len(tgt[i]) for i in chosen)
    assert {t.dtype for t in (batch.src, batch.tgt_in, batch.tgt_out)} == {torch.int64}


def test_from_disk_to_tensors(tmp_path: Path) -> None:
    words = train_tokenizer(["a b c d"], kind="word")
    pairs = [("a b", "c"), ("d", "a a a"), ("c", "b")]
    store, _ = encode_pairs(pairs, words, words, tmp_path, max_length=9, too_long="error")
    seen = {}
    for indices in plan_epoch(
        store.src_lengths, store.tgt_lengths, max_tokens=12, max_sentences=2, seed=3, epoch=1
    ):
        batch = collate(store, indices, bos_id=words.bos_id, pad_id=words.pad_id, device="cpu")
        for row, index in enumerate(batch.indices.tolist()):
            seen[index] = (
                words.decode(batch.src[row].tolist()),
                words.decode(batch.tgt_in[row].tolist()),
            )
    assert [seen[i] for i in range(3)] == pairs
