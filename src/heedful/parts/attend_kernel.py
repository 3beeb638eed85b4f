"""Attention of short texts in a training step on a CPU, by a kernel (`kernels/attention.py`).

It takes the real tokens as one row, as `Stack.skips_padding` passes them to the blocks.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.kernels import attention as kernel
from heedful.kernels import library as kernels
from heedful.parts.attend_products import AttentionOptions
from heedful.parts.residual import Dropout, keep_mask
from heedful.parts.unpadding import Unpadding

_KERNEL_WEIGHTS = 64 * 64  # of a head: with more, products in the type of the states are faster


def can_use_kernel(
    options: AttentionOptions, queries: Unpadding, keys: Unpadding, x: Tensor, dtype: torch.dtype
) -> bool:
    """True where the kernel runs, and is faster than plain products: its products are in float32.

    Args:
        x: states of the pass.
        dtype: of queries, keys and values.
    """
    size = options.repeats * queries.shape[1] * keys.shape[1]
    scores = options.position_scores
    return (
        size <= _KERNEL_WEIGHTS
        and options.softcap is None
        and (scores is None or not any(p.requires_grad for p in scores.parameters()))
        and dtype in kernels.ELEMENT_TYPES
        and kernels.can_run(x.new_empty(0))
        and queries.texts is not None
        and keys.texts is not None
    )


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
