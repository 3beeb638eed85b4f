"""Scaled dot-product attention and the one multi-head module for self- and cross-attention."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout
from heedful.parts.masks import AttentionMask
from heedful.parts.rotary import Rotation, rotate

_BiasOf = Callable[[torch.dtype], Tensor | None]  # what is added to the scores, in a given type
# Queries that a sliding-window layer takes at a time, at least: fewer and the loop is what costs.
_LOCAL_QUERIES = 128


@runtime_checkable
class KeyValueCache(Protocol):
    """Where one layer of one decoding keeps its keys and values (see `parts/cache.py`)."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None,
    dropout: nn.Module | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(scale · QKᵀ + bias) V and the weights themselves (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 whatever the products run in. The weights are returned before
    dropout. A query that has nothing to attend to gets equal weights here, so that nothing is
    NaN: `Attention` turns what comes of them into zeros.

    Args:
        bias: of an `AttentionMask`, in fp32 at least.
        scale: default 1 / √E.
    """
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if bias is None:
        weights = scores.float() if scores.dtype.itemsize < 4 else scores
        weights = weights.softmax(-1)
    else:
        weights = (scores + bias).softmax(-1)
    weights = weights.to(value.dtype)
    out = (weights if dropout is None else dropout(weights)) @ value
    return out, weights


def attend_fused(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None,
    dropout: float = 0.0,
    scale: float | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """The same by PyTorch's fused kernels, which never form the weights; `bias` in their type."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
    )


