"""Masks: reference tables, polarity, biases in every dtype; positions of tokens."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from heedful.parts.tokens import MaskSpec, Span, Tokens, padding_mask, visible_keys
from option_space import SEARCH, SIDES, lengths_of


def table(mask: Tensor) -> list[str]:
    return ["".join("x" if allowed else "." for allowed in row) for row in mask]


def visible(queries: list[int], keys: int, *, causal: bool, window: int | None = None) -> list[str]:
    spans = Span(torch.tensor([queries])), Span(torch.arange(keys)[None])
    actual = visible_keys(*spans, causal=causal, window=window)
    assert actual is not None
    return table(actual[0])


def test_causality_compares_positions_with_fewer_queries_than_keys() -> None:
    assert visible([0, 1, 2], 3, causal=True) == ["x..", "xx.", "xxx"]
    assert visible([3, 4], 5, causal=True) == ["xxxx.", "xxxxx"]
    assert visible([3], 4, causal=True) == ["xxxx"]


def test_a_causal_window_has_w_keys_including_the_query() -> None:
    causal = ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]
    assert visible([0, 1, 2, 3, 4], 5, causal=True, window=3) == causal
    assert visible([3, 4], 5, causal=True, window=3) == causal[3:]
    for one in (True, False):
        assert visible([0, 1, 2], 3, causal=one, window=1) == ["x..", ".x.", "..x"]
    assert visible([0, 1, 2, 3], 4, causal=False, window=2) == ["xx..", "xxx.", ".xxx", "..xx"]


def test_masks_of_padded_and_packed_rows() -> None:
    lengths = torch.tensor([3, 0, 1, 4])
    assert table(padding_mask(lengths, 4)) == ["xxx.", "....", "x...", "xxxx"]
    assert table(padding_mask(lengths, 4, "left")) == [".xxx", "....", "...x", "xxxx"]
    segments = torch.tensor([[0, 0, 1, 2, 2], [5, 5, 5, 5, 5]])
    tokens = Tokens.from_ids(torch.zeros(2, 5, dtype=torch.int64), segments=segments)
    assert tokens.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    mask = visible_keys(tokens, tokens, causal=False)
    assert mask is not None
    assert torch.equal(mask, segments[:, :, None] == segments[:, None, :])
    assert visible_keys(*[Span(torch.arange(3)[None])] * 2, causal=False) is None


@SEARCH
@given(lengths_of(4, 0, 6), SIDES)
def test_positions_count_real_tokens_and_are_never_negative(lengths: list[int], side: str) -> None:
    tokens = Tokens.from_ids(torch.zeros(4, 6, dtype=torch.int64), torch.tensor(lengths), side)
    assert tokens.real is not None
    assert torch.equal(tokens.real, padding_mask(torch.tensor(lengths), 6, side))
    counted = (tokens.real.cumsum(-1) - 1).clamp(min=0)
    positions = tokens.positions.expand(4, 6)
    assert torch.equal(positions[tokens.real], counted[tokens.real])
    assert positions.min() >= 0
    assert tokens.longest() == max(lengths)


@SEARCH
@given(lengths_of(2, 0, 6), SIDES, st.booleans(), st.none() | st.integers(1, 7), st.data())
def test_the_bias_of_a_block_equals_that_block_of_a_reference(
    lengths: list[int], side: str, causal: bool, window: int | None, data: st.DataObject
) -> None:
    """A query is real if it has a visible key; in a causal pass that is always its own."""
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])
    counts = torch.tensor(lengths)
    tokens = Tokens.from_ids(torch.zeros(2, 6, dtype=torch.int64), counts, side, segments)
    real, positions = tokens.real, tokens.positions
    assert real is not None
    expected = torch.zeros(2, 6, 6, dtype=torch.bool)
    for row, query, key in product(range(2), range(6), range(6)):
        distance = int(positions.expand(2, 6)[row, query] - positions.expand(2, 6)[row, key])
        expected[row, query, key] = (
            bool(real[row, query] and real[row, key])
            and bool(segments[row, query] == segments[row, key])
            and (not causal or distance >= 0)
            and (window is None or abs(distance) < window)
        )
    spec = MaskSpec(tokens, causal=causal)
    first, start = (data.draw(st.integers(0, 5)) for _ in range(2))
    bias = spec.bias(torch.float64, window=window, part=(range(first, 6), range(start, 6)))
    assert bias is not None
    assert torch.equal(bias[:, 0] == 0, expected[:, first:, start:])
    assert spec.has_key is not None
    assert torch.equal(spec.has_key, expected.any(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bias_hides_keys_exactly_without_overflow_in_half_precision(
    dtype: torch.dtype,
) -> None:
    spans = Span(torch.zeros(1, 1)), Span(torch.zeros(1, 2), torch.tensor([[True, False]]))
    visibility = MaskSpec(*spans, causal=False)
    bias = visibility.bias(dtype)
    assert bias is not None
    assert bias.dtype == dtype
    for score in (-3e4, 3e4):
        assert (bias + torch.full((), score, dtype=dtype)).isfinite().all()
    # The allowed key is the worse one by far more than real scores differ.
    scores = torch.tensor([-1e4, 1e4], dtype=dtype)
    assert (bias.flatten() + scores).float().softmax(-1).tolist() == [1.0, 0.0]


def test_only_a_plain_causal_mask_uses_the_kernels_own() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert MaskSpec(Tokens.from_ids(ids), causal=True).is_causal_alone
    lengths = torch.tensor([4, 2])
    # Every query but padding is left of the padding.
    assert MaskSpec(Tokens.from_ids(ids, lengths), causal=True).is_causal_alone
    for tokens in (Tokens.from_ids(ids, lengths, "left"), Tokens.from_ids(ids, segments=ids)):
        assert not MaskSpec(tokens, causal=True).is_causal_alone
    assert not MaskSpec(Tokens.from_ids(ids), causal=False).is_causal_alone
