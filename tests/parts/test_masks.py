"""Masks: exact tables, the one convention, and what is refused."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from heedful.parts.masks import (
    AttentionMask,
    causal_mask,
    combine,
    padding_mask,
    token_positions,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shapes and types unchecked, as for users: what the code itself refuses."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def table(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if allowed else "." for allowed in row) for row in mask]


def test_padding_mask_tables() -> None:
    lengths = torch.tensor([3, 0, 1, 4])
    assert table(padding_mask(lengths, 4)) == ["xxx.", "....", "x...", "xxxx"]
    assert table(padding_mask(lengths, 4, "left")) == [".xxx", "....", "...x", "xxxx"]


def test_causal_mask_is_bottom_right_aligned_when_queries_are_fewer_than_keys() -> None:
    assert table(causal_mask(3, 3)) == ["x..", "xx.", "xxx"]
    assert table(causal_mask(2, 5)) == ["xxxx.", "xxxxx"]
    assert table(causal_mask(1, 4)) == ["xxxx"]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 9))
def test_the_causal_rows_of_a_cached_step_are_the_last_rows_of_the_whole(
    queries: int, before: int
) -> None:
    keys = before + queries
    assert torch.equal(causal_mask(queries, keys), causal_mask(keys, keys)[before:])


def test_combine_allows_what_all_allow() -> None:
    padding = padding_mask(torch.tensor([2, 3]), 3)[:, None, None, :]
    both = combine(padding, None, causal_mask(3, 3))
    assert both is not None
    assert table(both[0, 0]) == ["x..", "xx.", "xx."]
    assert table(both[1, 0]) == ["x..", "xx.", "xxx"]
    assert combine(None, None) is None
    assert combine() is None
    assert combine(None, padding) is padding


def test_combine_leaves_its_masks_as_they_are() -> None:
    first, second = causal_mask(3, 3), torch.zeros(3, 3, dtype=torch.bool)
    combine(first, second)
    assert torch.equal(first, causal_mask(3, 3))


def test_left_padding_moves_no_position_and_indexes_no_table_below_zero() -> None:
    lengths = torch.tensor([4, 2, 0])
    positions = token_positions(lengths, 4, "left")
    assert positions is not None
    assert positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_right_padding_needs_no_positions() -> None:
    assert token_positions(torch.tensor([4, 2]), 4, "right") is None
    assert token_positions(None, 4, "left") is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_left_positions_count_the_real_tokens_before(lengths: list[int]) -> None:
    counts = torch.tensor(lengths)
    mask = padding_mask(counts, 6, "left")
    positions = token_positions(counts, 6, "left")
    assert positions is not None
    assert torch.equal(positions, (mask.cumsum(-1) - 1).clamp(min=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int64])
@pytest.mark.usefixtures("unchecked")
def test_a_mask_that_is_not_bool_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must be bool with True = may attend"):
        AttentionMask(torch.zeros(1, 1, 2, 2, dtype=dtype))
    with pytest.raises(TypeError, match="must be bool with True = may attend"):
        AttentionMask.of(torch.ones(1, 1, 2, 2, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (2,), (1, 1, 1, 2, 2)])
def test_a_mask_of_other_than_four_dimensions_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"4 dimensions.*not {len(shape)}"):
        AttentionMask(torch.ones(shape, dtype=torch.bool))


def test_a_ready_mask_is_made_once() -> None:
    mask = AttentionMask(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    assert AttentionMask.of(mask) is mask
    assert AttentionMask.of(None) is None
    assert mask.bias(torch.float32) is mask.bias(torch.float32)


def test_rows_are_the_queries_that_have_a_key() -> None:
    allowed = torch.tensor([[True, False], [False, False]])[None, None]
    assert AttentionMask(allowed).rows.tolist() == [[[[True], [False]]]]
    no_keys = torch.ones(1, 1, 2, 0, dtype=torch.bool)
    assert AttentionMask(no_keys).rows.tolist() == [[[[False], [False]]]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bias_never_overflows_and_blocks_exactly_in_half_precision_too(
    dtype: torch.dtype,
) -> None:
    bias = AttentionMask(torch.tensor([True, False])[None, None, None]).bias(dtype)
    assert bias.dtype == dtype
    low, high = torch.full((), -3e4, dtype=dtype), torch.full((), 3e4, dtype=dtype)
    assert (bias + low).isfinite().all()
    # The allowed key is the worse one by far more than real scores differ.
    scores = torch.tensor([-1e4, 1e4], dtype=dtype)
    assert (bias.flatten() + scores).float().softmax(-1).tolist() == [1.0, 0.0]
    assert (bias + high).isfinite().all()
