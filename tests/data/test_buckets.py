"""Batches of few fixed shapes: at most eight, with the least padding, and the same targets."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.buckets import (
    MAX_SHAPES,
    BatchShape,
    _least_padded_widths,
    batch_shapes,
    pad_batch,
    padded_lengths,
)
from heedful.data.collate import collate_pairs
from heedful.data.columns import pack_ids
from heedful.data.plans import plan_batches
from heedful.errors import UserError

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60)
VOCAB, PAD = 30, 0


@given(LENGTHS, st.integers(120, 900), st.sampled_from([None, 1, 7]), st.integers(0, 3))
def test_every_batch_of_every_epoch_has_one_of_eight_shapes(pairs, max_tokens, sentences, epoch):
    lengths = [np.array(side) for side in zip(*pairs, strict=True)]
    limits = {"max_tokens": max_tokens, "max_sentences": sentences}
    shapes = batch_shapes(*lengths, **limits)
    assert len(shapes) <= MAX_SHAPES
    for shape in shapes:
        assert shape.rows * (shape.width + shape.source_width) <= max_tokens
        assert shape.rows <= min(len(pairs), sentences or len(pairs))
    padded = padded_lengths(shapes, *lengths)
    assert all((wide >= own).all() for wide, own in zip(padded, lengths, strict=True))
    rng = np.random.default_rng(0)
    src, tgt = (
        pack_ids([rng.integers(4, VOCAB, n).tolist() for n in side], VOCAB) for side in lengths
    )
    rows = []
    for indices in plan_batches(*padded, **limits, seed=1, epoch=epoch):
        batch = collate_pairs(src, tgt, indices, start_ids=[1], pad_id=PAD)
        actual = pad_batch(batch, shapes)
        shape = (*actual.tokens.ids.shape, actual.source.ids.size(1))
        assert shape in shapes
        for ours, own in ((actual.tokens, batch.tokens), (actual.source, batch.source)):
            height, width = own.ids.shape
            inside = torch.zeros_like(ours.real)
            inside[:height, :width] = True if own.real is None else own.real
            assert torch.equal(ours.real, inside)
            assert torch.equal(ours.ids[:height, :width], own.ids)
        flat, at = batch.tokens.positions.expand_as(batch.tokens.ids), batch.target_positions
        wide = actual.tokens.positions.expand_as(actual.tokens.ids)
        assert torch.equal(wide.flatten()[actual.target_positions], flat.flatten()[at])
        row = actual.target_positions // shape[1]
        assert torch.equal(row, at // batch.tokens.ids.size(1))
        assert torch.equal(actual.targets, batch.targets)
        assert (actual.num_targets, actual.num_tokens) == (batch.num_targets, batch.num_tokens)
        rows += indices.tolist()
    assert sorted(rows) == list(range(len(pairs)))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 4))
def test_widths_are_those_with_the_least_padding(lengths, most):
    def padded(widths):
        return sum(min(width for width in widths if width >= length) for length in lengths)

    sizes = sorted(set(lengths))
    best = min(
        padded((*some, sizes[-1]))
        for count in range(most)
        for some in combinations(sizes[:-1], min(count, len(sizes) - 1))
    )
    actual = _least_padded_widths(np.array(lengths), np.ones(len(lengths), int), most)
    assert len(actual) <= most
    assert padded(actual) == best


def test_long_texts_have_few_widths_too():
    lengths = np.random.default_rng(0).integers(1, 9_000, 5_000)
    widths = _least_padded_widths(lengths, np.ones_like(lengths), MAX_SHAPES)
    assert len(widths) == MAX_SHAPES
    assert widths[-1] == lengths.max()
    assert widths == sorted(set(widths))


def test_a_row_that_is_padded_above_the_budget_is_refused():
    message = "training.compile pads rows to 18 tokens, more than training.batch_tokens 17; raise"
    with pytest.raises(UserError, match=message):
        batch_shapes(np.array([9, 3]), np.array([4, 9]), max_tokens=17, max_sentences=None)


def test_a_batch_that_fits_no_shape_is_refused():
    texts = pack_ids([[5, 6, 7]], VOCAB)
    batch = collate_pairs(texts, texts, np.array([0]), start_ids=[1], pad_id=PAD)
    with pytest.raises(UserError, match="a batch of 1 rows of 3 tokens fits none of the task's"):
        pad_batch(batch, [BatchShape(1, 3, 2)])


def test_texts_of_one_side_have_no_source():
    shapes = batch_shapes(np.array([4, 4, 2]), max_tokens=8, max_sentences=None)
    assert shapes == [BatchShape(3, 2), BatchShape(2, 4)]
    assert padded_lengths(shapes, np.array([1, 3]))[0].tolist() == [2, 4]
