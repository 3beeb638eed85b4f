"""Grouped heads are repeated heads, a sliding window is a dense mask, and cheaper than one."""

from typing import Any

import pytest
import torch
from heedful.parts.masks import AttentionMask, MaskRule, padding_mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.parts import attention as attention_module
from heedful.parts.attention import Attention
from heedful.parts.cache import Cache
from heedful.parts.relative import Alibi, RelativeBuckets
from heedful.parts.rotary import Rotary
from option_space import EXACT, pad, random_rows, real
from single_stacks import Single, decoder

SEARCH = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
D, E = 7, 4
SIDES = st.sampled_from(["right", "left"])
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (3, 3)])


def attention(num_heads: int, num_kv_heads: int, *, window: int | None = None) -> Attention:
    torch.manual_seed(0)
    module = Attention(D, num_heads, num_kv_heads=num_kv_heads, head_dim=E, window=window)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def repeated(module: Attention) -> Attention:
    """The same with a key head and a value head of its own for each query head."""
    full = attention(module.num_heads, module.num_heads)
    times = module.num_heads // module.num_kv_heads
    with torch.no_grad():
        for ours, theirs in (
            (module.qkv.weight, full.qkv.weight),
            (module.qkv.bias, full.qkv.bias),
        ):
            query, key, value = ours.split(module.split_sizes)
            # Head by head: the copies of one stand side by side.
            copies = [
                part.unflatten(0, (-1, E)).repeat_interleave(times, 0).flatten(0, 1)
                for part in (key, value)
            ]
            theirs.copy_(torch.cat([query, *copies]))
        full.out.load_state_dict(module.out.state_dict())
    return full


def rule(length: int, keys: int, causal: bool, lengths: list[int] | None, side: str) -> MaskRule:
    """For the last `length` of `keys` tokens, those of rows of these lengths being real."""
    if lengths is None:
        return MaskRule(length, keys, causal=causal)
    tokens = padding_mask(torch.tensor(lengths), keys, side)
    return MaskRule(
        length, keys, causal=causal, real_keys=tokens, real_queries=tokens[:, keys - length :]
    )


def dense(rule: MaskRule, window: int) -> Tensor:
    """(B, 1, T, K) one place at a time: a window has W keys to the left, the query's own counted,
    and W to the right where it looks there."""
    batch = 1 if rule.real_keys is None else rule.real_keys.size(0)
    allowed = torch.zeros(batch, 1, rule.queries, rule.keys, dtype=torch.bool)
    for row in range(batch):
        for query in range(rule.queries):
            place = rule.keys - rule.queries + query
            if rule.real_queries is not None and not rule.real_queries[row, query]:
                continue
            for key in range(rule.keys):
                near = place - window < key <= place if rule.causal else abs(place - key) < window
                real_key = rule.real_keys is None or bool(rule.real_keys[row, key])
                allowed[row, 0, query, key] = near and real_key
    return allowed


# Grouped heads


@SEARCH
@given(HEADS, st.booleans(), st.booleans(), SIDES, st.booleans())
def test_trap_16_grouped_heads_are_repeated_heads(
    heads: tuple[int, int], causal: bool, by_head: bool, side: str, positioned: bool
) -> None:
    """Values and gradients; with masks and scores that differ by head, and rotary positions."""
    module = attention(*heads)
    full = repeated(module)
    x = random(2, 6, D, seed=3)
    mask = AttentionMask(rule(6, 6, causal, [6, 4], side))
    rotation = None
    if by_head:
        mask = mask.plus(Alibi().build(heads[0], E, causal=causal)(6, 6, None, x)[1])
    if positioned:
        rotation = Rotary(100.0).build(heads[0], E, causal=causal)(6, 6, None, x)[0]
    grouped, each = (m(x, mask=mask, rotation=rotation) for m in (module, full))
    torch.testing.assert_close(grouped, each, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(module(x, mask=mask, rotation=rotation), each, **EXACT)
    seen, weights = module.with_weights(x, mask=mask, rotation=rotation)
    torch.testing.assert_close(seen, each, **EXACT)
    theirs = full.with_weights(x, mask=mask, rotation=rotation)[1]
    torch.testing.assert_close(weights, theirs, **EXACT)
    upstream = random(2, 6, D, seed=4)
    for out in (grouped, each):
        out.backward(upstream)
    torch.testing.assert_close(module.out.weight.grad, full.out.weight.grad, **EXACT)
    query, *parts = full.qkv.weight.grad.split(full.split_sizes)
    # A shared head learns from all who share it.
    sums = [part.unflatten(0, (heads[1], -1, E)).sum(1).flatten(0, 1) for part in parts]
    torch.testing.assert_close(module.qkv.weight.grad, torch.cat([query, *sums]), **EXACT)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (2, 1, 5, 5), (1, 6, 1, 5), (2, 1, 1, 5)])
