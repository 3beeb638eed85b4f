"""Dropout fused with the operations beside it, where kernels run (`heedful.kernels`).

In a small model's training step on a CPU these operations take most of the time outside of
products: each of them reads and writes all states.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from heedful.kernels import training as kernels
from heedful.parts.dropout import Dropout, apply_mask
from heedful.parts.helpers import has_any_hooks


def add_dropped(
    x: Float[Tensor, "..."], y: Float[Tensor, "..."], dropout: Dropout
) -> Float[Tensor, "..."]:
    """x + dropout(y)."""
    if not _can_add(x, y, dropout):
        return x + dropout(y)
    out: Tensor = _AddDropped.apply(x, y, *dropout.draw_mask(y.shape))  # type: ignore[no-untyped-call]
    return out


def add_norm(
    x: Float[Tensor, "... D"], y: Float[Tensor, "... D"], dropout: Dropout, norm: nn.Module
) -> Float[Tensor, "... D"]:
    """norm(x + dropout(y))."""
    if not (_can_add(x, y, dropout) and _is_plain(norm)):
        normed: Tensor = norm(x + dropout(y))
        return normed
    mask = dropout.draw_mask(y.shape)
    out: Tensor = _AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, *mask)  # type: ignore[no-untyped-call]
    return out


def relu_dropped(x: Float[Tensor, "..."], dropout: Dropout) -> Float[Tensor, "..."]:
    """dropout(relu(x))."""
    if not _drops(dropout) or not kernels.can_run(x):
        return dropout(F.relu(x))
    out: Tensor = _ReluDropped.apply(x, *dropout.draw_mask(x.shape))  # type: ignore[no-untyped-call]
    return out


def _drops(dropout: Dropout) -> bool:
    return dropout.training and dropout.p > 0 and not has_any_hooks(dropout)


def _can_add(x: Tensor, y: Tensor, dropout: Dropout) -> bool:
    """A kernel adds `y` after dropout to float32 states `x`."""
    return (
        _drops(dropout)
        and x.dtype == torch.float32
        and x.shape == y.shape
        and kernels.can_run(x, y)
    )


def _is_plain(norm: nn.Module) -> bool:
    """A layer norm of the last dimension in float32, with a bias, and without hooks."""
    return (
        type(norm) is nn.LayerNorm
        and norm.bias is not None
        and norm.weight.dtype == norm.bias.dtype == torch.float32
        and len(norm.normalized_shape) == 1
        and kernels.can_run(norm.weight, norm.bias)
        and not has_any_hooks(norm)
    )


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        return kernels.add_dropped(x, y, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return grads[0], apply_mask(grads[0].to(ctx.dtype), keep, ctx.scale), None, None


class _AddNorm(torch.autograd.Function):
    """Its backward pass stores the sum, with the mean and the deviation of each row."""

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
        """norm(x + y · keep · scale), with the weight, the bias and eps of the norm."""
        out, total, statistics = kernels.add_norm(x, y, keep, scale, weight, bias, eps)
        ctx.save_for_backward(total, statistics, weight, keep)
        ctx.scale, ctx.dtype = scale, y.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics, weight, keep = ctx.saved_tensors
        found = kernels.add_norm_backward(
            grads[0].contiguous(), total, statistics, weight, keep, ctx.scale, ctx.dtype
        )
        return *found, None, None, None


class _ReluDropped(torch.autograd.Function):
    """Its backward pass needs no mask: kept elements above 0 are those whose result is above 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        out = kernels.relu_dropout(x, keep, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return kernels.relu_dropout_backward(grads[0].contiguous(), out, ctx.scale), None, None
