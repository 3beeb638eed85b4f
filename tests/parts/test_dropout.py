"""Dropout: rate, expectation, masks of forward and backward pass, random numbers."""

import math

import pytest
import torch
from torch import nn

from heedful.kernels import library as kernels
from heedful.parts.residual import Dropout, keep_mask, random_levels

LEVELS = 65_536


def training(p: float) -> Dropout:
    module = Dropout(p)
    module.train()
    return module


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_elements_are_dropped_with_probability_p(p: float) -> None:
    torch.manual_seed(0)
    count = 400_000
    dropped = (training(p)(torch.ones(count)) == 0).double().mean().item()
    rate = round(p * LEVELS) / LEVELS
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("p", [1e-6, 0.1, 1 / 3, 0.5, 0.999, 1 - 1e-9])
def test_the_scale_makes_the_expectation_exact(p: float) -> None:
    keep, scale = keep_mask(torch.Size([100]), p)
    levels = min(round(p * LEVELS), LEVELS - 1)
    assert keep.dtype == torch.int16
    assert set(keep.tolist()) <= {0, 1}
    assert (1 - levels / LEVELS) * scale == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("dropped", [1, 2, 32_768, 65_535])
def test_the_fraction_of_dropped_levels_is_exact(
    dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all 16-bit numbers, once each, the count is exact."""
    every = torch.arange(-32_768, 32_768).to(torch.int16)
    monkeypatch.setattr("heedful.parts.residual.random_levels", lambda seed, count: every)
    with kernels.unused():
        keep, _ = keep_mask(torch.Size([LEVELS]), dropped / LEVELS)
    assert int((keep == 0).sum()) == dropped


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.25, 0.999_999])
def test_kept_elements_and_their_gradients_are_scaled(
    p: float, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Each call in a graph has its own mask; a rate that rounds to one still has a finite scale;
    shape, dtype and input are unchanged."""
    torch.manual_seed(0)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    first, second = training(p)(x), training(p)(x)
    (first + 8 * second).sum().backward()
    assert torch.equal(x, torch.ones_like(x))
    scale = torch.tensor(keep_mask(x.shape, p)[1], dtype=dtype)
    for out in (first, second):
        assert (out.shape, out.dtype) == (x.shape, dtype)
        assert ((out == 0) | (out == scale)).all()
        assert out.isfinite().all()
    torch.testing.assert_close(x.grad, (first + 8 * second).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_elements_of_any_layout_are_kept_as_they_are(dtype: torch.dtype) -> None:
    """Values, signs and infinities of kept elements; dropped ones are zero, even if infinite."""
    torch.manual_seed(0)
    base = torch.randn(6, 4, 50).to(dtype)
    base[0, 0, :20] = -math.inf
    dropout = training(0.5)
    for x in (base.transpose(0, 2), base[:, 1:3], base[:1].expand(5, -1, -1)):
        leaf = x.detach().requires_grad_()
        out = dropout(leaf)
        kept = out != 0
        assert 0.3 < kept.double().mean() < 0.7
        assert torch.equal(out, torch.where(kept, 2 * x, 0))
        out.backward(x)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, out)


def test_gradients_agree_with_finite_differences() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return training(0.3)(x)

    assert torch.autograd.gradcheck(seeded, x)


def test_neighboring_elements_are_independent() -> None:
    """Four elements share one 64-bit random number, and must not be correlated."""
    torch.manual_seed(0)
    count = 400_000
    keep = keep_mask(torch.Size([count]), 0.5)[0].double() - 0.5
    for lag in (1, 2, 3, 4, 8):
        correlation = 4 * (keep[lag:] * keep[:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(count)
    for lane in range(4):
        assert abs(keep[lane::4].mean().item()) < 5 * 0.5 / math.sqrt(count / 4)


def test_masks_of_successive_calls_are_independent_and_bits_uniform() -> None:
    """Each call seeds a generator with 63 bits: no bit may be biased, no two calls correlated."""
    torch.manual_seed(0)
    seeds = [int(torch.randint(2**63 - 1, (1,))) for _ in range(20)]
    calls = torch.stack([random_levels(seed, 8_000).view(torch.int64) for seed in seeds])
    bits = (calls[..., None] >> torch.arange(64)) & 1
    means = bits.double().mean((0, 1))
    assert (means - 0.5).abs().max() < 6 * 0.5 / math.sqrt(40_000)
    signs = bits.flatten(1).double() * 2 - 1
    correlations = signs @ signs.T / signs.size(1)
    assert (correlations - torch.eye(20)).abs().max() < 6 / math.sqrt(signs.size(1))
    assert calls.unique().numel() == calls.numel()


def test_the_same_seed_gives_the_same_mask() -> None:
    """Seeded by torch's generator, whose state a resumed run restores."""
    dropout, x = training(0.5), torch.ones(100)
    torch.manual_seed(7)
    first, state = dropout(x), torch.get_rng_state()
    second = dropout(x)
    torch.manual_seed(7)
    assert torch.equal(dropout(x), first)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), second)
    assert not torch.equal(first, second)


def test_eval_mode_and_rate_zero_use_no_random_numbers() -> None:
    x = torch.randn(10)
    state = torch.get_rng_state()
    assert nn.Sequential(Dropout(0.5)).eval()(x) is x
    assert training(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_rates_outside_of_the_range_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, not"):
        Dropout(p)
