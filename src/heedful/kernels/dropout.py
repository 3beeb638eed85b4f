"""Dropout with a given mask, alone and with gradients fused with the operations beside it.

In a small model's training step on a CPU these operations take most of the time outside of
products: each of them reads and writes all states. Masks are those of `parts/residual.py`: `keep`
is 1 where an element is kept, else 0, and `scale` is the factor of what is kept.
"""

from typing import Any

import torch
from jaxtyping import Int16
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.kernels.library import call, element_type


def apply_mask(x: Tensor, keep: Int16[Tensor, "..."], scale: float) -> Tensor:
    """x · keep · scale, by a kernel."""
    out = torch.empty_like(x)
    call("dropout", element_type(x), x, keep, scale, out, x.numel())
    return out


class AddDropped(torch.autograd.Function):
    """x + y · keep · scale, by a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        out = torch.empty_like(x)
        call("add_dropped", element_type(y), x, y, keep, scale, out, x.numel())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype).contiguous()
        return grads[0], apply_mask(grad, keep, ctx.scale), None, None


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
        out, total, width = torch.empty_like(x), torch.empty_like(x), x.size(-1)
        rows = x.numel() // width
        statistics = x.new_empty(rows, 2)
        inputs = x, y, keep, scale, weight, bias, eps
        call("add_norm", element_type(y), *inputs, total, statistics, out, rows, width)
        ctx.save_for_backward(total, statistics, weight, keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics, weight, keep = ctx.saved_tensors
        grad = grads[0].contiguous()
        x_grad, y_grad = torch.empty_like(grad), torch.empty_like(grad, dtype=ctx.dtype)
        width = grad.size(-1)
        parts = grad.new_empty(torch.get_num_threads(), 2, width)
        inputs = grad, total, statistics, weight, keep, ctx.scale
        sizes = grad.numel() // width, width
        call("add_norm_backward", element_type(y_grad), *inputs, x_grad, y_grad, parts, *sizes)
        weight_grad, bias_grad = parts.sum(0).unbind()
        return x_grad, y_grad, weight_grad, bias_grad, None, None, None


class ReluDropped(torch.autograd.Function):
    """max(x, 0) · keep · scale, by a kernel.

    Its backward pass needs no mask: kept elements above 0 are those whose result is above 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(x)
        call("relu_dropped", element_type(x), x, keep, scale, out, x.numel())
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        grad, x_grad = grads[0].contiguous(), torch.empty_like(out)
        call("relu_dropped_backward", element_type(out), grad, out, ctx.scale, x_grad, out.numel())
        return x_grad, None, None
