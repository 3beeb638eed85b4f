"""FlexAttention over packed rows on GPUs: blocks without a visible key are not computed.

Used in compiled training only (`training.compile`).
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.parts.attend_options import AttentionOptions
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Queries and keys of a block; shorter rows have one block, so that nothing can be left out.
_BLOCK_SIZE = 128


def can_use_flex(spec: MaskSpec, options: AttentionOptions, device: torch.device) -> bool:
    """True in compiled training with packed rows, for attention that FlexAttention can compute.

    It has no dropout, and its kernel is compiled for one shape: evaluation, with batches of many
    shapes, does not use it.
    """
    is_plain = options.position_scores is None and not options.drops
    is_preferred = options.preferred_kernel == "flex"
    return is_preferred and is_plain and can_skip_blocks(spec, device)


def can_skip_blocks(spec: MaskSpec, device: torch.device) -> bool:
    """True for the mask of packed rows of several blocks, on a GPU that Triton compiles for."""
    if device.type != "cuda" or spec.queries.segments is None or spec.allowed is not None:
        return False
    if not spec.is_self_attention or spec.queries.positions.size(1) <= _BLOCK_SIZE:
        return False
    from torch.utils._triton import has_triton

    return has_triton()


@dataclass(frozen=True)
class Flex:
    """softmax(scale · QKᵀ) V over the visible keys of each query (Dong et al. 2024).

    Args:
        block_mask: `packed_block_mask` of the packed rows.
    """

    block_mask: "BlockMask"
    scale: float | None

    def __call__(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B G T E"],
        value: Float[Tensor, "B G T E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "B H T E"], None]:
        from torch.nn.attention.flex_attention import flex_attention

        is_compiled = query.is_cuda and not torch.compiler.is_compiling()
        run: Any = _compiled() if is_compiled else flex_attention
        # Autocast does not cast the arguments of this kernel, and norms of queries and keys return
        # fp32 under autocast.
        query, key = query.to(value.dtype), key.to(value.dtype)
        has_groups = query.size(1) != key.size(1)
        heads: Tensor = run(
            *(query, key, value),
            block_mask=self.block_mask,
            scale=self.scale,
            enable_gqa=has_groups,
        )
        return heads, None


def packed_block_mask(spec: MaskSpec, window: int | None) -> "BlockMask":
    """The `visible_keys` of packed rows as a block mask.

    Padding sees the padding of its row, so that no query is without a key; its output is multiplied
    by zero, as that of every query without a visible key (`MaskSpec`). Within a text
    positions are consecutive, so that distances are those of columns.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    segments = spec.queries.segments
    assert segments is not None
    real = torch.ones_like(segments) if spec.queries.real is None else spec.queries.real
    rows, width = segments.shape
    after = width if window is None else window
    before = 0 if spec.causal else 1 - after
    return create_block_mask(
        lambda row, head, query, key: (
            (before <= query - key)
            & (query - key < after)
            & (segments[row, query] == segments[row, key])
            & (real[row, query] == real[row, key])
        ),
        *(rows, None, width, width),
        device=segments.device,
        _compile=segments.is_cuda,  # then the whole (B, T, T) mask is not formed
    )


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
