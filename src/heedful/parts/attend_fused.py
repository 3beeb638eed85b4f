"""Attention by torch's fused kernels, which never form the weights: the default."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

from heedful.parts.attend_blocks import join_blocks
from heedful.parts.attend_flex import Flex, can_use_flex, packed_block_mask
from heedful.parts.attend_options import (
    Attend,
    AttentionOptions,
    fold_queries,
    query_type,
    unfold_heads,
)
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec

# Up to this number of keys the kernel of xFormers takes half to two thirds of the time of those of
# cuDNN and FlashAttention, of which torch prefers one (measured on an H200).
_SHORT = 64


def choose_fused(
    mask: MaskSpec,
    options: AttentionOptions,
    parts: Sequence[tuple[range, range] | None],
    x: Tensor,
    *,
    needs_grad: bool,
) -> Attend:
    """The kernel's causal mask if it is enough, FlexAttention, or a bias.

    Args:
        parts: `diagonal_blocks`.
        x: states of the pass.
    """
    scheme, window, repeats = options.position_scores, options.window, options.repeats
    if mask.is_causal_alone and scheme is None and window is None:
        return Fused(None, True, options.scale, repeats)
    if needs_grad and can_use_flex(mask, options, x.device):
        return Flex(packed_block_mask(mask, window), options.scale)
    computations = []
    for part in parts:
        bias = mask.bias(query_type(x), scheme=scheme, window=window, repeats=repeats, part=part)
        computations.append(Fused(bias, False, options.scale, repeats))
    return join_blocks(parts, computations)


@dataclass(frozen=True)
class Fused:
    """`torch.nn.functional.scaled_dot_product_attention`.

    Query heads that share a key head are computed as more queries of that head. With the causal
    mask of the kernel that is not possible: there each query head has a copy of its key head.

    Args:
        bias: of `MaskSpec.bias`, for the queries of a key head side by side.
        is_causal: the causal mask of the kernel is enough (`MaskSpec.is_causal_alone`); no bias.
        repeats: query heads per key head.
    """

    bias: Float[Tensor, "#B #G #rT K"] | None
    is_causal: bool
    scale: float | None
    repeats: int

    def __call__(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B G K E"],
        value: Float[Tensor, "B G K E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "B H T E"], None]:
        is_folded = self.repeats > 1 and not self.is_causal
        if is_folded:
            query = fold_queries(query, self.repeats)
        elif self.repeats > 1:
            key, value = (x.repeat_interleave(self.repeats, dim=1) for x in (key, value))
        p = dropout.p if dropout.training else 0.0
        with fused_kernels(key):
            heads = F.scaled_dot_product_attention(
                *(query, key, value, self.bias, p, self.is_causal), scale=self.scale
            )
        return unfold_heads(heads, self.repeats) if is_folded else heads, None


def fused_kernels(key: Float[Tensor, "B G K E"]) -> AbstractContextManager[None]:
    """A context for an attention with these keys, which selects a kernel for short sequences.

    Outside of compiled steps the choice of a user (`torch.nn.attention.sdpa_kernel`) stays.
    """
    if key.device.type != "cuda" or key.size(2) > _SHORT:
        return nullcontext()
    if not torch.compiler.is_compiling() and not _are_all_enabled():
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _are_all_enabled() -> bool:
    """Torch may use any of its kernels, as by default."""
    return (
        cuda.cudnn_sdp_enabled()
        and cuda.flash_sdp_enabled()
        and cuda.mem_efficient_sdp_enabled()
        and cuda.math_sdp_enabled()
    )
