"""Chooses the computation of attention in a pass, and makes its mask and rotation.

All computations have one signature and are equal but for the order of sums: `attend_products.py`
has the formula, `attend_fused.py` the default. A plan is made before the first block of a stack
runs, so that equal layers share its tensors, and no layer computes them again where its activations
are checkpointed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.parts.attend_blocks import Blocks, diagonal_blocks
from heedful.parts.attend_flex import Flex, can_use_flex, packed_block_mask
from heedful.parts.attend_fused import Fused
from heedful.parts.attend_kernel import Kernel, can_use_kernel
from heedful.parts.attend_products import Attend, AttentionOptions, Products, needs_products
from heedful.parts.joined_cache import Joined, JoinedMask
from heedful.parts.masks import MaskSpec
from heedful.parts.positions import Rotation
from heedful.parts.residual import Dropout
from heedful.parts.unpadding import Unpadding

_AUTOCAST = frozenset({"cpu", "cuda", "mps"})  # device types with autocast (meta has none)


class AttentionPlan(NamedTuple):
    """The computation of an attention module in one pass.

    Attributes:
        attend: heads from queries, keys and values.
        rotation: of queries and keys (#B, T, H, E), before `attend`; None: no rotary positions.
        has_key: False for queries without a visible key; None: every query has one.
    """

    attend: Attend
    rotation: Rotation | None
    has_key: Bool[Tensor, "#B #T"] | None


def plan_attention(
    spec: MaskSpec,
    options: AttentionOptions,
    x: Float[Tensor, "N T D"],
    *,
    needs_grad: bool,
    returns_weights: bool = False,
    unpaddings: tuple[Unpadding, Unpadding] | None = None,
) -> AttentionPlan:
    """The plan of one pass.

    Args:
        spec: keys that each query may attend to.
        x: any padded states of the pass, for their type and device.
        needs_grad: the pass needs gradients.
        returns_weights: the attention weights will be returned.
        unpaddings: the states of queries and of keys are those of their real tokens, as one row
            (`Stack.skips_padding`); None: the states are padded.
    """
    positions, has_key = spec.queries.positions, spec.has_key
    if isinstance(spec, JoinedMask):
        attends = [
            _choose_padded(part, options, x, needs_grad, returns_weights) for part in spec.parts
        ]
        attend: Attend = Joined(tuple(attends), spec.sizes)
    elif unpaddings is None:
        attend = _choose_padded(spec, options, x, needs_grad, returns_weights)
    else:
        queries, keys = unpaddings
        attend = _choose_unpadded(spec, options, x, needs_grad, queries, keys)
        positions = queries.unpad(positions.expand(queries.shape))
        if queries is keys:
            has_key = None  # the query itself is visible
        elif has_key is not None:
            has_key = queries.unpad(has_key.expand(queries.shape))
    rotation = None
    if options.rotary is not None:
        cos, sin, layout = options.rotary(positions)
        rotation = Rotation(cos.transpose(1, 2), sin.transpose(1, 2), layout)
    return AttentionPlan(attend, rotation, has_key)


def _choose_padded(
    spec: MaskSpec, options: AttentionOptions, x: Tensor, needs_grad: bool, returns_weights: bool
) -> Attend:
    """Chooses the computation for padded states: Products, Fused or Flex, or Blocks of these."""
    scale, repeats, hook = options.scale, options.repeats, options.hook
    is_whole = returns_weights or hook is not None
    parts = [None] if is_whole else diagonal_blocks(spec, options.window)
    rule: dict[str, Any] = {
        "scheme": options.position_scores,
        "window": options.window,
        "repeats": repeats,
    }
    attends: list[Attend]
    if is_whole or needs_products(spec, options, parts[0], x, needs_grad=needs_grad):
        dtype = torch.promote_types(_query_type(x), torch.float32)
        rest = scale, options.softcap, repeats, hook, spec.has_key
        attends = [Products(spec.bias(dtype, part=part, **rule), *rest) for part in parts]
    elif spec.is_causal_alone and options.position_scores is None and options.window is None:
        return Fused(None, True, scale, repeats)
    elif needs_grad and can_use_flex(spec, options, x.device):
        return Flex(packed_block_mask(spec, options.window), scale)
    else:
        dtype = _query_type(x)
        biases = [spec.bias(dtype, part=part, **rule) for part in parts]
        attends = [Fused(bias, False, scale, repeats) for bias in biases]
    if parts[0] is None:
        return attends[0]
    blocks = [part for part in parts if part is not None]
    return Blocks(len(blocks[0][0]), tuple(keys for _, keys in blocks), tuple(attends))


def _choose_unpadded(
    spec: MaskSpec,
    options: AttentionOptions,
    x: Tensor,
    needs_grad: bool,
    queries: Unpadding,
    keys: Unpadding,
) -> Attend:
    """Chooses the computation for states of real tokens only: Kernel, or one for padded states."""
    if (
        diagonal_blocks(spec, options.window)[0] is None
        and needs_products(spec, options, None, x, needs_grad=needs_grad)
        and can_use_kernel(options, queries, keys, x, _query_type(x))
    ):
        scheme, window, repeats = options.position_scores, options.window, options.repeats
        bias = None
        if scheme is not None or window is not None or not spec.hides_padding_alone:
            bias = spec.bias(torch.float32, scheme=scheme, window=window, repeats=repeats)
        return Kernel(queries, keys, bias, options.scale, repeats)
    return Unpadded(_choose_padded(spec, options, x, needs_grad, False), queries, keys)


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
        heads, _ = self.attend(q, k, v, dropout)
        return self.queries.unpad(heads.transpose(1, 2)).transpose(1, 2), None


def _query_type(x: Tensor) -> torch.dtype:
    """The type of the queries that are computed from states `x`."""
    device = x.device.type
    if x.dtype == torch.float32 and device in _AUTOCAST and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
