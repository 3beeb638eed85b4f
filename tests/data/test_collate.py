"""Batches contain the columns, mark padding, and have targets at the right positions."""

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heedful.data.collate import Batch, collate_pairs, collate_texts, collate_windows
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import plan_evaluation_windows, plan_windows
from heedful.parts.tokens import Tokens

IDS = st.lists(st.integers(0, 99), max_size=7)  # pad, bos and eos may stand inside a text
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)
WINDOWS = {
    "context": st.integers(1, 9),
    "batch_size": st.integers(1, 5),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 1000),
}


def rows_of(tokens: Tokens, pad_id: int) -> list[list[int]]:
    """The rows without padding; checks that padding is on the right, has `pad_id` and is marked."""
    ids = tokens.ids.tolist()
    if tokens.real is None:
        return ids
    lengths = tokens.real.sum(1).tolist()
    assert tokens.real.tolist() == [[i < n for i in range(len(ids[0]))] for n in lengths]
    assert all(set(row[n:]) <= {pad_id} for row, n in zip(ids, lengths, strict=True))
    return [row[:n] for row, n in zip(ids, lengths, strict=True)]


def at_target_positions(batch: Batch, values: torch.Tensor) -> list[int]:
    return values.flatten()[batch.target_positions].tolist()


@given(
    pairs=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=9),
    pad_id=st.sampled_from([0, 2]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_batch_has_the_ids_of_its_pairs(
    pairs: list[tuple[list[int], list[int]]], pad_id: int, data: st.DataObject
) -> None:
    eos, start = 2, data.draw(st.lists(st.integers(3, 9), min_size=1, max_size=3))
    src, tgt = [[*s, eos] for s, _ in pairs], [[*t, eos] for _, t in pairs]
    selected = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=9))
    packed = pack_ids(src, 100), pack_ids(tgt, 100)
    batch = collate_pairs(*packed, np.array(selected), start_ids=start, pad_id=pad_id)
    assert batch.source is not None
    assert batch.indices.tolist() == selected
    assert rows_of(batch.source, pad_id) == [src[i] for i in selected]
    assert rows_of(batch.tokens, pad_id) == [[*start, *tgt[i][:-1]] for i in selected]
    assert batch.targets.tolist() == [token for i in selected for token in tgt[i]]
    width = batch.tokens.ids.size(1)
    before = len(start) - 1
    expected = [
        row * width + before + n for row, i in enumerate(selected) for n in range(len(tgt[i]))
    ]
    assert batch.target_positions.tolist() == expected
    assert batch.num_targets == sum(len(tgt[i]) for i in selected)
    assert batch.num_tokens == sum(len(src[i]) + before + len(tgt[i]) for i in selected)
    moved = batch.to("meta")
    assert moved.source is not None
    tensors = (moved.source.ids, moved.tokens.ids, moved.targets, moved.target_positions)
    assert {(tensor.dtype, tensor.device.type) for tensor in tensors} == {(torch.int64, "meta")}


@given(
    texts=st.lists(IDS.filter(bool), min_size=1, max_size=9),
    pad_id=st.sampled_from([0, 2]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_batch_has_its_texts_labels_and_types(
    texts: list[list[int]], pad_id: int, data: st.DataObject
) -> None:
    selected = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=9))
    seconds = [data.draw(st.integers(0, len(ids))) for ids in texts]
    labels, packed = np.arange(len(texts)) % 3, pack_ids(texts, 100)
    plain = collate_texts(packed, np.array(selected), pad_id=pad_id)
    more: dict[str, Any] = {"labels": labels[selected], "second": np.array(seconds)[selected]}
    batch = collate_texts(packed, np.array(selected), pad_id=pad_id, **more)
    for one in (plain, batch):
        assert rows_of(one.tokens, pad_id) == [texts[i] for i in selected]
        assert one.indices.tolist() == selected
        assert one.num_tokens == sum(len(texts[i]) for i in selected)
    assert (plain.types, plain.num_targets) == (None, 0)
    assert batch.targets.tolist() == [i % 3 for i in selected]
    assert at_target_positions(batch, batch.tokens.ids) == [texts[i][0] for i in selected]
    assert batch.types is not None
    for row, i in enumerate(selected):
        length, width = len(texts[i]), batch.tokens.ids.size(1)
        expected = [0] * seconds[i] + [1] * (length - seconds[i]) + [0] * (width - length)
        assert batch.types[row].tolist() == expected


def texts_of(lengths: list[int]) -> Sequences:
    """Texts with distinct tokens: token i of their concatenation has the id i."""
    ends = np.cumsum([0, *lengths])
    return pack_ids([range(a, b) for a, b in pairwise(ends)], 2**16)


