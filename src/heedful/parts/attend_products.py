"""Attention by plain products, which form the weights: the formula itself.

It is chosen where the weights are read or changed, for capped scores, and in training on a CPU for
all but long texts. The other ways to compute attention are equal to it: `attend_fused.py` (the
default), `attend_blocks.py`, `attend_flex.py`, `attend_kernel.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.parts.helpers import kernel_device
from heedful.parts.masks import MaskSpec
from heedful.parts.positions import RotaryPositions
from heedful.parts.residual import Dropout

# Queries (B, H, T, E), keys and values (B, G, K, E) and the dropout of the weights -> heads
# (B, H, T, E), and the weights (B, H, T, K) where they are formed.
Attend = Callable[[Tensor, Tensor, Tensor, Dropout], tuple[Tensor, Tensor | None]]

# Attention weights of a head from which on the fused kernel trains faster on a CPU (docs/log.md).
_FUSED_WEIGHTS = 256 * 256


class AttentionOptions(NamedTuple):
    """The settings of an attention module by which it is planned; equal ones share a plan.

    Attributes:
        repeats: query heads per key head.
        scale, window, softcap: as of `MultiHead`.
        rotary: rotary positions.
        position_scores: position scheme that adds to the scores.
        drops: dropout is applied.
        hook: module with hooks that the weights pass through; None: the weights are not read.
        uses_flex: FlexAttention may be used.
    """

    repeats: int
    scale: float | None
    window: int | None
    softcap: float | None
    rotary: RotaryPositions | None
    position_scores: nn.Module | None
    drops: bool
    hook: nn.Module | None
    uses_flex: bool


def needs_products(
    spec: MaskSpec,
    options: AttentionOptions,
    part: tuple[range, range] | None,
    x: Tensor,
    *,
    needs_grad: bool,
) -> bool:
    """True for capped scores, and for training on a CPU where plain products are faster.

    On a CPU the fused kernel has no backward pass with dropout or for a trained bias, and its
    backward pass is slow in 16 bits for short sequences.

    Args:
        part: columns of the queries and keys of a block (`attend_blocks.py`); None: all.
        x: states of the pass, for their device.
    """
    if options.softcap is not None:
        return True
    if kernel_device(x) != "cpu" or not needs_grad:
        return False
    if options.drops or options.position_scores is not None:
        return True
    spans = (spec.queries, spec.keys)
    rows, reach = [span.positions.size(1) for span in spans] if part is None else map(len, part)
    return rows * reach < _FUSED_WEIGHTS


@dataclass(frozen=True)
class Products:
    """softmax(scale · QKᵀ + bias) V, and the weights.

    Args:
        bias: of `MaskSpec.bias`, for the queries of a key head side by side.
        repeats: query heads per key head.
        hook: module that the weights pass through before dropout; None: they do not.
        has_key: False for queries without a visible key, whose weights are zero for the hook.
    """

    bias: Float[Tensor, "#B #G #rT K"] | None
    scale: float | None
    softcap: float | None
    repeats: int
    hook: nn.Module | None = None
    has_key: Bool[Tensor, "#B #T"] | None = None

    def __call__(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B G K E"],
        value: Float[Tensor, "B G K E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
        repeats = self.repeats
        query = query if repeats == 1 else fold_queries(query, repeats)
        weights = attention_weights(query, key, self.bias, self.scale, self.softcap)
        weights = weights.to(value.dtype)
        if self.hook is not None:
            whole = zero_hidden_queries(unfold_heads(weights, repeats), self.has_key)
            weights = fold_queries(self.hook(whole), repeats)
        heads = dropout(weights) @ value
        if repeats == 1:
            return heads, weights
        return unfold_heads(heads, repeats), unfold_heads(weights, repeats)


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None = None,
    dropout: nn.Module | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(scale · QKᵀ + bias) V, and the weights (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 at least; the weights are returned before dropout. A query without a
    visible key gets equal weights, so that nothing is NaN; `Attention` then zeroes its output.

    Args:
        bias: `MaskSpec.bias`, in fp32 at least.
        scale: default 1 / √E.
        softcap: scores s are replaced by softcap · tanh(s / softcap) before the bias is added
            (Gemma 2); default: no cap.

    >>> query, key, value = (torch.ones(1, 2, n, 8) for n in (3, 5, 5))
    >>> output, weights = attend(query, key, value)
    >>> output.shape, weights.shape
    (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 3, 5]))
    """
    weights = attention_weights(query, key, bias, scale, softcap).to(value.dtype)
    out = (weights if dropout is None else dropout(weights)) @ value
    return out, weights


def attention_weights(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T K"]:
    """softmax(scale · QKᵀ + bias) in fp32 at least; arguments as in `attend`."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    elif scores.dtype.itemsize < 4:
        scores = scores.float()
    return scores.softmax(-1)


def fold_queries(x: Float[Tensor, "B H T *n"], repeats: int) -> Float[Tensor, "B G rT *n"]:
    """Query heads that share a key head, as more queries of that head."""
    return x.unflatten(1, (-1, repeats)).flatten(2, 3)


def unfold_heads(x: Float[Tensor, "B G rT *n"], repeats: int) -> Float[Tensor, "B H T *n"]:
    """The inverse of `fold_queries`."""
    return x.unflatten(2, (repeats, -1)).flatten(1, 2)


def zero_hidden_queries(
    weights: Float[Tensor, "B H T K"], has_key: Bool[Tensor, "#B #T"] | None
) -> Float[Tensor, "B H T K"]:
    """The weights, with zeros for queries without a visible key."""
    return weights if has_key is None else weights * has_key[:, None, :, None]