class Attention(nn.Module):
    """Multi-head attention, for self- and cross-attention, over all keys or a sliding window.

    One matrix holds the three input projections, ((H + 2G)·E, D) in the order query, key, value, so
    that self-attention is a single product. Where `memory` is given, queries come from `x` and keys
    and values from `memory`. Sources: Vaswani et al. 2017, sec. 3.2.2; Shazeer 2019 (G = 1);
    Ainslie et al. 2023 (G between 1 and H); Beltagy et al. 2020 (windows).

    Args:
        d_model: width D of what comes in and goes out.
        num_heads: heads H.
        num_kv_heads: heads G of keys and values, each shared by H / G adjacent query heads;
            default: H.
        head_dim: width E of a head; default: D / H, which must then be whole.
        scale: of the scores; default: 1 / √E.
        window: keys that a query of a causal layer sees, its own counted; default: all.
        dropout: on the attention weights, in training only.
        bias: whether the query, key and value projections have a bias.
        out_bias: whether the output projection has one.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
        if num_heads % groups:
            raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {groups}")
        self.num_heads, self.num_kv_heads = num_heads, groups
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale, self.window = scale, window
        width = num_heads * self.head_dim
        self.qkv = nn.Linear(d_model, sum(self.split_sizes), bias=bias)
        self.out = nn.Linear(width, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Rows of the joint matrix that are the query's, the key's and the value's."""
        of_keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, of_keys, of_keys

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
        rotation: Rotation | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What each query gathers; zeros for a query that may attend to nothing.

        Args:
            mask: bool, True = may attend, broadcastable to (B, H, T, K).
            rotation: of queries and keys, for rotary positions.
            cache: for self-attention while decoding: the keys and values of `x` are added to it and
                attention runs over all that it holds.
        """
        mask = AttentionMask.of(mask)
        query, key, value = self.project(x, memory, rotation)
        if cache is not None:
            key, value = cache.update(key, value)
        return self._merge(self._gather(query, key, value, mask), mask)

    def with_weights(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H T K"]]:
        """What `forward` gives, and the attention weights: for looking inside."""
        mask = AttentionMask.of(mask)
        query, key, value = self.project(x, memory, rotation)
        if self.window is not None:
            assert mask is not None, "a sliding window is said by a mask rule"
            mask = mask.within(self.window)
        key, value = (
            t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (key, value)
        )
        bias = None if mask is None else mask.bias(_at_least_fp32(query))
        heads, weights = attend(query, key, value, bias, self.dropout, self.scale)
        if mask is not None and mask.rows is not None:
            weights = weights * mask.rows
        return self._merge(heads, mask), weights

    def attend_to(
        self,
        x: Float[Tensor, "N T D"],
        keys: Float[Tensor, "B G S E"],
        values: Float[Tensor, "B G S E"],
        *,
        mask: AttentionMask | Tensor | None = None,
    ) -> Float[Tensor, "N T D"]:
        """Cross-attention over keys and values that were projected before (`project_memory`).

        N may be a multiple of B: the N / B beams of a source stand side by side in `x`, and are
        given to the product as further queries of that source, so that its keys and values are
        never copied. `mask` is (B, 1, 1, S): what of the source may be looked at.
        """
        mask = AttentionMask.of(mask)
        rows, length, width = x.shape
        x = x.reshape(keys.size(0), -1, width)
        heads = self._gather(self._project_query(x), keys, values, mask)
        return self._merge(heads, mask).reshape(rows, length, width)

    def project_memory(
        self, memory: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B G S E"], Float[Tensor, "B G S E"]]:
        """Keys and values of a source, computed once for a whole decoding."""
        start, bias = self.split_sizes[0], self.qkv.bias
        both = F.linear(memory, self.qkv.weight[start:], None if bias is None else bias[start:])
        key, value = self._split(both).chunk(2, dim=1)
        return key, value

    def project(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B G S E"], Float[Tensor, "B G S E"]]:
        """Queries of `x`, keys and values of `memory` (or of `x` itself), split into heads."""
        if memory is not None:
            assert rotation is None, "a source has no place on the target's line"
            return self._project_query(x), *self.project_memory(memory)
        heads, groups = self.num_heads, self.num_kv_heads
        turned, value = self._split(self.qkv(x)).split([heads + groups, groups], dim=1)
        if rotation is not None:
            turned = rotate(turned, rotation)
        query, key = turned.split([heads, groups], dim=1)
        return query, key, value

    def _project_query(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T E"]:
        stop, bias = self.split_sizes[0], self.qkv.bias
        return self._split(
            F.linear(x, self.qkv.weight[:stop], None if bias is None else bias[:stop])
        )

    def _gather(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B G K E"],
        value: Float[Tensor, "B G K E"],
        mask: AttentionMask | None,
    ) -> Float[Tensor, "B H T E"]:
        """Attention over all keys, or window by window."""
        if self.window is None:
            return self._gather_all(query, key, value, mask)
        assert mask is not None, "a sliding window is said by a mask rule"
        mask = mask.within(self.window)
        assert mask.rule is not None
        size = max(self.window, _LOCAL_QUERIES)
        if query.size(2) <= size:
            rows = range(query.size(2))
            seen = mask.rule.reach(rows)
            key, value = (t[:, :, seen.start : seen.stop] for t in (key, value))
            return self._attend(query, key, value, _part_of(mask, rows, seen))
        keys, values = key.split(size, dim=2), value.split(size, dim=2)
        gathered = []
        for index, part in enumerate(query.split(size, dim=2)):
            rows = range(index * size, index * size + part.size(2))
            seen = mask.rule.reach(rows)
            key, value = _join(keys, seen), _join(values, seen)
            gathered.append(self._attend(part, key, value, _part_of(mask, rows, seen)))
        return torch.cat(gathered, dim=2)

    def _gather_all(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask | None
    ) -> Tensor:
        if mask is None:
            return self._attend(query, key, value, lambda dtype: None)
        if mask.is_causal_alone and not self._forms_weights(query):
            repeats = self.num_heads // self.num_kv_heads
            key, value = (
                t if repeats == 1 else t.repeat_interleave(repeats, dim=1) for t in (key, value)
            )
            dropout = self.dropout.p if self.training else 0.0
            return attend_fused(query, key, value, None, dropout, self.scale, causal=True)
        return self._attend(query, key, value, mask.bias)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias_of: _BiasOf) -> Tensor:
        """Both paths; query heads that share a key head are further queries of that head."""
        length, repeats = query.size(2), self.num_heads // self.num_kv_heads
        forms_weights = self._forms_weights(query)
        bias = bias_of(_at_least_fp32(query) if forms_weights else query.dtype)
        if repeats > 1:
            query = query.unflatten(1, (-1, repeats)).flatten(2, 3)
            bias = _for_groups(bias, repeats, length)
        if forms_weights:
            heads, _ = attend(query, key, value, bias, self.dropout, self.scale)
        else:
            dropout = self.dropout.p if self.training else 0.0
            heads = attend_fused(query, key, value, bias, dropout, self.scale)
        return heads if repeats == 1 else heads.unflatten(2, (repeats, length)).flatten(1, 2)

    def _split(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B H T E"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _merge(
        self, heads: Float[Tensor, "B H T E"], mask: AttentionMask | None
    ) -> Float[Tensor, "B T D"]:
        rows = None if mask is None else mask.rows
        if rows is not None and rows.size(1) > 1:  # a mask that differs by head
            heads = heads * rows
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        # After the projection, whose bias would otherwise reach queries that attend to nothing.
        return out if rows is None else out * rows.any(1)

    def _forms_weights(self, query: Tensor) -> bool:
        """Whether to run plain products: on a CPU when training.

        There the fused kernel's backward pass is slow in 16 bits, and has no kernel of its own with
        dropout; in fp32 without dropout it is faster but less exact (docs/log.md).
        """
        return query.device.type == "cpu" and query.requires_grad and torch.is_grad_enabled()


def _at_least_fp32(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _join(pieces: Sequence[Tensor], places: range) -> Tensor:
    """Some places of a (B, G, K, E) tensor that was split into pieces of one size.

    Cut from the pieces that hold them: the gradient of a slice is as large as what it was cut from,
    and one of the whole for every block of queries would make the backward pass quadratic.
    """
    size = pieces[0].size(2)
    found = [
        pieces[index][:, :, max(places.start - index * size, 0) : places.stop - index * size]
        for index in range(places.start // size, -(-places.stop // size))
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _part_of(mask: AttentionMask, rows: range, columns: range) -> _BiasOf:
    return lambda dtype: mask.part_bias(rows, columns, dtype)


def _for_groups(bias: Tensor | None, repeats: int, length: int) -> Tensor | None:
    """A bias (#B, #H, #T, K) for (B, G, H/G · T, K) scores."""
    if bias is None or (bias.size(1) == 1 and bias.size(2) == 1):
        return bias
    bias = bias.expand(-1, -1, length, -1)
    if bias.size(1) == 1:
        return bias.repeat(1, 1, repeats, 1)
    return bias.unflatten(1, (-1, repeats)).flatten(2, 3)
