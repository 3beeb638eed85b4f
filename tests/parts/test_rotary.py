"""Rotary positions: formulas, tables of transformers, layouts, distances, precision."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.parts.positions import (
    Layout,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RotaryPositions,
    Scaling,
    YarnScaling,
    rotate,
)

LAYOUTS: list[Layout] = ["half", "interleaved"]
ORIGINAL = "original_max_position_embeddings"


def llama3(factor: float, low: float, high: float, original: int) -> tuple[Scaling, dict[str, Any]]:
    keys = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high, ORIGINAL: original}
    return Llama3Scaling(factor, low, high, original), keys


def yarn(factor: float, original: int, **more: Any) -> tuple[Scaling, dict[str, Any]]:
    names = {"slow": "beta_slow", "fast": "beta_fast"}
    reference = {names.get(name, name): value for name, value in more.items()}
    keys = {"factor": factor, ORIGINAL: original, **reference}
    return YarnScaling(factor, original, **more), keys


# The scheme, and what transformers calls it.
SCALED: dict[str, tuple[Scaling | None, dict[str, Any]]] = {
    "default": (None, {}),
    "linear": (LinearScaling(4.0), {"factor": 4.0}),
    "llama3": llama3(8.0, 1.0, 4.0, 8192),
    "llama3 of 3.2": llama3(32.0, 0.5, 3.0, 1024),
    "yarn": yarn(4.0, 4096),
    "yarn set by hand": yarn(16.0, 2048, slow=2.0, fast=24.0, attention_factor=1.25),
    "yarn not truncated": yarn(4.0, 4096, truncate=False),
    "yarn of a short text": yarn(2.0, 16),
    "yarn that stretches nothing": yarn(1.0, 64),
}


def rotated(x: Tensor, positions: list[int], *scheme: Any, **options: Any) -> Tensor:
    """`x` (B, H, T, E) with its T tokens at these positions."""
    return rotate(x, RotaryPositions(x.size(-1), *scheme, **options)(torch.tensor([positions])))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Tables


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_is_rotated_as_a_complex_number(layout: Layout) -> None:
    """(x₁ + i x₂) e^(i m θ), θ = base^(-2i/E) in double precision (RoFormer, eq. 14, 15)."""
    x, places = random(2, 3, 5, 8), [0, 1, 7, 100, 31]
    first, second = (x[..., :4], x[..., 4:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    theta = 500.0 ** (-np.arange(0, 8, 2) / 8)
    pairs = (first.numpy() + 1j * second.numpy()) * np.exp(1j * np.outer(places, theta))
    parts = (torch.from_numpy(pairs.real), torch.from_numpy(pairs.imag))
    expected = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    actual = rotated(x, places, 500.0, layout)
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("width", [2, 6, 64, 128])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_equal_transformers(name: str, base: float, width: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, keys = SCALED[name]
    kind = name.split()[0]
    config = transformers.LlamaConfig(
        hidden_size=2 * width,
        num_attention_heads=2,
        head_dim=width,
        max_position_embeddings=int(keys.get("factor", 1) * keys.get(ORIGINAL, 64)),
        rope_parameters={"rope_type": kind, "rope_theta": base, **keys},
    )
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        reference, factor = rotary.inv_freq, rotary.attention_scaling
    else:
        reference, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    module = RotaryPositions(width, base, "half", scaling)
    torch.testing.assert_close(module.table, reference, rtol=2e-6, atol=0)
    assert module.factor == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("width", [4, 64, 128])
def test_ntk_divides_the_lowest_frequency_by_its_factor_and_keeps_the_highest(width: int) -> None:
    """base · factor^(E / (E - 2)); equal to dynamic scaling of transformers at twice the length."""
    scaling = NtkScaling(8.0)
    base = 10000.0 * 8 ** (width / (width - 2))
    assert scaling.scaled_base(10000.0, width) == pytest.approx(base, rel=1e-12)
    plain, stretched = RotaryPositions(width).table, RotaryPositions(width, scaling=scaling).table
    torch.testing.assert_close(stretched, RotaryPositions(width, base).table)
    assert stretched[0] == plain[0] == 1
    assert stretched[-1].item() == pytest.approx(plain[-1].item() / 8, rel=1e-5)
    assert (stretched[1:] < plain[1:]).all()
    assert RotaryPositions(2, scaling=scaling).table.tolist() == [1.0]  # a single pair stays


# Layouts


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(0, 5000), st.integers(0, 99))
def test_a_permutation_converts_between_the_layouts(pairs: int, start: int, seed: int) -> None:
    """Even dimensions first, then odd ones: exactly equal."""
    x = random(2, 2, 3, 2 * pairs, seed=seed)
    order = torch.cat([torch.arange(0, 2 * pairs, 2), torch.arange(1, 2 * pairs, 2)])
    places = list(range(start, start + 3))
    interleaved = rotated(x, places, layout="interleaved")
    half = rotated(x[..., order], places, layout="half")
    assert torch.equal(interleaved[..., order], half)
    if pairs > 1 and start > 0:
        assert not torch.equal(interleaved, rotated(x, places, layout="half"))


# Properties


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 6),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 2000),
    st.sampled_from(LAYOUTS),
    st.sampled_from([None, LinearScaling(2.0), NtkScaling(4.0), Llama3Scaling()]),
)
def test_scores_depend_on_the_distance_only(
    pairs: int, query: int, key: int, shift: int, layout: Layout, scaling: Scaling | None
) -> None:
    scheme = 10000.0, layout, scaling
    q, k = random(1, 1, 1, 2 * pairs), random(1, 1, 1, 2 * pairs, seed=1)

    def product(query: int, key: int) -> float:
        return (rotated(q, [query], *scheme) * rotated(k, [key], *scheme)).sum().item()

    # Angles of 2,000 in fp32 are off by 1e-4.
    assert product(query + shift, key + shift) == pytest.approx(product(query, key), abs=5e-3)
    assert product(7, 7) == pytest.approx((q * k).sum().item(), abs=1e-5)
    assert product(0, 0) == (q * k).sum().item()  # place zero turns nothing
    # And they do depend on it, and on its sign.
    assert len({round(product(m, 7), 9) for m in (6, 7, 8)}) == 3


def test_angles_follow_the_positions_of_each_row() -> None:
    module = RotaryPositions(6)
    whole, rows = module(torch.arange(9)[None]), module(torch.tensor([[0, 1], [4, 5]]))
    assert rows.sin.shape == (2, 1, 2, 3)
    assert torch.equal(rows.sin[1, 0], whole.sin[0, 0, 4:6])
    assert torch.equal(rows.cos[0, 0], whole.cos[0, 0, :2])


# Precision and devices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_are_fp32_in_models_of_any_dtype(dtype: torch.dtype) -> None:
    """At position 100,000 bf16 has only multiples of 512, and fp16 overflows."""
    module = RotaryPositions(16).to(dtype)
    assert module.table.dtype == torch.float32
    places = torch.tensor([[99_999, 100_000]])
    rotation = module(places)
    theta = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    angles = np.outer([99_999, 100_000], theta)
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    np.testing.assert_allclose(rotation.cos[0, 0].numpy(), np.cos(angles), rtol=0, atol=0.02)
    np.testing.assert_allclose(rotation.sin[0, 0].numpy(), np.sin(angles), rtol=0, atol=0.02)
    x = torch.ones(1, 1, 2, 16, dtype=dtype)
    actual = rotate(x, rotation)
    assert actual.dtype == dtype
    exact = rotate(x.float(), rotation)
    torch.testing.assert_close(actual.float(), exact, rtol=0, atol=1e-2)


def test_tables_outside_of_checkpoints_exist_after_loading() -> None:
    """No buffer: `to_empty` would leave it without values, and files would contain it."""
    module = RotaryPositions(8)
    assert module.state_dict() == {}
    assert list(module.parameters()) == []
    before = module.table.clone()
    module.to("meta").to_empty(device="cpu")
    assert torch.equal(module.table, before)
    places = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    assert module(places).cos.device.type == "meta"


@pytest.mark.parametrize("width", [1, 3, 7])
def test_an_odd_width_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"even head width, not {width}"):
        RotaryPositions(width)


def test_an_unknown_layout_is_not_taken_for_interleaved() -> None:
    with pytest.raises(ValueError, match="layout must be half or interleaved, not 'neox'"):
        RotaryPositions(8, layout="neox")  # type: ignore[arg-type]
