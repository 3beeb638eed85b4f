"""Epochs planned in shuffle buffers: every row once, few rows at a time, pure functions."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data import plans
from heedful.data.plans import plan_batches, plan_by_buffers

BLOCK, BLOCKS = 5, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BLOCK_ROWS", BLOCK)
    monkeypatch.setattr(plans, "BUFFER_BLOCKS", BLOCKS)


def rows_of(num_rows: int, epoch: int = 0, seed: int = 1) -> list[list[int]]:
    """The rows of each buffer."""

    def plan(number: int, rows: np.ndarray) -> list[list[int]]:
        return [rows.tolist()]

    return [*plan_by_buffers(num_rows, plan, seed=seed, epoch=epoch)]


@pytest.mark.parametrize("num_rows", [0, 1, 14, 15, 16, 31, 99, 151])
def test_buffers_are_a_partition_into_shuffled_blocks(num_rows: int) -> None:
    buffers = rows_of(num_rows)
    assert sorted(row for rows in buffers for row in rows) == [*range(num_rows)]
    assert all(len(rows) <= BLOCK * BLOCKS for rows in buffers)
    num_blocks = [len({row // BLOCK for row in rows}) for rows in buffers]
    assert max(num_blocks) - min(num_blocks) <= 1
    if num_rows <= BLOCK * BLOCKS:
        assert buffers == [[*range(num_rows)]]
        return
    assert len({tuple(map(tuple, rows_of(num_rows, epoch))) for epoch in range(9)}) > 1
    assert rows_of(num_rows, 3) == rows_of(num_rows, 3)


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(16, 120), epoch=st.integers(0, 3), data=st.data())
def test_a_plan_in_buffers_is_a_list_of_all_batches(num_rows: int, epoch: int, data: Any) -> None:
    lengths = np.random.default_rng(num_rows).integers(1, 9, num_rows)
    planned: list[int] = []

    def plan(number: int, rows: np.ndarray) -> list[np.ndarray]:
        planned.append(number)
        limits = {"max_tokens": 20, "max_sentences": 4}
        keys = {**limits, "seed": 1, "epoch": epoch, "buffer": number, "rows": rows}
        return plan_batches(lengths[rows], **keys)

    buffers = rows_of(num_rows, epoch)
    whole = [b.tolist() for n, rows in enumerate(buffers) for b in plan(n, np.array(rows))]
    assert sorted(row for batch in whole for row in batch) == [*range(num_rows)]
    lazy = plan_by_buffers(num_rows, plan, seed=1, epoch=epoch)
    assert len(lazy) == len(whole)
    planned.clear()
    assert [batch.tolist() for batch in lazy] == whole
    assert planned == [*range(len(buffers))]
    first = data.draw(st.integers(-len(whole), len(whole) - 1))
    last = data.draw(st.integers(-len(whole), len(whole) + 5))
    step = data.draw(st.sampled_from([1, 2, 3]))
    assert lazy[first].tolist() == whole[first]
    assert [batch.tolist() for batch in lazy[first:last:step]] == whole[first:last:step]
    with pytest.raises(IndexError):
        lazy[len(whole)]


def test_buffers_with_equal_lengths_have_different_plans() -> None:
    keys: dict[str, Any] = {"max_tokens": 10, "max_sentences": None, "seed": 1, "epoch": 0}
    plans = [plan_batches(np.full(30, 2), buffer=n, **keys) for n in range(2)]
    assert [b.tolist() for b in plans[0]] != [b.tolist() for b in plans[1]]
    assert [b.tolist() for b in plans[0]] == [
        b.tolist() for b in plan_batches(np.full(30, 2), **keys)
    ]
