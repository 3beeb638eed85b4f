"""Single modules called without a model: masks as tensors, `causal`, errors, docstring examples."""

import doctest
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heedful.models
import heedful.parts
import heedful.zoo
from architectures import tiny
from checked_shapes import check_shapes
from heedful.errors import UserError
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.tokens import MaskSpec, Tokens
from option_space import EXACT, VOCAB

MODULES = sorted(module.name for module in pkgutil.iter_modules(heedful.parts.__path__))


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def attention(kind: Any = Attention, **options: Any) -> Any:
    torch.manual_seed(1)
    return kind(16, 2, **options).double()


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_of_parts_are_correct(name: str) -> None:
    names = {name: getattr(heedful.parts, name) for name in heedful.parts.__all__}
    module = importlib.import_module(f"heedful.parts.{name}")
    assert doctest.testmod(module, extraglobs={**names, "torch": torch, "nn": nn}).failed == 0


def test_docstring_examples_of_models_are_correct() -> None:
    names = {name: getattr(heedful.parts, name) for name in heedful.parts.__all__}
    for name in ("decoder_only", "encoder_decoder", "encoder_only", "stack"):
        module = importlib.import_module(f"heedful.models.{name}")
        assert doctest.testmod(module, extraglobs={**names, "torch": torch}).failed == 0


@pytest.mark.parametrize("package", [heedful.parts, heedful.models, heedful.zoo])
def test_exported_names_exist_and_are_described(package: Any) -> None:
    assert len(package.__all__) == len({*package.__all__})
    for name in package.__all__:
        assert hasattr(package, name)
        assert f"`{name}" in package.__doc__


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_call_without_a_mask_is_attention_among_all_tokens(
    causal: bool, window: int | None
) -> None:
    module, x = attention(window=window), states(2, 5)
    tokens = Tokens.from_ids(torch.zeros(2, 5, dtype=torch.long))
    expected = module(x, MaskSpec(tokens, causal=causal))
    torch.testing.assert_close(module(x, causal=causal), expected, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(module(x, causal=causal), expected, **EXACT)


@pytest.mark.parametrize("window", [None, 3])
def test_a_bool_mask_and_causal_are_combined(window: int | None) -> None:
    module, x = attention(window=window), states(2, 5)
    everything = torch.ones(5, 5, dtype=torch.bool)
    expected = module(x, causal=True)
    torch.testing.assert_close(module(x, everything, causal=True), expected, **EXACT)
    near = everything.tril() if window is None else everything.tril().triu(1 - window)
    torch.testing.assert_close(attention()(x, near[None].expand(2, 5, 5)), expected, **EXACT)


def test_a_query_without_a_visible_key_has_zero_output_and_gradient() -> None:
    module, x = attention(window=2), states(2, 5).requires_grad_()
    mask = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    mask[1, 4, 3:] = False  # the keys that are left are outside the window
    out = module(x, mask, causal=True)
    assert not out[1, 4].any()
    assert out[0, 4].any()
    (grad,) = torch.autograd.grad(out[1, 4].sum(), x)
    assert not grad.any()


def test_cross_attention_takes_states_or_their_projection() -> None:
    module, x, memory = attention(CrossAttention), states(2, 3), states(2, 5)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    for allowed in (None, mask):
        out = module(x, memory, allowed)
        projected = module.project_memory(memory)
        torch.testing.assert_close(module(x, mask=allowed, projected=projected), out, **EXACT)
    ones = torch.ones(2, 3, 5, dtype=torch.bool)
    torch.testing.assert_close(module(x, memory, ones), module(x, memory), **EXACT)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(5, 4, dtype=torch.bool), r"shape \(5, 4\); it must be \(5, 5\) or \(2, 5, 5\)"),
        (torch.ones(3, 5, 5, dtype=torch.bool), r"shape \(3, 5, 5\)"),
        (torch.ones(2, 1, 5, 5, dtype=torch.bool), r"shape \(2, 1, 5, 5\)"),
        (torch.ones(5, dtype=torch.bool), r"shape \(5,\)"),
        (torch.zeros(5, 5), "is float32; give a bool tensor"),
    ],
)
def test_a_mask_of_a_wrong_type_or_shape_is_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention()(states(2, 5), mask)


def test_other_wrong_calls_are_refused_in_one_line() -> None:
    tokens = Tokens.from_ids(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UserError, match="give it there"):
        attention()(states(2, 5), MaskSpec(tokens, causal=False), causal=True)
    narrow = torch.zeros(2, 5, 12, dtype=torch.float64)
    with pytest.raises(UserError, match=r"\(batch, length, 16\), not \(2, 5, 12\)"):
        attention()(narrow)
    check_shapes(False)  # which would refuse the next call first
    with pytest.raises(UserError, match=r"not \(2, 5, 12\)"):
        attention(CrossAttention)(states(2, 5), narrow)
    with pytest.raises(UserError, match="needs `memory`"):
        attention(CrossAttention)(states(2, 5))


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_ids_outside_of_the_vocabulary_are_refused_in_one_line(wrong: int) -> None:
    ids = torch.tensor([[1, 2, wrong]])
    decoder, encoder, both = tiny("gpt2"), tiny("bert"), tiny("vaswani2017")
    calls = [lambda: decoder(ids), lambda: encoder(ids)]
    calls += [lambda: both(ids, ids[:, :2]), lambda: both(ids[:, :2], ids)]
    for call in calls:
        with pytest.raises(UserError, match=f"token ids must be from 0 to {VOCAB - 1}, not"):
            call()
