"""Code of all computations of attention: signature, settings, query heads of one key head."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.parts.positions import RotaryPositions

# Queries (B, H, T, E), keys and values (B, G, K, E) and the dropout of the weights -> heads
# (B, H, T, E), and the weights (B, H, T, K) where they are formed.
Attend = Callable[..., tuple[Tensor, Tensor | None]]


PreferredKernel = Literal["flex", "fused"]

_AUTOCAST = frozenset({"cpu", "cuda", "mps"})  # device types with autocast (meta has none)


class AttentionOptions(NamedTuple):
    """The settings of an attention module by which it is planned; equal ones share a plan.

    Attributes:
        repeats: query heads per key head.
        scale, window, softcap: as of `MultiHead`.
        rotary: rotary positions.
        position_scores: position scheme that adds to the scores.
        drops: dropout is applied.
        hook: module with hooks that the weights pass through; None: the weights are not read.
        preferred_kernel: as of `MultiHead`.
    """

    repeats: int
    scale: float | None
    window: int | None
    softcap: float | None
    rotary: RotaryPositions | None
    position_scores: nn.Module | None
    drops: bool
    hook: nn.Module | None
    preferred_kernel: PreferredKernel | None


def fold_queries(x: Float[Tensor, "B H T *n"], repeats: int) -> Float[Tensor, "B G rT *n"]:
    """Query heads that share a key head, as more queries of that head."""
    return x.unflatten(1, (-1, repeats)).flatten(2, 3)


def unfold_heads(x: Float[Tensor, "B G rT *n"], repeats: int) -> Float[Tensor, "B H T *n"]:
    """The inverse of `fold_queries`."""
    return x.unflatten(2, (repeats, -1)).flatten(1, 2)


def query_type(x: Tensor) -> torch.dtype:
    """The type of the queries that are computed from states `x`."""
    device = x.device.type
    if x.dtype == torch.float32 and device in _AUTOCAST and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