def test_trap_16_masks_of_every_shape_for_grouped_heads(
    shape: tuple[int, int, int, int], grad: bool
) -> None:
    module = attention(6, 2)
    full, x = repeated(module), random(2, 5, D)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(module(x, mask=allowed), full(x, mask=allowed), **EXACT)
        memory = random(2, 5, D, seed=1)
        ours, theirs = (each(x, memory, mask=allowed) for each in (module, full))
        torch.testing.assert_close(ours, theirs, **EXACT)
        torch.testing.assert_close(module(x), full(x), **EXACT)


def test_multi_query_attention_has_one_key_head_and_one_value_head() -> None:
    """Shazeer 2019: the formula of its sec. 2.4, one query head at a time."""
    module = attention(3, 1)
    assert module.qkv.weight.shape == ((3 + 2) * E, D)
    x = random(1, 4, D)
    joint = module.qkv(x)[0]
    queries, key, value = joint[:, : 3 * E], joint[:, 3 * E : 4 * E], joint[:, 4 * E :]
    heads = [
        ((queries[:, h * E : (h + 1) * E] @ key.T) / E**0.5).softmax(-1) @ value for h in range(3)
    ]
    torch.testing.assert_close(module(x)[0], module.out(torch.cat(heads, -1)), **EXACT)


def test_the_cache_keeps_the_shared_heads_only() -> None:
    single = Single(num_heads=4, num_kv_heads=2, windows=(None,))
    net = decoder(single)
    cache = net.start(3, capacity=5)
    assert net.decoder.cache_shape == (1, 2, single.head_dim)
    cache = Cache((1, 2, 4), rows=3, capacity=5, like=torch.zeros(1))
    keys, _ = cache.layer(0).update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    assert keys.shape == (3, 2, 1, 4)


@torch.no_grad()
def test_beams_of_a_source_share_grouped_keys_too() -> None:
    module = attention(4, 2)
    memory, x = random(2, 5, D), random(6, 3, D, seed=1)
    mask = padding_mask(torch.tensor([5, 2]), 5)[:, None, None, :]
    keys, values = module.project_memory(memory)
    assert keys.shape == values.shape == (2, 2, 5, E)
    expected = module(x, memory.repeat_interleave(3, 0), mask=mask.repeat_interleave(3, 0))
    torch.testing.assert_close(module.attend_to(x, keys, values, mask=mask), expected, **EXACT)


def test_key_heads_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_kv_heads 3"):
        Attention(8, 4, num_kv_heads=3)


# Windows


def test_trap_18_a_window_has_w_keys_the_query_s_own_counted() -> None:
    def table(mask: MaskRule) -> list[str]:
        found = AttentionMask(mask).allowed
        return ["".join("x" if each else "." for each in row) for row in found[0, 0]]

    causal = table(MaskRule(5, 5, causal=True, window=3))
    assert causal == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]
    assert table(MaskRule(4, 4, causal=True, window=1)) == ["x...", ".x..", "..x.", "...x"]
    assert table(MaskRule(4, 4, window=2)) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert table(MaskRule(4, 4, window=1)) == ["x...", ".x..", "..x.", "...x"]
    # Bottom-right aligned in a cache.
    assert table(MaskRule(2, 5, causal=True, window=3)) == [".xxx.", "..xxx"]
    assert AttentionMask(MaskRule(3, 3, window=9)).allowed is None


@SEARCH
@given(
    st.integers(1, 8),
    st.integers(0, 5),
    st.booleans(),
    st.integers(1, 10),
    st.none() | st.lists(st.integers(0, 8), min_size=2, max_size=2),
    SIDES,
    st.data(),
)
def test_every_part_of_a_rule_s_table_is_that_part_of_the_dense_one(
    queries: int,
    before: int,
    causal: bool,
    window: int,
    lengths: list[int] | None,
    side: str,
    data: st.DataObject,
) -> None:
    keys = queries + before
    mask = AttentionMask(rule(queries, keys, causal, lengths, side)).within(window)
    expected = dense(mask.rule, window)
    first = data.draw(st.integers(0, queries - 1), "first")
    rows = range(first, data.draw(st.integers(first + 1, queries), "stop"))
    reach = mask.rule.reach(rows)
    assert not expected[:, :, rows.start : rows.stop, : reach.start].any()
    assert not expected[:, :, rows.start : rows.stop, reach.stop :].any()
    assert len(reach) <= len(rows) + (window - 1) * (1 if causal else 2)
    for columns in (reach, range(keys)):
        part = expected[:, :, rows.start : rows.stop, columns.start : columns.stop]
        bias = mask.part_bias(rows, columns, torch.float64)
        found = torch.ones_like(part) if bias is None else (bias == 0).expand_as(part)
        assert torch.equal(found, part)
    if mask.rows is not None:
        assert torch.equal(mask.rows.expand(*expected.shape[:3], 1), expected.any(-1, keepdim=True))


