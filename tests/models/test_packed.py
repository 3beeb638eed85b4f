"""Packed rows: texts of a row do not affect each other, with any position scheme."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.parts.attend_blocks import Blocks
from heedful.parts.tokens import MaskSpec, Tokens
from option_space import (
    EXACT,
    SEARCH,
    SIDES,
    VOCAB,
    assert_same,
    lengths_of,
    pad,
    random_rows,
    real,
)
from single_stacks import SCHEMES, Single, decoder, singles


@pytest.mark.parametrize("windows", [(None, None), (2, None), (3, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_row_equals_separate_texts(scheme: str, windows: tuple[int | None, ...]) -> None:
    """In training and evaluation, gradients of all weights included."""
    net = decoder(Single(scheme, windows=windows))
    rows, ids, segments = packed([4, 1, 6, 3])
    upstream = torch.randn(ids.size(1), VOCAB, dtype=torch.float64)
    together = net(ids, segments=segments)[0]
    together.backward(upstream)
    learned = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    apart = torch.cat([net(row[None])[0] for row in rows])
    torch.testing.assert_close(together, apart, **EXACT)
    apart.backward(upstream)
    assert_same(learned, [parameter.grad for parameter in net.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(net(ids, segments=segments)[0], apart, **EXACT)
        # Without the segments they do depend on each other: the check above can fail.
        assert (net(ids)[0] - apart).abs().max() > 1e-3


def packed(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Texts, their packed row, and the index of the text of each token."""
    rows = random_rows(lengths, seed)
    numbers = [torch.full_like(row, index) for index, row in enumerate(rows)]
    return rows, torch.cat(rows)[None], torch.cat(numbers)[None]


@pytest.mark.parametrize("windows", [(None, None), (2, None)])
@pytest.mark.parametrize("longest_text", [None, 3])
def test_a_segment_number_that_recurs_is_another_segment(
    windows: tuple[int | None, ...], longest_text: int | None
) -> None:
    """With and without padding, and in rows long enough for diagonal blocks."""
    net = decoder(Single("rotary", windows=windows))
    rows, ids, _ = packed([3, 2, 3] * 20)
    segments = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0] * 20)[None]
    # Runs of one number that touch would be one segment.
    for start in range(8, 160, 16):
        segments[:, start : start + 8] += 2
    apart = torch.cat([net(row[None])[0] for row in rows])
    tokens = Tokens.from_ids(ids, segments=segments, longest_text=longest_text)
    torch.testing.assert_close(net.head(net.decode(tokens))[0], apart, **EXACT)
    padded = torch.nn.functional.pad(ids, (0, 5))
    numbers = torch.nn.functional.pad(segments, (0, 5))
    out = net(padded, torch.tensor([ids.size(1)]), segments=numbers)
    torch.testing.assert_close(out[0, : ids.size(1)], apart, **EXACT)


def test_packed_rows_with_a_cache_are_refused() -> None:
    """The segments were ignored."""
    net = decoder(Single("none"))
    _, ids, segments = packed([3, 2])
    with pytest.raises(UserError, match="one text for each row"):
        net.decode(Tokens.from_ids(ids, segments=segments), net.start(1, capacity=5))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_rows_of_short_texts_use_diagonal_blocks(scheme: str, window: int | None) -> None:
    """Outputs and gradients equal those of the full mask."""
    net = decoder(Single(scheme, windows=(window, None)))
    _, ids, segments = packed([16, 3, 40, 1] * 7)
    parts = [
        Tokens.from_ids(ids, segments=segments, longest_text=longest) for longest in (None, 64)
    ]
    upstream = torch.randn(*ids.shape, net.embedding.tokens.embedding_dim, dtype=torch.float64)
    actual = []
    for tokens in parts:
        net.zero_grad()
        states = net.decode(tokens)
        states.backward(upstream)
        actual.append([states.detach(), *(p.grad.clone() for p in net.decoder.parameters())])
    assert_same(*actual)
    x = net.embedding(parts[1])
    plans = net.decoder.plans(x, [MaskSpec(parts[1], causal=True)] * 2)
    for plan, _ in plans:
        assert isinstance(plan.attend, Blocks)
        assert len(plan.attend.keys) == 4  # of 420 columns
        for keys in plan.attend.keys:
            assert len(keys) <= 128 + 63


@SEARCH
@given(singles(), st.lists(lengths_of(3, 1, 4), min_size=1, max_size=3), st.integers(0, 3), SIDES,
       st.integers(-1, 3))  # fmt: skip
@torch.no_grad()
def test_rows_with_different_packing_and_padding(
    single: Single, lengths: list[list[int]], more: int, side: str, number: int
) -> None:
    """The segment number of padding may equal that of the text before it."""
    net = decoder(single)
    rows = [packed(item, seed) for seed, item in enumerate(lengths)]
    width = max(sum(item) for item in lengths) + more
    ids = pad([row[1][0] for row in rows], side, width=width, pad_id=None)
    segments = pad([row[2][0] for row in rows], side, width=width, pad_id=number)
    logits = net(ids, torch.tensor([sum(item) for item in lengths]), padding_side=side,
                 segments=segments)  # fmt: skip
    for out, item, (texts, _, _) in zip(logits, lengths, rows, strict=True):
        actual = out[real(sum(item), width, side)].split(item)
        assert_same(actual, [net(text[None])[0] for text in texts])


@SEARCH
@given(singles(), lengths_of(3, 1, 4), st.integers(0, 2), st.integers(0, 99))
def test_texts_of_a_packed_row_do_not_affect_each_other(
    single: Single, lengths: list[int], changed: int, seed: int
) -> None:
    """Other tokens in one text change nothing in the others, and their losses have no gradient in
    it."""
    net = decoder(single, seed)
    _, ids, segments = packed(lengths, seed)
    inside = segments[0] == changed
    other = torch.where(inside, (ids + 1) % VOCAB, ids)
    with torch.no_grad():
        before, after = (net(item, segments=segments)[0] for item in (ids, other))
    assert torch.equal(after[~inside], before[~inside])
    assert (after[inside] != before[inside]).any()
    marked = torch.where(inside, VOCAB - 1, ids % (VOCAB - 1))  # one id is in this text only
    states = net.decode(Tokens.from_ids(marked, segments=segments))[0]
    (states[~inside] * torch.randn(1, single.d_model)).sum().backward()
    assert not net.embedding.tokens.weight.grad[VOCAB - 1].any()
