"""Attention: parity with torch, equal code paths, empty rows, dropout, grouped heads, windows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.errors import UserError
from heedful.parts import attend_blocks
from heedful.parts import attention as attention_module
from heedful.parts.attention import Attention, attend, plan_attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.positions import AlibiBias, RelativePositionBias, RotaryPositions
from heedful.parts.tokens import MaskSpec, Span, Tokens
from heedful.parts.unpadding import Unpadding
from option_space import EXACT, SEARCH, SIDES, lengths_of

B, T, S, H, D, E = 2, 4, 5, 3, 12, 4
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (3, 3)])
SCHEMES: dict[str, Any] = {
    "none": lambda heads: None,
    "alibi": AlibiBias,
    "buckets": lambda heads: RelativePositionBias(heads, 8, 60, causal=True),
    "rotary": lambda heads: RotaryPositions(E, 9.0),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(*heads: int, cross: bool = False, scheme: str = "none", **options: Any) -> Any:
    """Random attention in fp64, with query heads and, optionally, fewer key heads."""
    torch.manual_seed(0)
    if SCHEMES[scheme] is not None:
        options["position"] = SCHEMES[scheme](heads[0])
    kind = CrossAttention if cross else Attention
    module = kind(D, heads[0], num_kv_heads=heads[-1], head_dim=E, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def mask_of_table(allowed: Tensor) -> MaskSpec:
    """A mask from a table (B, T, K) of the keys that each query may attend to."""
    spans = (Span(torch.arange(n)[None]) for n in allowed.shape[1:])
    spec = MaskSpec(*spans, causal=False, allowed=allowed)
    spec.has_key = allowed.any(-1)
    return spec


def call(module: Any, x: Tensor, allowed: Tensor | None, memory: Tensor | None = None) -> Tensor:
    """Attention under a table (B, T, K); default: all keys for all queries."""
    keys = x if memory is None else memory
    if allowed is None:
        allowed = torch.ones(1, x.size(1), keys.size(1), dtype=torch.bool)
    visible = mask_of_table(allowed)
    return module(x, visible) if memory is None else module(x, memory, visible)


def some_table(name: str, keys: int) -> Tensor | None:
    free = torch.rand(B, T, keys, generator=torch.Generator().manual_seed(2)) < 0.5
    free[..., 0] = True
    by_key = torch.ones(B, T, keys, dtype=torch.bool)
    by_key[1, :, 2:] = False
    causal = torch.ones(1, T, keys, dtype=torch.bool).tril(keys - T)
    return {"none": None, "keys": by_key, "causal": causal, "free": free, "one": free[:1]}[name]


@pytest.mark.parametrize("name", ["none", "keys", "causal", "free", "one"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_outputs_and_gradients_equal_torch_multihead_attention(
    cross: bool, bias: bool, name: str
) -> None:
    """Outputs and gradients; the plain and the fused path."""
    ours = attention(H, cross=cross, bias=bias, out_bias=bias)
    reference = nn.MultiheadAttention(D, H, bias=bias, batch_first=True, dtype=torch.float64)
    inner = [ours.q, ours.kv] if cross else [ours.qkv]
    state = {"in_proj_weight": torch.cat([item.weight for item in inner])}
    state["out_proj.weight"] = ours.out.weight
    if bias:
        state["in_proj_bias"] = torch.cat([item.bias for item in inner])
        state["out_proj.bias"] = ours.out.bias
    reference.load_state_dict(state)
    x, memory = random(B, T, D, seed=1), random(B, S, D, seed=2) if cross else None
    source = x if memory is None else memory
    allowed = some_table(name, source.size(1))
    # Torch's bool masks are the opposite: True = may not attend.
    mask = None if allowed is None else ~allowed.expand(B, -1, -1).repeat_interleave(H, 0)
    expected, _ = reference(x, source, source, attn_mask=mask)
    out = call(ours, x, allowed, memory)
    torch.testing.assert_close(out, expected, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(call(ours, x, allowed, memory), expected, **EXACT)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    grads = torch.cat([item.weight.grad for item in inner])
    torch.testing.assert_close(grads, reference.in_proj_weight.grad, **EXACT)
    torch.testing.assert_close(ours.out.weight.grad, reference.out_proj.weight.grad, **EXACT)
    if bias:
        grads = torch.cat([item.bias.grad for item in inner])
        torch.testing.assert_close(grads, reference.in_proj_bias.grad, **EXACT)
        torch.testing.assert_close(ours.out.bias.grad, reference.out_proj.bias.grad, **EXACT)


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize(("bias", "out_bias"), [(True, False), (False, True)])
def test_input_and_output_biases_are_independent(bias: bool, out_bias: bool, cross: bool) -> None:
    module = attention(H, cross=cross, bias=bias, out_bias=out_bias)
    inner = [module.q, module.kv] if cross else [module.qkv]
    assert [item.bias is not None for item in [*inner, module.out]] == [bias] * len(inner) + [
        out_bias
    ]


@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (1.0, None), (None, 0.3)])
def test_scores_are_scaled_by_the_root_of_the_head_width_by_default(
    scale: float | None, softcap: float | None
) -> None:
    """Not of the model width; against the formula of the paper in numpy."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 2, n, 3)) for n in (4, 5, 5))
    scores = query @ key.swapaxes(-1, -2) * (scale or 1 / math.sqrt(3))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    tensors = [torch.tensor(a) for a in (query, key, value)]
    out, actual = attend(*tensors, None, scale=scale, softcap=softcap)
    np.testing.assert_allclose(actual.numpy(), weights, rtol=1e-10)
    np.testing.assert_allclose(out.numpy(), weights @ value, rtol=1e-10)
    if softcap is None:
        fused = F.scaled_dot_product_attention(*tensors, scale=scale)
        np.testing.assert_allclose(fused.numpy(), out.numpy(), rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("empty", [[(0,)], [(1, 2)], [(0,), (1,)]], ids=str)
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_queries_without_keys_have_zero_outputs_and_gradients(
    eager: bool, cross: bool, empty: list[Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never NaN or uniform weights; all other gradients are as without those rows."""
    monkeypatch.setattr(attention_module, "_FUSED_WEIGHTS", 10**9 if eager else 0)
    module = attention(H, cross=cross).to(dtype)
    x, memory = (random(B, n, D, seed=n).to(dtype).requires_grad_() for n in (T, S))
    memory_option = memory if cross else None
    allowed = torch.ones(B, T, S if cross else T, dtype=torch.bool)
    for index in empty:
        allowed[index] = False
    rows = ~allowed.any(-1)
    out = call(module, x, allowed, memory_option)
    assert not out[rows].any()
    assert (out[~rows].abs().sum(-1) > 0).all()
    upstream = random(B, T, D, seed=3).to(dtype)
    leaves = [x, memory, *module.parameters()] if cross else [x, *module.parameters()]
    grads = torch.autograd.grad(out, leaves, upstream)
    assert all(grad.isfinite().all() for grad in grads)
    if cross:
        assert not grads[0][rows].any()
        assert not grads[1][rows.all(-1)].any()
    everyone = call(module, x, None, memory_option)
    expected = torch.autograd.grad(everyone, leaves, upstream * ~rows[..., None])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for ours, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def test_no_keys_at_all_give_zeros() -> None:
    module = attention(H, cross=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert not call(module, random(B, T, D), None, torch.zeros(B, 0, D).double()).any()


def test_gradients_match_finite_differences_of_the_formula() -> None:
    """gradcheck in fp64, with a partly hidden and a fully hidden row."""
    tensors = [random(1, 2, n, 3, seed=n).requires_grad_() for n in (3, 4, 4)]
    allowed = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    visible = mask_of_table(allowed[None])
    bias, rows = visible.bias(torch.float64), visible.has_key[:, None, :, None]
    fused = F.scaled_dot_product_attention
    for path in (lambda *t: attend(*t, bias)[0] * rows, lambda *t: fused(*t, bias) * rows):
        assert torch.autograd.gradcheck(path, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_and_autocast_are_close_to_full_precision(
    dtype: torch.dtype, tolerance: float
) -> None:
    module, x, allowed = attention(H).float(), random(B, T, D).float(), some_table("free", T)
    allowed[0, 1] = False
    expected, half = call(module, x, allowed), attention(H).to(dtype)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = call(half, x.to(dtype), allowed)
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
            with torch.autocast("cpu", dtype):
                cast = call(module, x, allowed)
            torch.testing.assert_close(cast.float(), expected, rtol=tolerance, atol=tolerance)
            assert not cast[0, 1].any()


def test_numbers_of_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model 10 is not divisible by num_heads 3"):
        Attention(10, 3)
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_kv_heads 3"):
        Attention(8, 4, num_kv_heads=3)


LONG = 12
HEAD_CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3,), {}),
    ((4, 2), {}),
    ((4, 1), {"window": 5}),
    ((3,), {"scheme": "rotary", "scale": 1.0}),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [None, [LONG, 7]])
@pytest.mark.parametrize(("heads", "options"), HEAD_CASES, ids=str)
def test_long_sequences_train_with_the_fused_kernel_and_equal_gradients(
    heads: tuple[int, ...],
    options: dict[str, Any],
    lengths: list[int] | None,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = attention(*heads, dropout=0.0, **options).train()
    ids = torch.zeros(B, LONG, dtype=torch.long)
    tokens = Tokens.from_ids(ids, None if lengths is None else torch.tensor(lengths))
    x, upstream = random(B, LONG, D, seed=1).requires_grad_(), random(B, LONG, D, seed=2)
    plain_calls: list[Any] = []
    monkeypatch.setattr(
        attention_module,
        "attend",
        lambda *inputs, **options: plain_calls.append(inputs) or attend(*inputs, **options),
    )
    actual = []
    for least in (10**9, 1):
        monkeypatch.setattr(attention_module, "_FUSED_WEIGHTS", least)
        plain_calls.clear()
        out = module(x, MaskSpec(tokens, causal=causal))
        assert bool(plain_calls) is (least > 1)
        leaves = [x, *module.parameters()]
        actual.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for plain, fused in zip(*actual, strict=True):
        torch.testing.assert_close(fused, plain, **EXACT)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"softcap": 1.0}, {"scheme": "buckets"}])
def test_plain_products_are_used_where_the_fused_kernel_cannot_train(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "_FUSED_WEIGHTS", 1)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    module = attention(H, **options).train()
    tokens = Tokens.from_ids(torch.zeros(B, LONG, dtype=torch.long))
    module(random(B, LONG, D), MaskSpec(tokens, causal=True)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


# Dropout


@pytest.mark.parametrize("eager", [True, False])
def test_dropout_applies_to_the_weights_in_training_only(eager: bool) -> None:
    """The expectation is the output without dropout; a weight of one key and one head is dropped as
    a whole."""
    module, copies = attention(H, dropout=0.3), 20_000
    x = random(1, T, D)
    with torch.set_grad_enabled(eager):  # the fused kernel computes no gradients of dropout
        expected = call(module, x, None)
        assert torch.equal(expected, call(attention(H), x, None))
        out = call(module.train(), x.expand(copies, -1, -1), None)
        error = (out.mean(0) - expected[0]) / (out.std(0) / math.sqrt(copies))
        assert error.abs().max() < 5  # standard errors
        module = attention(1, dropout=0.5, out_bias=False)
        whole = call(module, x[:, :1], None)
        out = call(module.train(), x[:, :1].expand(64, -1, -1), None)
        is_nonzero = out.abs().amax((1, 2)) > 0
        assert 10 < is_nonzero.sum() < 54
        torch.testing.assert_close(out[is_nonzero], 2 * whole.expand_as(out[is_nonzero]), **EXACT)


# Grouped heads


def repeated(module: Any) -> Any:
    """The same attention with a separate key and value head for each query head."""
    heads, times = module.num_heads, module.num_heads // module.num_kv_heads
    full = attention(heads)
    full.position = module.position
    with torch.no_grad():
        for ours, reference in zip(module.qkv.parameters(), full.qkv.parameters(), strict=True):
            query, *parts = ours.split(module.split_sizes)
            # Head by head: the copies of one stand side by side.
            copies = [part.unflatten(0, (-1, E)).repeat_interleave(times, 0).flatten(0, 1)
                      for part in parts]  # fmt: skip
            reference.copy_(torch.cat([query, *copies]))
        full.out.load_state_dict(module.out.state_dict())
    return full


@SEARCH
@given(HEADS, st.booleans(), lengths_of(2, 0, 6), SIDES, st.sampled_from(list(SCHEMES)))
def test_grouped_heads_equal_repeated_heads(
    heads: tuple[int, int], causal: bool, lengths: list[int], side: str, scheme: str
) -> None:
    """Values and gradients; with padding, and with any position scheme."""
    module = attention(*heads, scheme=scheme)
    full, x = repeated(module), random(2, 6, D, seed=3)
    tokens = Tokens.from_ids(torch.zeros(2, 6, dtype=torch.int64), torch.tensor(lengths), side)
    visible = MaskSpec(tokens, causal=causal)
    grouped, item = (m(x, visible) for m in (module, full))
    torch.testing.assert_close(grouped, item, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(module(x, visible), item, **EXACT)
    upstream = random(2, 6, D, seed=4)
    (ours,), (reference,) = (
        torch.autograd.grad(out, m.qkv.weight, upstream) for out, m in
        ((grouped, module), (item, full))
    )  # fmt: skip
    query, *parts = reference.split(full.split_sizes)
    # A shared head learns from all who share it.
    sums = [part.unflatten(0, (heads[1], -1, E)).sum(1).flatten(0, 1) for part in parts]
    torch.testing.assert_close(ours, torch.cat([query, *sums]), **EXACT)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@torch.no_grad()
def test_beams_share_the_keys_and_values_of_their_source(heads: tuple[int, int]) -> None:
    module = attention(*heads, cross=True)
    memory, x = random(B, S, D), random(B * 3, T, D, seed=4)
    allowed = torch.ones(B, T, S, dtype=torch.bool)
    allowed[1, :, 2:] = False
    projected = module.project_memory(memory)
    assert projected.shape == (B, 2 * heads[1], S, E)
    visible = mask_of_table(allowed.repeat(1, 3, 1))
    expected = call(module, x, allowed.repeat_interleave(3, 0), memory.repeat_interleave(3, 0))
    out = module(x.view(B, 3 * T, D), mask=visible, projected=projected)
    torch.testing.assert_close(out.view_as(x), expected, **EXACT)


# Windows


@SEARCH
@given(HEADS, st.integers(1, 10), st.booleans(), st.integers(1, 12), st.integers(1, 5),
       st.none() | lengths_of(2, 0, 10), SIDES, st.sampled_from(list(SCHEMES)))  # fmt: skip
def test_a_window_equals_a_dense_mask(
    heads: tuple[int, int], length: int, causal: bool, window: int, size: int,
    lengths: list[int] | None, side: str, scheme: str,
) -> None:  # fmt: skip
    """Values of both paths and gradients, in parts of `size` queries or of W."""
    windowed, full = (attention(*heads, window=w, scheme=scheme) for w in (window, None))
    counts = None if lengths is None else torch.tensor(lengths).clamp(max=length)
    tokens = Tokens.from_ids(torch.zeros(2, length, dtype=torch.int64), counts, side)
    _same_as_dense(windowed, full, tokens, causal, window, size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 129, 1000])
def test_blocks_of_long_sequences_equal_a_dense_mask(window: int, causal: bool) -> None:
    """At the real size of blocks, the last one shorter than the others."""
    ids = torch.zeros(2, 300, dtype=torch.int64)
    tokens = Tokens.from_ids(ids, torch.tensor([300, 170]), "left")
    windowed, full = attention(2, 1, window=window), attention(2, 1)
    _same_as_dense(windowed, full, tokens, causal, window, attend_blocks._LOCAL_QUERIES)


def _same_as_dense(
    windowed: Any, full: Any, tokens: Tokens, causal: bool, window: int, size: int
) -> None:
    visible, span = MaskSpec(tokens, causal=causal), tokens
    distance = span.positions[:, :, None] - span.positions[:, None, :]
    dense = MaskSpec(span, span, causal=causal, allowed=distance.abs() < window)
    x = random(2, tokens.ids.size(1), D)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_blocks, "_LOCAL_QUERIES", size)
        eager = windowed(x, visible)
        with torch.no_grad():
            fused = windowed(x, visible)
    expected = full(x, dense)
    torch.testing.assert_close(eager, expected, **EXACT)
    torch.testing.assert_close(fused, expected, **EXACT)
    upstream = torch.randn_like(x)
    grads = (
        torch.autograd.grad(out, list(module.parameters()), upstream)
        for out, module in ((eager, windowed), (expected, full))
    )
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, **EXACT)


class _Written(TorchDispatchMode):
    """Elements of all tensors that operations wrote."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf._is_view():
                self.total += leaf.numel()
        return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("groups", "causal", "padded"),
    [(1, True, False), (1, False, True), (2, True, True), (2, False, False)],
)
def test_memory_writes_of_a_windowed_layer_are_linear_in_the_length(
    groups: int, scheme: str, causal: bool, padded: bool
) -> None:
    """Forward and backward: twice the length writes twice the elements, not four times."""
    module, totals = attention(2, groups, window=128, scheme=scheme).float(), []
    for length in (1024, 2048, 4096):
        lengths = torch.tensor([3 * length // 4]) if padded else None
        tokens = Tokens.from_ids(torch.zeros(1, length, dtype=torch.int64), lengths)
        with _Written() as mode:
            x = torch.randn(1, length, D)
            module(x, MaskSpec(tokens, causal=causal)).sum().backward()
        totals.append(mode.total)
    assert totals[2] - totals[1] == pytest.approx(2 * (totals[1] - totals[0]), rel=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"position": RotaryPositions(E)}, "no rotary positions"),
        ({"window": 3}, "no window"),
    ],
)
def test_cross_attention_refuses_options_of_one_text(options: Any, words: str) -> None:
    """They were ignored in one path and applied in another."""
    with pytest.raises(UserError, match=words):
        CrossAttention(D, H, head_dim=E, **options)


@pytest.mark.parametrize("name", ["query_norm", "key_norm"])
def test_a_single_norm_of_heads_is_refused(name: str) -> None:
    """It was ignored."""
    norms: dict[str, Any] = {name: nn.RMSNorm(E)}
    with pytest.raises(UserError, match="query_norm and key_norm"):
        Attention(D, H, head_dim=E, **norms)


def all_paths(module: Any, x: Tensor, memory: Tensor | None, spec: MaskSpec) -> dict[str, Tensor]:
    """The output by the fused kernel, by plain products, with weights, with a hook, for projected
    keys, and in a training step without padding."""
    keys = () if memory is None else (memory,)
    with torch.no_grad():
        outs = {"fused": module(x, *keys, spec)}
    outs["trained"] = module(x, *keys, spec)
    outs["weights"] = module(x, *keys, spec, return_weights=True)[0]
    handle = module.weights_hook.register_forward_hook(lambda *_: None)
    outs["hook"] = module(x, *keys, spec)
    handle.remove()
    if memory is not None:
        outs["projected"] = module(x, mask=spec, projected=module.project_memory(memory))
    sides = {}
    for span, states in ((spec.queries, x), (spec.keys, x if memory is None else memory)):
        if id(span) not in sides:
            index = span.real.flatten().nonzero()[:, 0]
            sides[id(span)] = Unpadding(states.shape[:2], index)
    queries, others = (sides[id(span)] for span in (spec.queries, spec.keys))
    plan = plan_attention(spec, module, x, needs_grad=True, unpaddings=(queries, others))
    rest = () if memory is None else (others.unpad(memory),)
    outs["unpadded"] = queries.pad(module(queries.unpad(x), *rest, plan))
    return {name: out.detach() for name, out in outs.items()}


@SEARCH
@given(
    HEADS,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "alibi", "buckets", "rotary"]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 0.7]),
    st.sampled_from([None, 0.9]),
    st.booleans(),
    SIDES,
)
def test_every_path_applies_every_option(
    heads: tuple[int, int], cross: bool, causal: bool, scheme: str, window: int | None,
    softcap: float | None, scale: float | None, normed: bool, side: str,
) -> None:  # fmt: skip
    """Outputs of all paths are equal, for padded rows; one option that a path ignores fails."""
    options: dict[str, Any] = {"softcap": softcap, "scale": scale}
    if cross:
        scheme, window, causal = "none" if scheme == "rotary" else scheme, None, False
    else:
        options["window"] = window
        if normed:
            options |= {"query_norm": nn.RMSNorm(E), "key_norm": nn.RMSNorm(E)}
    module = attention(*heads, cross=cross, scheme=scheme, **options)
    lengths = torch.tensor([T, 2])
    target = Tokens.from_ids(torch.ones(2, T, dtype=torch.long), lengths, side)
    if not cross:
        outs = all_paths(module, random(2, T, D), None, MaskSpec(target, causal=causal))
    else:
        source = Tokens.from_ids(torch.ones(2, S, dtype=torch.long), torch.tensor([3, S]), side)
        spec = MaskSpec(target, source, causal=False)
        outs = all_paths(module, random(2, T, D), random(2, S, D, seed=1), spec)
    real = target.real
    for name, out in outs.items():
        torch.testing.assert_close(
            out[real], outs["fused"][real], **EXACT, msg=lambda text, n=name: f"{n}: {text}"
        )
