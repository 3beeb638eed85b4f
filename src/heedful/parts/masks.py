"""Masks: who may attend to whom, in one convention.

A mask is bool, `True` = may attend, broadcastable to (B, H, T, K). Padding is told by lengths,
never by comparing ids, so that the padding id may equal any other. Causality is a property of the
call, right also when there are fewer queries than keys (a cache).
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PaddingSide = Literal["right", "left"]


def padding_mask(
    lengths: Int[Tensor, "B"], size: int, side: PaddingSide = "right"
) -> Bool[Tensor, "B {size}"]:
    """True at the real positions of rows that were padded to `size`."""
    positions = torch.arange(size, device=lengths.device)
    if side == "left":
        positions = positions.flip(0)
    return positions < lengths[:, None]


def causal_mask(
    queries: int, keys: int, device: torch.device | None = None
) -> Bool[Tensor, "{queries} {keys}"]:
    """True where key <= query, the last query standing at the last key (bottom-right aligned)."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=keys - queries)


def combine(*masks: Bool[Tensor, "..."] | None) -> Bool[Tensor, "..."] | None:
    """What all of the masks allow; `None` allows everything."""
    combined: Tensor | None = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined


def token_positions(
    lengths: Int[Tensor, "B"] | None, size: int, side: PaddingSide
) -> Int[Tensor, "B {size}"] | None:
    """Position of every token in its own row, so that left padding moves none of them.

    `None` where the positions are simply 0, 1, 2, … in every row (right padding, or no padding).
    Left pads get 0: their states are never looked at, but tables must not be indexed below zero.
    """
    if lengths is None or side == "right":
        return None
    shift = (size - lengths)[:, None]
    return (torch.arange(size, device=lengths.device) - shift).clamp(min=0)


class AttentionMask:
    """A mask made ready once a forward pass and shared by all layers.

    `allowed` is the bool mask, four-dimensional. From it come `bias`, what is added to the scores,
    and `rows`, which queries have anything to attend to. A query that has nothing gets zeros and
    gives zero gradients: its softmax runs over equal finite numbers (no NaN forward or backward)
    and its result is multiplied by zero.
    """

    def __init__(self, allowed: Bool[Tensor, "..."]) -> None:
        if allowed.dtype != torch.bool:
            raise TypeError(
                f"a mask must be bool with True = may attend, not {allowed.dtype}; "
                "an additive mask `m` becomes one by `m == 0`"
            )
        if allowed.dim() != 4:
            raise ValueError(
                f"a mask must have 4 dimensions (batch, heads, queries, keys), not {allowed.dim()}"
            )
        self.allowed = allowed
        self._bias: dict[torch.dtype, Tensor] = {}
        self._rows: Tensor | None = None

    @classmethod
    def of(cls, mask: "AttentionMask | Bool[Tensor, '...'] | None") -> "AttentionMask | None":
        """The mask itself, or a bool tensor made ready."""
        return mask if mask is None or isinstance(mask, AttentionMask) else cls(mask)

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "#B #H #T K"]:
        """Zero where allowed, else a number whose softmax is exactly zero beside any real score.

        Half of the type's lowest number: the whole of it overflows to -inf in fp16 once a negative
        score is added, and a row of -inf is NaN.
        """
        if dtype not in self._bias:
            blocked = torch.finfo(dtype).min / 2
            zeros = torch.zeros(self.allowed.shape, dtype=dtype, device=self.allowed.device)
            self._bias[dtype] = zeros.masked_fill_(~self.allowed, blocked)
        return self._bias[dtype]

    @property
    def rows(self) -> Bool[Tensor, "#B #H #T 1"]:
        """True for queries that have at least one key to attend to."""
        if self._rows is None:
            self._rows = self.allowed.any(-1, keepdim=True)
        return self._rows
