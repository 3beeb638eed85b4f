"""Scaled dot-product attention and the one multi-head module for self- and cross-attention."""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout
from heedful.parts.masks import AttentionMask


@runtime_checkable
class KeyValueCache(Protocol):
    """Where one layer of one decoding keeps its keys and values (see `parts/cache.py`)."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    mask: AttentionMask | None,
    dropout: nn.Module | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(QKᵀ/√E) V and the weights themselves (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 whatever the products run in. The weights are returned before
    dropout. A query that has nothing to attend to gets equal weights here, so that nothing is
    NaN: `Attention` turns what comes of them into zeros.
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.float().softmax(-1)
    else:
        weights = (scores + mask.bias(torch.float32)).softmax(-1)
    weights = weights.to(value.dtype)
    out = (weights if dropout is None else dropout(weights)) @ value
    return out, weights


def attend_fused(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    mask: AttentionMask | None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """The same by PyTorch's fused kernels, which never form the weights."""
    bias = None if mask is None else mask.bias(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, sec. 3.2.2), for self- and cross-attention.

    One matrix holds the three input projections, (3·D, D) in the order query, key, value, so that
    self-attention is a single product. Where `memory` is given, queries come from `x` and keys and
    values from `memory`.

    Args:
        d_model: width D of what comes in and goes out.
        num_heads: heads H; must divide D. A head is E = D / H wide.
        dropout: on the attention weights, in training only.
        bias: whether the query, key and value projections have a bias.
        out_bias: whether the output projection has one.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What each query gathers; zeros for a query that may attend to nothing.

        Args:
            mask: bool, True = may attend, broadcastable to (B, H, T, K).
            cache: for self-attention while decoding: the keys and values of `x` are added to it and
                attention runs over all that it holds.
        """
        mask = AttentionMask.of(mask)
        query, key, value = self.project(x, memory)
        if cache is not None:
            key, value = cache.update(key, value)
        if self._forms_weights(query):
            heads, _ = attend(query, key, value, mask, self.dropout)
        else:
            dropout = self.dropout.p if self.training else 0.0
            heads = attend_fused(query, key, value, mask, dropout)
        return self._merge(heads, mask)

    def with_weights(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H T K"]]:
        """What `forward` gives, and the attention weights: for looking inside."""
        mask = AttentionMask.of(mask)
        heads, weights = attend(*self.project(x, memory), mask, self.dropout)
        return self._merge(heads, mask), weights if mask is None else weights * mask.rows

    def attend_to(
        self,
        x: Float[Tensor, "N T D"],
        keys: Float[Tensor, "B H S E"],
        values: Float[Tensor, "B H S E"],
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
        weight, bias = self.qkv.weight[:width], self.qkv.bias
        query = self._split(F.linear(x, weight, None if bias is None else bias[:width]))
        heads = attend_fused(query, keys, values, mask)
        return self._merge(heads, mask).reshape(rows, length, width)

    def project_memory(
        self, memory: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B H S E"], Float[Tensor, "B H S E"]]:
        """Keys and values of a source, computed once for a whole decoding."""
        width, bias = memory.size(-1), self.qkv.bias
        both = F.linear(memory, self.qkv.weight[width:], None if bias is None else bias[width:])
        key, value = both.split(width, dim=-1)
        return self._split(key), self._split(value)

    def project(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"] | None = None
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H S E"], Float[Tensor, "B H S E"]]:
        """Queries of `x`, keys and values of `memory` (or of `x` itself), split into heads."""
        width = x.size(-1)
        if memory is None:
            query, key, value = self.qkv(x).split(width, dim=-1)
            return self._split(query), self._split(key), self._split(value)
        weight, bias = self.qkv.weight, self.qkv.bias
        query = F.linear(x, weight[:width], None if bias is None else bias[:width])
        return self._split(query), *self.project_memory(memory)

    def _split(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T E"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _merge(
        self, heads: Float[Tensor, "B H T E"], mask: AttentionMask | None
    ) -> Float[Tensor, "B T D"]:
        if mask is not None and mask.rows.size(1) > 1:  # a mask that differs by head
            heads = heads * mask.rows
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        # After the projection, whose bias would otherwise reach queries that attend to nothing.
        return out if mask is None else out * mask.rows.any(1)

    def _forms_weights(self, query: Tensor) -> bool:
        """Whether to run plain products: on a CPU when training.

        There the fused kernel's backward pass is slow in 16 bits, and has no kernel of its own with
        dropout; in fp32 without dropout it is faster but less exact (docs/log.md).
        """
        return query.device.type == "cpu" and query.requires_grad and torch.is_grad_enabled()
