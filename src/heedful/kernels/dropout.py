"""Dropout with a given mask, alone and fused with the operations beside it, with gradients.

In a small model's training step on a CPU these operations take most of the time outside of
products: each of them reads and writes all states. Masks are those of `parts/dropout.py`: `keep` is
1 where an element is kept, else 0, and `scale` is the factor of what is kept.
"""

from typing import Any

import torch
from jaxtyping import Int16
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.kernels import library

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def apply_mask(x: Tensor, keep: Int16[Tensor, "..."], scale: float) -> Tensor:
    """x · keep · scale.

    The bits of `x`, read as integers, are multiplied by 0 or 1: on a CPU a product of floats with a
    bool or integer tensor converts one element at a time.
    """
    if library.can_run(x) and keep.is_contiguous() and keep.shape == x.shape:
        return library.dropout(x, keep, scale)
    integer = _INTEGERS[x.dtype.itemsize]
    return (x.view(integer) * keep.to(integer)).view(x.dtype).mul_(scale)


class Drop(torch.autograd.Function):
    """`apply_mask` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return apply_mask(x, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return apply_mask(grads[0], keep, ctx.scale), None, None


class AddDropped(torch.autograd.Function):
    """x + y · keep · scale, by a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        return library.add_dropped(x, y, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return grads[0], apply_mask(grads[0].to(ctx.dtype), keep, ctx.scale), None, None


class AddNorm(torch.autograd.Function):
    """norm(x + y · keep · scale), by a kernel, of a layer norm with `weight`, `bias` and `eps`.

    Its backward pass stores the sum, with the mean and the deviation of each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        keep: Tensor,
        scale: float,
    ) -> Tensor:
        out, total, statistics = library.add_norm(x, y, keep, scale, weight, bias, eps)
        ctx.save_for_backward(total, statistics, weight, keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics, weight, keep = ctx.saved_tensors
        found = library.add_norm_backward(
            grads[0].contiguous(), total, statistics, weight, keep, ctx.scale, ctx.dtype
        )
        return *found, None, None, None


class ReluDropped(torch.autograd.Function):
    """max(x, 0) · keep · scale, by a kernel.

    Its backward pass needs no mask: kept elements above 0 are those whose result is above 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        out = library.relu_dropped(x, keep, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return library.relu_dropped_backward(grads[0].contiguous(), out, ctx.scale), None, None
