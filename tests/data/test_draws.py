"""Rows of an epoch by weights: each row as often as any other, exactly, in every epoch."""

import tracemalloc
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import draws
from heedful.data.columns import CorpusRange, rows_of
from heedful.data.draws import CorpusShare, EpochDraw
from heedful.data.plans import plan_by_buffers
from heedful.errors import UserError


def draw_rows(shares: list[CorpusShare], *, seed: int, epoch: int) -> np.ndarray:
    """All rows of an epoch."""
    draw = EpochDraw(shares, seed=seed, epoch=epoch)
    return draw.rows(0, len(draw))


weights = st.decimals(0, 3, places=2).map(Fraction)
schedules = st.lists(st.tuples(st.integers(1, 4), weights), max_size=3, unique_by=lambda x: x[0])


@st.composite
def share_lists(draw: st.DrawFn) -> list[CorpusShare]:
    shares, start = [], 0
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 12))
        passes = [(0, draw(weights)), *sorted(draw(schedules))]
        shares.append(CorpusShare(CorpusRange(f"{number}", start, start + size), passes))
        start += size
    return shares


def weight_at(share: CorpusShare, epoch: int) -> Fraction:
    return [weight for first, weight in share.passes if first <= epoch][-1]


@settings(max_examples=60)
@given(share_lists(), st.integers(0, 2**63 - 1), st.sampled_from([2, 3, 5, 100]))
def test_each_row_of_a_corpus_is_read_equally_often(
    shares: list[CorpusShare], seed: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "BLOCK_ROWS", block)
        check_counts(shares, seed)


def check_counts(shares: list[CorpusShare], seed: int) -> None:
    counts = np.zeros(shares[-1].corpus.end, int)
    sums = [Fraction(0)] * len(shares)
    for epoch in range(6):
        try:
            rows = draw_rows(shares, seed=seed, epoch=epoch)
        except UserError:
            rows = np.zeros(0, int)
        assert len(np.unique(rows)) == len(rows), "each copy of a row has an index of its own"
        counts += np.bincount(rows_of(rows), minlength=len(counts))
        for number, share in enumerate(shares):
            sums[number] += weight_at(share, epoch)
            assert share.passes_before(epoch + 1) == sums[number]
            of_corpus = counts[share.corpus.start : share.corpus.end]
            assert of_corpus.sum() == floor(sums[number] * share.corpus.size)
            assert of_corpus.min() >= floor(sums[number])
            assert of_corpus.max() <= ceil(sums[number])


def test_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    share = [CorpusShare(CorpusRange("a", 0, 100), [(0, Fraction(1, 4))])]
    epochs = [draw_rows(share, seed=1, epoch=epoch) for epoch in range(8)]
    for epoch in (5, 2, 7, 0):
        assert draw_rows(share, seed=1, epoch=epoch).tolist() == epochs[epoch].tolist()
    for first in (0, 4):  # four quarters are a pass
        assert sorted(np.concatenate(epochs[first : first + 4])) == [*range(100)]
    assert epochs[0].tolist() != epochs[4].tolist(), "the second pass has another permutation"
    assert draw_rows(share, seed=2, epoch=0).tolist() != epochs[0].tolist()


@settings(max_examples=60)
@given(share_lists(), st.integers(0, 3), st.data())
def test_a_part_of_an_epoch_is_computed_alone(
    shares: list[CorpusShare], epoch: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "BLOCK_ROWS", data.draw(st.sampled_from([2, 3, 100])))
        try:
            draw = EpochDraw(shares, seed=3, epoch=epoch)
        except UserError:
            return
        rows = draw.rows(0, len(draw))
        assert len(rows) == len(draw)
        start = data.draw(st.integers(0, len(draw)))
        end = data.draw(st.integers(start, len(draw)))
        assert draw.rows(start, end).tolist() == rows[start:end].tolist()


def test_a_part_of_a_pass_has_rows_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "BLOCK_ROWS", 10)
    share = [CorpusShare(CorpusRange("a", 7, 102), [(0, Fraction(1, 5))])]
    epochs = [draw_rows(share, seed=1, epoch=epoch) for epoch in range(5)]
    assert sorted(np.concatenate(epochs)) == [*range(7, 102)]
    for rows in epochs:
        assert rows.tolist() == sorted(rows)
        counts, _ = np.histogram(rows, np.linspace(7, 102, 11))
        assert set(counts.tolist()) <= {1, 2, 3}
    # Each of the blocks has a permutation of its own.
    first = (epochs[0] - 7) // 9.5
    places = [[*(epochs[0][first == block] - 7 - 9.5 * block)] for block in range(10)]
    assert len({tuple(np.round(place)) for place in places}) > 5


def test_the_rows_of_an_epoch_are_not_in_memory() -> None:
    size = 3_000_000
    shares = [
        CorpusShare(CorpusRange("a", 0, size), [(0, Fraction(1, 2))]),
        CorpusShare(CorpusRange("b", size, size + 10), [(0, Fraction(50_000))]),
        CorpusShare(CorpusRange("c", size + 10, 2 * size), [(0, Fraction(1))]),
    ]
    tracemalloc.start()
    draw = EpochDraw(shares, seed=1, epoch=1)

    def plan(number: int, rows: np.ndarray) -> list[np.ndarray]:
        return [rows]

    rows = plan_by_buffers(len(draw), plan, seed=1, epoch=1, rows_of=draw.rows)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(draw) == size // 2 + 500_000 + size - 10
    assert peak < 4 * 8 * len(rows) < 8 * len(draw)


def test_one_corpus_of_weight_one_is_all_rows_in_order() -> None:
    share = [CorpusShare(CorpusRange("a", 0, 7), [(0, Fraction(1))])]
    assert all(draw_rows(share, seed=0, epoch=e).tolist() == [*range(7)] for e in range(3))


def test_an_epoch_without_rows_is_refused() -> None:
    share = [CorpusShare(CorpusRange("a", 0, 7), [(0, Fraction(1)), (2, Fraction(0))])]
    draw_rows(share, seed=0, epoch=1)
    with pytest.raises(UserError, match="epoch 2 reads no row, by the weights"):
        draw_rows(share, seed=0, epoch=2)