@given(lengths=LENGTHS, plan=st.fixed_dictionaries(WINDOWS), isolate=st.booleans())
@settings(max_examples=300, deadline=None)
def test_windows_start_at_a_phase_and_their_targets_are_the_next_tokens(
    lengths: list[int], plan: dict[str, Any], isolate: bool
) -> None:
    """With `isolate`, targets are never tokens of another text."""
    context, total = plan["context"], sum(lengths)
    assume(total > context)
    texts = texts_of(lengths)
    batches = plan_windows(texts.lengths, **plan)
    sizes = [len(windows.starts) for windows in batches]
    assert sizes[:-1] == [plan["batch_size"]] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= plan["batch_size"]
    assert sorted(batches[0].order.tolist()) == [i for i, length in enumerate(lengths) if length]
    starts = [start for windows in batches for start in windows.starts.tolist()]
    assert min(starts) < context
    assert sorted(starts) == list(range(min(starts), total - context, context))
    again = plan_windows(texts.lengths, **plan)
    assert [start for windows in again for start in windows.starts.tolist()] == starts
    stream = [i for text in batches[0].order.tolist() for i in texts[text].tolist()]
    after = dict(pairwise(stream))
    text_of = np.repeat(np.arange(len(texts)), texts.lengths)
    for windows in batches:
        batch = collate_windows(texts, windows, isolate=isolate, pad_id=0)
        ids, tokens = batch.tokens.ids, batch.tokens
        assert ids.shape == (len(windows.starts), context)
        assert tokens.real is None
        assert batch.num_tokens == ids.numel()
        expected = ids.flatten().tolist()
        pairs = [(i, after[i]) for i in expected if not isolate or text_of[i] == text_of[after[i]]]
        assert at_target_positions(batch, ids) == [i for i, _ in pairs]
        assert batch.targets.tolist() == [i for _, i in pairs]
        of_input = text_of[ids.numpy()]
        assert batch.indices.tolist() == of_input[:, 0].tolist()
        if tokens.segments is None:
            assert not isolate or (of_input == of_input[:, :1]).all()
            continue
        numbers = tokens.segments.numpy()
        longest = max(np.bincount(row).max() for row in numbers)
        assert tokens.longest_text is not None
        assert longest <= tokens.longest_text < longest + 64
        assert (numbers[:, 0] == 0).all()
        steps = np.diff(numbers, axis=1)
        assert (steps == (np.diff(of_input, axis=1) != 0)).all()  # 0, 1, 2, ... without a gap


def test_a_plan_for_other_texts_is_refused() -> None:
    plan: dict[str, Any] = {"context": 4, "batch_size": 2, "seed": 0, "epoch": 0}
    (windows,) = plan_windows(np.array([4, 3]), **plan)
    with pytest.raises(AssertionError, match="other texts"):
        collate_windows(texts_of([4, 4]), windows, isolate=True, pad_id=0)


@given(lengths=LENGTHS, context=st.integers(1, 9), max_tokens=st.integers(1, 30), data=st.data())
@settings(max_examples=200, deadline=None)
def test_evaluation_scores_every_token_but_the_first_of_its_text_once(
    lengths: list[int], context: int, max_tokens: int, data: st.DataObject
) -> None:
    stride, pad_id = data.draw(st.integers(1, context)), 60_000
    isolate = data.draw(st.booleans())  # of no effect, since no window leaves its text
    texts = texts_of(lengths)
    scored: list[int] = []
    read: list[list[int]] = []
    limits = {"context": context, "stride": stride, "max_tokens": max_tokens}
    for windows in plan_evaluation_windows(texts.lengths, **limits):
        batch = collate_windows(texts, windows, isolate=isolate, pad_id=pad_id)
        assert batch.tokens.segments is None
        rows = rows_of(batch.tokens, pad_id)
        assert batch.tokens.ids.numel() <= max(max_tokens, len((read or rows)[0]))
        assert [len(row) for row in rows] == windows.sizes.tolist()
        begins_text = np.isin(windows.starts, windows.offsets)
        first_scored = np.where(begins_text, 1, context - stride + 1)
        assert windows.first_scored.tolist() == first_scored.tolist()
        read += rows
        assert batch.num_tokens == sum(map(len, rows))
        for row, index in zip(rows, batch.indices.tolist(), strict=True):
            text = texts[index].tolist()
            at = text.index(row[0])
            assert row == text[at : at + len(row)]
        assert batch.targets.tolist() == [
            i + 1 for i in at_target_positions(batch, batch.tokens.ids)
        ]
        scored += batch.targets.tolist()
    firsts = set(texts.offsets[:-1][texts.lengths > 0].tolist())
    assert sorted(scored) == [i for i in range(sum(lengths)) if i not in firsts]
    sizes = [len(row) for row in read]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= context
    if stride == context:
        assert len(set(chain(*read))) == sum(sizes) == len(scored)
