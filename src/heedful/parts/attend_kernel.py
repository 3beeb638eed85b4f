"""Attention of real tokens as one row, as `Stack.skips_padding` passes them to the blocks.

Short texts are computed by a kernel (`kernels/attention.py`), other ones padded again.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.kernels import attention as kernel
from heedful.kernels import library as kernels
from heedful.parts.attend_options import Attend, AttentionOptions, query_type
from heedful.parts.residual import Dropout, keep_mask
from heedful.parts.tokens import MaskSpec
from heedful.parts.unpadding import Unpadding

_KERNEL_WEIGHTS = 64 * 64  # of a head: with more, products in the type of the states are faster


def choose_kernel(
    mask: MaskSpec, options: AttentionOptions, unpaddings: tuple[Unpadding, Unpadding], x: Tensor
) -> "Kernel | None":
    """The kernel if it runs, and is faster than plain products: its products are in float32.

    Args:
        unpaddings: of queries and of keys.
        x: states of the pass.
    """
    queries, keys = unpaddings
    scheme, window, repeats = options.position_scores, options.window, options.repeats
    can_run = (
        repeats * queries.shape[1] * keys.shape[1] <= _KERNEL_WEIGHTS
        and options.softcap is None
        and (scheme is None or not any(p.requires_grad for p in scheme.parameters()))
        and query_type(x) in kernels.ELEMENT_TYPES
        and kernels.can_run(x.new_empty(0))
        and queries.texts is not None
        and keys.texts is not None
    )
    if not can_run:
        return None
    bias = None
    if scheme is not None or window is not None or not mask.hides_padding_alone:
        bias = mask.bias(torch.float32, scheme=scheme, window=window, repeats=repeats)
    return Kernel(queries, keys, bias, options.scale, repeats)


@dataclass(frozen=True)
class Kernel:
    """softmax(scale · QKᵀ + bias) V within each text.

    Args:
        queries, keys: whose real tokens the states are; in self-attention the same.
        bias: of `MaskSpec.bias` without a gradient; None: only padding is hidden.
        repeats: query heads per key head.
    """

    queries: Unpadding
    keys: Unpadding
    bias: Float[Tensor, "#B #G #rT K"] | None
    scale: float | None
    repeats: int

    def __call__(
        self,
        query: Float[Tensor, "1 H N E"],
        key: Float[Tensor, "1 G S E"],
        value: Float[Tensor, "1 G S E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "1 H N E"], None]:
        texts, other = self.queries.texts, self.keys.texts
        assert texts is not None
        assert other is not None
        keep, keep_scale = None, 1.0
        if dropout.training and dropout.p > 0:
            (batch, width), groups = self.queries.shape, key.size(1)
            shape = (batch, groups, self.repeats * width, self.keys.shape[1])
            keep, keep_scale = keep_mask(torch.Size(shape), dropout.p)
        scale = 1 / math.sqrt(query.size(-1)) if self.scale is None else self.scale
        # Norms of queries and keys return fp32 under autocast.
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        options = kernel.Options(texts, other, self.bias, scale)
        heads = kernel.attention(q, k, v, options, keep, keep_scale)
        return heads.transpose(0, 1)[None], None


@dataclass(frozen=True)
class Unpadded:
    """Attention of padded states for states of real tokens only."""

    attend: Attend
    queries: Unpadding
    keys: Unpadding

    def __call__(
        self,
        query: Float[Tensor, "1 H N E"],
        key: Float[Tensor, "1 G S E"],
        value: Float[Tensor, "1 G S E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "1 H N E"], None]:
        sides = (self.queries, query), (self.keys, key), (self.keys, value)
        q, k, v = (side.pad(x.transpose(1, 2)).transpose(1, 2) for side, x in sides)
        heads, _ = self.attend(q, k, v, dropout=dropout)
        return self.queries.unpad(heads.transpose(1, 2)).transpose(1, 2), None
