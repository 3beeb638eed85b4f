"""Dropout: its rate, its expectation, its mask both ways, and its random numbers."""

import math

import pytest
import torch
from torch import nn

from heedful.parts.dropout import Dropout, keep_mask

LEVELS = 65_536


def training(p: float) -> Dropout:
    module = Dropout(p)
    module.train()
    return module


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_each_element_is_dropped_at_the_rate_that_was_asked_for(p: float) -> None:
    torch.manual_seed(0)
    count = 400_000
    dropped = (training(p)(torch.ones(count)) == 0).double().mean().item()
    rate = round(p * LEVELS) / LEVELS
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("p", [1e-6, 0.1, 1 / 3, 0.5, 0.999, 1 - 1e-9])
def test_the_scale_makes_the_expectation_exact(p: float) -> None:
    keep, scale = keep_mask(torch.Size([100]), p)
    levels = min(round(p * LEVELS), LEVELS - 1)
    assert keep.dtype == torch.bool
    assert (1 - levels / LEVELS) * scale == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("dropped", [1, 2, 32_768, 65_535])
def test_exactly_so_many_of_all_draws_are_dropped(
    dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every 16-bit number drawn once, the count is no matter of chance."""
    every = torch.arange(-32_768, 32_768).to(torch.int16).view(torch.int64)
    monkeypatch.setattr(torch.Tensor, "random_", lambda self, *_: self.copy_(every))
    keep, _ = keep_mask(torch.Size([LEVELS]), dropped / LEVELS)
    assert int((~keep).sum()) == dropped


def test_what_is_kept_is_scaled() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000)
    out = training(0.25)(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    assert 0 < kept.sum() < 1000


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shape_and_type_stay(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype)
    out = training(0.5)(x)
    assert out.shape == x.shape
    assert out.dtype == dtype


def test_neighbours_are_independent() -> None:
    """Four elements share one 64-bit draw: none of its parts may lean on another."""
    torch.manual_seed(0)
    count = 400_000
    keep = keep_mask(torch.Size([count]), 0.5)[0].double() - 0.5
    for lag in (1, 2, 3, 4, 8):
        correlation = 4 * (keep[lag:] * keep[:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(count)
    for lane in range(4):
        assert abs(keep[lane::4].mean().item()) < 5 * 0.5 / math.sqrt(count / 4)


def test_the_gradient_passes_where_the_values_did() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 20, requires_grad=True)
    out = training(0.4)(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * (out / x).detach())


def test_two_calls_in_one_graph_keep_their_own_masks() -> None:
    torch.manual_seed(0)
    dropout = training(0.5)
    x = torch.ones(200, requires_grad=True)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    (first * 1 + second * 10).sum().backward()
    torch.testing.assert_close(x.grad, (first + 10 * second).detach())


def test_the_same_seed_gives_the_same_mask() -> None:
    """From torch's own generator, whose state a resumed run restores."""
    dropout, x = training(0.5), torch.ones(100)
    torch.manual_seed(7)
    first, state = dropout(x), torch.get_rng_state()
    second = dropout(x)
    torch.manual_seed(7)
    assert torch.equal(dropout(x), first)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), second)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_nor_drawn_in_eval_mode_or_at_rate_zero() -> None:
    x = torch.randn(10)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert training(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_the_input_stays_as_it_is() -> None:
    x = torch.ones(100)
    training(0.5)(x)
    assert torch.equal(x, torch.ones(100))


def test_a_rate_next_to_one_still_has_a_scale() -> None:
    """It rounds to one, for which the scale would be a division by zero."""
    assert training(0.999_999)(torch.ones(64)).isfinite().all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_that_is_none_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, not"):
        Dropout(p)


def test_it_follows_the_mode_of_the_module_that_holds_it() -> None:
    net = nn.Sequential(Dropout(0.5))
    x = torch.ones(100)
    assert (net.train()(x) == 0).any()
    assert torch.equal(net.eval()(x), x)
