"""Dropout (Srivastava et al. 2014), with random numbers that cost little on a CPU."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_LEVELS = 2**16


class Dropout(nn.Module):
    """Zeroes each element with probability `p` in training, scaling the rest by 1 / (1 - p).

    `torch.nn.Dropout` draws one random float an element, which on a CPU shows in a small model's
    training step (docs/results/choices.md). On a CPU this draws 16 bits an element instead, from
    the same generator (so that a resumed run repeats them): `p` is rounded to the nearest 1/65536
    and the scale is that of the rounded `p`, so that the expectation is exact. Elsewhere it is
    `torch.nn.functional.dropout`.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {p}")
        self.p = p

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p, training=True)
        return _Drop.apply(x, self.p)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"p={self.p}"


def keep_mask(shape: torch.Size, p: float) -> tuple[Tensor, float]:
    """A bool tensor, True with probability 1 - round(p × 65536) / 65536, and the scale for it.

    The least probability to keep is 1 / 65536, so that a `p` next to 1 has a scale too.
    """
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    count = shape.numel()
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    draws = bits.view(torch.int16)[:count].view(shape)
    return draws >= dropped - _LEVELS // 2, _LEVELS / (_LEVELS - dropped)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        keep, ctx.scale = keep_mask(x.shape, p)
        ctx.save_for_backward(keep)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (grads[0] * keep).mul_(ctx.scale), None
