"""Attention: parity with torch's, its two paths equal, empty rows, polarity, dropout on weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from heedful.parts.masks import AttentionMask, causal_mask, padding_mask
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts import attention as attention_module
from heedful.parts.attention import Attention, attend, attend_fused

B, T, S, H, D = 2, 4, 5, 3, 12
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def random_attention(
    *, bias: bool = True, out_bias: bool | None = None, dropout: float = 0.0, heads: int = H
) -> Attention:
    torch.manual_seed(0)
    out_bias = bias if out_bias is None else out_bias
    module = Attention(D, heads, dropout=dropout, bias=bias, out_bias=out_bias)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.eval()


def inputs(cross: bool = True) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x, memory = torch.randn(B, T, D, generator=generator), torch.randn(B, S, D, generator=generator)
    return x, memory if cross else None


def some_mask(name: str, keys: int) -> Tensor | None:
    """Masks of every shape that broadcasts to (B, H, T, K), each query with one key at least."""
    free = torch.rand(B, H, T, keys, generator=torch.Generator().manual_seed(2)) < 0.5
    free[..., 0] = True
    return {
        "none": None,
        "keys": padding_mask(torch.tensor([keys, 2]), keys)[:, None, None, :],
        "causal": causal_mask(T, keys)[None, None],
        "queries": free[:, :1],
        "one row": free[:1, :1, :1],
        "heads": free,
    }[name]


MASKS = ["none", "keys", "causal", "queries", "one row", "heads"]


def torch_attention(ours: Attention) -> nn.MultiheadAttention:
    bias = ours.qkv.bias is not None
    theirs = nn.MultiheadAttention(
        D, ours.num_heads, bias=bias, batch_first=True, dtype=ours.qkv.weight.dtype
    )
    state = {"in_proj_weight": ours.qkv.weight, "out_proj.weight": ours.out.weight}
    if bias:
        state |= {"in_proj_bias": ours.qkv.bias, "out_proj.bias": ours.out.bias}
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_parity_with_torch(cross: bool, bias: bool, mask_name: str) -> None:
    # In fp64: in fp32 a sum over a batch differs by more between two processors than it may here.
    ours = random_attention(bias=bias).double()
    theirs = torch_attention(ours)
    x, memory = (None if t is None else t.double() for t in inputs(cross))
    assert x is not None
    source = x if memory is None else memory
    mask = some_mask(mask_name, source.size(1))
    # Torch's bool masks say the opposite: True = may not.
    full = None if mask is None else ~mask.expand(B, H, T, source.size(1)).flatten(0, 1)
    expected, weights = theirs(x, source, source, attn_mask=full, average_attn_weights=False)
    out = ours(x, memory, mask=mask)
    torch.testing.assert_close(out, expected, **EXACT)
    seen, seen_weights = ours.with_weights(x, memory, mask=mask)
    torch.testing.assert_close(seen, expected, **EXACT)
    torch.testing.assert_close(seen_weights, weights, **EXACT)

    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.qkv.weight.grad, theirs.in_proj_weight.grad, **EXACT)
    torch.testing.assert_close(ours.out.weight.grad, theirs.out_proj.weight.grad, **EXACT)
    if bias:
        torch.testing.assert_close(ours.qkv.bias.grad, theirs.in_proj_bias.grad, **EXACT)
        torch.testing.assert_close(ours.out.bias.grad, theirs.out_proj.bias.grad, **EXACT)


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("cross", [True, False])
def test_eager_equals_fused_equals_with_weights(
    cross: bool, mask_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def spy(name: str, function: Any) -> Any:
        return lambda *given: (taken.append(name), function(*given))[1]

    monkeypatch.setattr(attention_module, "attend", spy("eager", attend))
    monkeypatch.setattr(attention_module, "attend_fused", spy("fused", attend_fused))
    module = random_attention()
    x, memory = inputs(cross)
    mask = some_mask(mask_name, T if memory is None else S)
    eager = module(x, memory, mask=mask)
    with torch.no_grad():
        fused = module(x, memory, mask=mask)
        seen, _ = module.with_weights(x, memory, mask=mask)
    assert taken == ["eager", "fused", "eager"]
    torch.testing.assert_close(eager, fused, **CLOSE)
    torch.testing.assert_close(seen, fused, **CLOSE)


@pytest.mark.parametrize(("bias", "out_bias"), [(True, False), (False, True)])
def test_biases_of_inputs_and_output_are_chosen_apart(bias: bool, out_bias: bool) -> None:
    module = random_attention(bias=bias, out_bias=out_bias)
    assert (module.qkv.bias is not None, module.out.bias is not None) == (bias, out_bias)
    x, memory = inputs()
    with torch.no_grad():
        keys, values = module.project_memory(memory)
        torch.testing.assert_close(module(x, memory), module.attend_to(x, keys, values), **CLOSE)


def test_scores_are_divided_by_the_root_of_the_head_width() -> None:
    """Not of the model width; against the formula of the paper in numpy."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 2, n, 3)) for n in (4, 5, 5))
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    tensors = [torch.tensor(a, dtype=torch.float32) for a in (query, key, value)]
    out, seen = attend(*tensors, None)
    np.testing.assert_allclose(seen.numpy(), weights, rtol=1e-5)
    np.testing.assert_allclose(out.numpy(), weights @ value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(attend_fused(*tensors, None).numpy(), out.numpy(), atol=1e-6)


def test_true_means_may_attend() -> None:
    module = random_attention()
    x, memory = inputs()
    only = torch.zeros(1, 1, 1, S, dtype=torch.bool)
    only[..., 3] = True
    _, values = module.project_memory(memory)
    expected = module.out(values[:, :, 3].flatten(1))[:, None].expand(B, T, D)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(module(x, memory, mask=only), expected, **CLOSE)
    weights = module.with_weights(x, memory, mask=only)[1]
    assert torch.equal(weights, only.expand(B, H, T, S).float())


def test_fewer_queries_than_keys_are_the_last_ones() -> None:
    """Causality is aligned bottom-right: what a cached step needs."""
    module = random_attention()
    memory = inputs()[1]
    whole = module(memory, mask=causal_mask(S, S)[None, None])
    last = module(memory[:, -2:], memory, mask=causal_mask(2, S)[None, None])
    torch.testing.assert_close(last, whole[:, -2:], **CLOSE)


@pytest.mark.parametrize("grad", [True, False])
def test_what_may_not_be_attended_to_has_no_influence_at_all(grad: bool) -> None:
    module = random_attention()
    x, memory = inputs()
    mask = padding_mask(torch.tensor([S, 2]), S)[:, None, None, :]
    other = memory.clone()
    other[1, 2:] = 1e3
    with torch.set_grad_enabled(grad):
        assert torch.equal(module(x, memory, mask=mask), module(x, other, mask=mask))


EMPTY = {
    "a whole sample": [(0,)],
    "a query": [(1, slice(None), 2)],
    "every query": [(0,), (1,)],
}


@pytest.mark.parametrize("where", EMPTY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eager", [True, False])
def test_empty_rows_give_zeros_and_zero_gradients(
    eager: bool, dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never NaN, never a uniform look at everything, in both paths and in half precision."""
    monkeypatch.setattr(Attention, "_forms_weights", lambda *_: eager)
    module = random_attention().to(dtype)
    x, memory = (t.to(dtype).requires_grad_() for t in inputs())
    allowed = torch.ones(B, H, T, S, dtype=torch.bool)
    for index in EMPTY[where]:
        allowed[index] = False
    empty = ~allowed.any(-1).any(1)
    out = module(x, memory, mask=allowed)
    assert empty.any()
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert (out[~empty].abs().sum(-1) > 0).all()
    with torch.no_grad():
        _, weights = module.with_weights(x, memory, mask=allowed)
    assert torch.equal(weights.sum(-1) > 0, allowed.any(-1))

    upstream = torch.randn(B, T, D, generator=torch.Generator().manual_seed(3)).to(dtype)
    out.backward(upstream)
    grads = [x.grad, memory.grad, *(p.grad for p in module.parameters())]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert not x.grad[empty].any()
    assert not memory.grad[empty.all(-1)].any()
    # And the weights learn what they learn without those rows.
    module.zero_grad()
    module(x, memory, mask=None).backward(upstream * ~empty[..., None])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for before, parameter in zip(grads[2:], module.parameters(), strict=True):
        torch.testing.assert_close(before, parameter.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("eager", [True, False])
def test_a_head_with_nothing_to_attend_to_adds_nothing(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "_forms_weights", lambda *_: eager)
    module = random_attention()
    x, memory = inputs()
    allowed = torch.ones(B, H, T, S, dtype=torch.bool)
    allowed[0, 1, 2] = False
    heads, _ = attend(*module.project(x, memory), None)
    heads = heads.clone()
    heads[0, 1, 2] = 0
    expected = module.out(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, memory, mask=allowed), expected, **CLOSE)
    seen, weights = module.with_weights(x, memory, mask=allowed)
    torch.testing.assert_close(seen, expected, **CLOSE)
    assert not weights[0, 1, 2].any()


@pytest.mark.parametrize("eager", [True, False])
def test_pad_queries_give_zeros_and_no_gradient(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "_forms_weights", lambda *_: eager)
    module = random_attention()
    x = inputs()[0].requires_grad_()
    tokens = padding_mask(torch.tensor([T, 2]), T)
    mask = tokens[:, None, None, :] & tokens[:, None, :, None]
    out = module(x, mask=mask)
    assert not out[~tokens].any()
    out.sum().backward()
    assert x.grad is not None
    assert not x.grad[~tokens].any()
    assert (x.grad[tokens].abs().sum(-1) > 0).all()


def test_no_keys_at_all_give_zeros() -> None:
    module = random_attention()
    x, _ = inputs()
    nothing = torch.ones(B, 1, 1, 0, dtype=torch.bool)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = module(x, torch.zeros(B, 0, D), mask=nothing)
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("beams", [1, 3])
def test_the_beams_of_a_source_share_its_keys_and_values(beams: int) -> None:
    module = random_attention()
    memory = inputs()[1]
    x = torch.randn(B * beams, T, D, generator=torch.Generator().manual_seed(4))
    mask = padding_mask(torch.tensor([S, 2]), S)[:, None, None, :]
    keys, values = module.project_memory(memory)
    with torch.no_grad():
        expected = module(
            x, memory.repeat_interleave(beams, 0), mask=mask.repeat_interleave(beams, 0)
        )
        out = module.attend_to(x, keys, values, mask=mask)
    torch.testing.assert_close(out, expected, **CLOSE)


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="d_model 10 is not divisible by num_heads 3"):
        Attention(10, 3)


class _Recorded(nn.Module):
    """Stands for a dropout: keeps what it was given, gives back what it was told to."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights, self.seen, self.p = weights, [], 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.weights


def test_dropout_acts_on_the_weights() -> None:
    """After the softmax and before the values: what is dropped is what a query looked at."""
    module = random_attention(dropout=0.5).train()
    x, memory = inputs()
    _, weights = random_attention().with_weights(x, memory)
    dropped = weights * 2 * (torch.rand(weights.shape) < 0.5)
    recorded = _Recorded(dropped)
    module.dropout = recorded
    out = module(x, memory)
    torch.testing.assert_close(recorded.seen[0], weights, **CLOSE)
    _, values = module.project_memory(memory)
    torch.testing.assert_close(out, module.out((dropped @ values).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("eager", [True, False])
def test_dropout_acts_in_training_only(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fused path too, whose rate is an argument that eval mode does not know of."""
    monkeypatch.setattr(Attention, "_forms_weights", lambda *_: eager)
    module = random_attention(dropout=0.5)
    x, memory = inputs()
    out = module(x, memory)
    assert torch.equal(out, module(x, memory))
    torch.testing.assert_close(out, random_attention()(x, memory), **CLOSE)
    module.train()
    assert not torch.allclose(module(x, memory), out)


@pytest.mark.parametrize("eager", [True, False])
def test_dropout_keeps_the_expectation(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "_forms_weights", lambda *_: eager)
    copies = 20_000
    module = random_attention(dropout=0.3)
    x, memory = (t[:1] for t in inputs())
    with torch.no_grad():
        expected = module(x, memory)
        module.train()
        out = module(x.expand(copies, -1, -1), memory.expand(copies, -1, -1))
    error = (out.mean(0) - expected[0]) / (out.std(0) / math.sqrt(copies))
    assert error.abs().max() < 5  # standard errors


def test_gradients_are_those_of_the_formula() -> None:
    """gradcheck in fp64, a partly blocked and a wholly blocked row among them."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)]
    allowed = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    mask = AttentionMask(allowed[None, None])
    bias = mask.bias(torch.float64)
    for path in (lambda *t: attend(*t, bias)[0] * mask.rows, lambda *t: _fused(t, mask)):
        assert torch.autograd.gradcheck(path, tensors)


def _fused(tensors: tuple[Tensor, ...], mask: AttentionMask) -> Tensor:
    return attend_fused(*tensors, mask.bias(torch.float64)) * mask.rows


def test_half_precision_is_near_the_full_one() -> None:
    module = random_attention()
    x, memory = inputs()
    mask = some_mask("queries", S)
    expected = module(x, memory, mask=mask)
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        half = random_attention().to(dtype)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = half(x.to(dtype), memory.to(dtype), mask=mask)
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def test_autocast_gives_finite_zeros_for_empty_rows_and_their_gradients() -> None:
    module = random_attention()
    x = inputs()[0].requires_grad_()
    mask = torch.ones(B, 1, T, T, dtype=torch.bool)
    mask[0] = False
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, mask=mask)
    assert not out[0].any()
    F.mse_loss(out.float(), torch.ones_like(x)).backward()
    assert x.grad is not None
    assert not x.grad[0].any()
    assert x.grad[1].isfinite().all()
    assert x.grad[1].any()