@SEARCH
@given(
    HEADS,
    st.integers(1, 10),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 5),
    st.none() | st.lists(st.integers(0, 10), min_size=2, max_size=2),
    SIDES,
    st.booleans(),
)
def test_a_windowed_layer_is_a_dense_mask(
    heads: tuple[int, int],
    length: int,
    causal: bool,
    window: int,
    size: int,
    lengths: list[int] | None,
    side: str,
    scored: bool,
) -> None:
    """Values of both paths, weights and gradients; taken in parts of `size` queries or of W."""
    windowed, full = attention(*heads, window=window), attention(*heads)
    whole = rule(length, length, causal, lengths and [min(n, length) for n in lengths], side)
    table, mask = AttentionMask(dense(whole, window)), AttentionMask(whole)
    x = random(2, length, D)
    if scored:
        scores = Alibi().build(heads[0], E, causal=causal)(length, length, None, x)[1]
        table, mask = table.plus(scores), mask.plus(scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_LOCAL_QUERIES", size)
        eager = windowed(x, mask=mask)
        with torch.no_grad():
            fused = windowed(x, mask=mask)
    expected = full(x, mask=table)
    torch.testing.assert_close(eager, expected, **EXACT)
    torch.testing.assert_close(fused, expected, **EXACT)
    ours, theirs = windowed.with_weights(x, mask=mask), full.with_weights(x, mask=table)
    for found, dense_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, dense_one, **EXACT)
    upstream = random(2, length, D, seed=9)
    for out in (eager, expected):
        out.backward(upstream)
    for left, right in zip(windowed.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, **EXACT)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 129, 1000])
def test_long_texts_are_taken_in_several_parts_that_fit_together(
    window: int, causal: bool, grad: bool
) -> None:
    """At the size that parts really have, the last one shorter than the others."""
    length = 300
    windowed, full = attention(2, 1, window=window), attention(2, 1)
    whole = rule(length, length, causal, [300, 170], "left")
    places = torch.arange(length)
    near = (places[:, None] - places).abs() < window
    table = AttentionMask(whole).allowed & near
    x = random(2, length, D)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(
            windowed(x, mask=AttentionMask(whole)), full(x, mask=table), **EXACT
        )


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "buckets"])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
@torch.no_grad()
def test_a_window_in_a_cache_that_begins_with_padding(window: int, scheme: str) -> None:
    """Steps longer and shorter than the window, at either side of its first slide."""
    net = decoder(Single(scheme, windows=(window, window)))
    rows = random_rows([20, 9, 1], 0)
    ids, starts = pad(rows, "left"), torch.tensor([0, 11, 19])
    for chunks in ([1] * 20, [4, 1, 9, 6], [20]):
        cache = net.start(3, capacity=20, starts=starts)
        logits = torch.cat([net.step(part, cache) for part in ids.split(chunks, 1)], 1)
        for out, row in zip(logits, rows, strict=True):
            alone = net(row[None])[0]
            torch.testing.assert_close(out[real(row.numel(), 20, "left")], alone, **EXACT)


def test_a_window_without_a_rule_is_refused() -> None:
    """A table cannot be cut into parts unseen."""
    module = attention(1, 1, window=2)
    for mask in (None, torch.ones(1, 1, 4, 4, dtype=torch.bool)):
        with pytest.raises(AssertionError, match=r"rule"):
            module(random(1, 4, D), mask=mask)


# Memory


class _Written(TorchDispatchMode):
    """The most elements of any tensor that an operation gave, and of all that it wrote."""

    elements = total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
                self.total += 0 if leaf._is_view() else leaf.numel()
        return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_no_tensor_of_a_windowed_layer_grows_with_the_square_of_the_text(
    causal: bool, padded: bool
) -> None:
    """Forward and backward at 2,048 tokens: no more than heads · T · 2W or what the layer reads."""
    length, window, heads = 2048, 128, 2
    tokens = [1500] if padded else None
    largest = {}
    for name, size in (("windowed", window), ("full", None)):
        module = attention(heads, 1, window=size).float()
        x = torch.randn(1, length, D)
        mode = largest[name] = _Written()
        with mode:
            mask = AttentionMask(rule(length, length, causal, tokens, "right"))
            module(x, mask=mask).sum().backward()
    assert largest["full"].elements >= heads * length**2
    joined = length * (heads + 2) * E
    assert largest["windowed"].elements <= max(heads * length * 2 * window, joined)
    assert 4 * largest["windowed"].elements < length**2


@pytest.mark.parametrize("scheme", [None, Alibi(), RelativeBuckets(8, 60)])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_a_windowed_layer_writes_grows_with_the_text_alone(
    groups: int, scheme: Alibi | RelativeBuckets | None
) -> None:
    """Forward and backward: twice the text is twice the numbers, not four times."""
    totals = []
    for length in (1024, 2048, 4096):
        module = attention(2, groups, window=128).float()
        x = torch.randn(1, length, D)
        with _Written() as mode:
            mask = AttentionMask(rule(length, length, True, None, "right"))
            if scheme is not None:
                positions = scheme.build(2, E, causal=True)
                for table in positions.parameters():
                    nn.init.zeros_(table)
                mask = mask.plus(positions(length, length, None, x)[1])
            module(x, mask=mask).sum().backward()
        totals.append(mode.total)
    assert totals[2] - totals[1] == pytest.approx(2 * (totals[1] - totals[0]), rel=0.01)
