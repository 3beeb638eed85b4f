"""Residual connections with four placements of the norm, one class each, their dropout and norms.

Dropout (Srivastava et al. 2014) has cheap random numbers on a CPU, where kernels compute it and the
operations beside it in one pass.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.kernels import dropout as fused
from heedful.kernels import library as kernels
from heedful.parts.helpers import has_any_hooks, simulated

Norm = Callable[[int], nn.Module]  # makes a norm from a width, for example nn.LayerNorm
NormPlacement = Literal["post", "pre", "output", "sandwich"]

_LEVELS = 2**16
_STREAMS, _WARM_UP = 8, 18  # as in `random.cpp`
_SHARE = 4 * _STREAMS  # 16-bit numbers of one 64-bit number of each generator
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Residual(nn.Module):
    """Base: a sub-layer f, its norm, its dropout and the residual: (B, T, D) -> (B, T, D).

    Args:
        sublayer: f; keyword arguments of a call are passed on to it.
        norm: norm of width D.
        dropout: on the output of f, in training only.
    """

    def __init__(self, sublayer: nn.Module, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = Dropout(dropout)


class PostNorm(Residual):
    """norm(x + f(x)) (Vaswani et al. 2017, sec. 3.1).

    >>> PostNorm(FeedForward(16), nn.LayerNorm(16))(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return add_norm(x, self.sublayer(x, **inputs), self.dropout, self.norm)


class PreNorm(Residual):
    """x + f(norm(x)) (GPT-2; Radford et al. 2019); a stack of these needs a final norm."""

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return add_dropped(x, self.sublayer(self.norm(x), **inputs), self.dropout)


class OutputNorm(Residual):
    """x + norm(f(x)): only the output of the sub-layer is normalized."""

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return add_dropped(x, self.norm(self.sublayer(x, **inputs)), self.dropout)


class SandwichNorm(Residual):
    """x + norm₂(f(norm(x))) (CogView; Ding et al. 2021, sec. 2.4)."""

    def __init__(self, sublayer: nn.Module, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__(sublayer, norm, dropout=dropout)
        self.output_norm = copy.deepcopy(norm)

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        out = self.output_norm(self.sublayer(self.norm(x), **inputs))
        return add_dropped(x, out, self.dropout)


PLACEMENTS: dict[NormPlacement, type[Residual]] = {
    "post": PostNorm,
    "pre": PreNorm,
    "output": OutputNorm,
    "sandwich": SandwichNorm,
}


class ZeroCenteredRMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · (1 + weight): RMSNorm whose weight is centered at zero (Gemma).

    Computed in fp32 at least, since 1 + weight is rounded in 16 bits.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


class Dropout(nn.Module):
    """In training, zero each element with probability `p` and scale the others by 1 / (1 - p).

    `torch.nn.Dropout` generates a random float per element, a measurable part of a small model's
    training step on a CPU (docs/results/choices.md). On a CPU this module generates 16 bits per
    element, seeded by torch's generator (a resumed run repeats them): `p` is rounded to the nearest
    1/65536 and the scale is that of the rounded `p`, so the expectation is exact. On other devices
    it is `torch.nn.functional.dropout`.

    >>> dropout = Dropout(0.5)
    >>> sorted(set(dropout(torch.ones(1000)).tolist()))
    [0.0, 2.0]
    >>> dropout.eval()(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not isinstance(p, int | float) or not 0.0 <= p < 1.0:
            raise UserError(f"dropout must be at least 0 and below 1, not {p!r}")
        self.p = p

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p, training=True)
        keep, scale = keep_mask(x.shape, self.p)
        if torch.compiler.is_compiling():  # whose gradient is derived from this
            return x * keep * scale
        dropped: Tensor = Drop.apply(x, keep, scale)  # type: ignore[no-untyped-call]
        return dropped

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Drop(torch.autograd.Function):
    """x · keep · scale; a kernel computes it where kernels run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        if kernels.loaded is not None and kernels.can_run(x):
            return fused.apply_mask(x, keep, scale)
        # The bits of `x`, read as integers, are multiplied by 0 or 1: on a CPU a product of floats
        # with a bool or integer tensor converts one element at a time.
        integer = _INTEGERS[x.dtype.itemsize]
        return (x.view(integer) * keep.to(integer)).view(x.dtype).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        grad: Tensor = Drop.apply(grads[0], keep, ctx.scale)  # type: ignore[no-untyped-call]
        return grad, None, None


def add_dropped(
    x: Float[Tensor, "..."], y: Float[Tensor, "..."], dropout: Dropout
) -> Float[Tensor, "..."]:
    """x + dropout(y); a kernel computes both where kernels run."""
    if not _can_add(x, y, dropout):
        return x + dropout(y)
    out: Tensor = fused.AddDropped.apply(x, y, *keep_mask(y.shape, dropout.p))  # type: ignore[no-untyped-call]
    return out


def add_norm(
    x: Float[Tensor, "... D"], y: Float[Tensor, "... D"], dropout: Dropout, norm: nn.Module
) -> Float[Tensor, "... D"]:
    """norm(x + dropout(y)); a kernel computes all where kernels run."""
    if not (_can_add(x, y, dropout) and _is_plain(norm)):
        normed: Tensor = norm(x + dropout(y))
        return normed
    mask = keep_mask(y.shape, dropout.p)
    out: Tensor = fused.AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps, *mask)  # type: ignore[no-untyped-call]
    return out


def relu_dropped(x: Float[Tensor, "..."], dropout: Dropout) -> Float[Tensor, "..."]:
    """dropout(relu(x)); a kernel computes both where kernels run."""
    if not _drops(dropout) or not kernels.can_run(x):
        return dropout(F.relu(x))
    out: Tensor = fused.ReluDropped.apply(x, *keep_mask(x.shape, dropout.p))  # type: ignore[no-untyped-call]
    return out


def keep_mask(shape: torch.Size, p: float) -> tuple[Int16[Tensor, "..."], float]:
    """Each element is 1 with probability 1 - round(p × 65536) / 65536, else 0; scale 1 / (1 - p).

    The keep probability is at least 1 / 65536, so that the scale is finite for `p` near 1.
    """
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    first_kept = dropped - _LEVELS // 2
    scale = _LEVELS / (_LEVELS - dropped)
    count = shape.numel()
    if torch.compiler.is_compiling():  # a graph generates numbers itself
        size = max(1, (count + 3) // 4)
        bits = torch.randint(-(2**63), 2**63 - 1, (size,), dtype=torch.int64)
        return (bits.view(torch.int16)[:count].view(shape) >= first_kept).to(torch.int16), scale
    if simulated:
        whole = torch.empty(-(-count // _SHARE) * _SHARE, dtype=torch.int16)
        return whole[:count].view(shape), scale
    # Read by numpy, without an operation that waits.
    seed = int(torch.randint(2**63 - 1, (1,)).numpy()[0])
    if kernels.loaded is not None and kernels.can_run():
        keep = torch.empty(shape, dtype=torch.int16)
        kernels.call("keep_mask", seed, first_kept, keep, count)
        return keep, scale
    levels = random_levels(seed, count).view(shape)
    # A comparison is vectorized on a CPU if its result has the type of its operands.
    return torch.ge(levels, first_kept, out=levels), scale


def random_levels(seed: int, count: int) -> Int16[Tensor, " n"]:
    """Random 16-bit integers of eight generators SFC64, one after the other, with equal shares.

    Torch's own generator, MT19937, takes nearly twice the time, on one thread like this one.
    Generator k has the seed (`seed`, k, 0), and its first 18 numbers are left out, as in PractRand
    (Doty-Humphrey 2010).
    """
    size = -(-count // _SHARE)  # 64-bit numbers of each generator
    words = np.empty((_STREAMS, size), np.uint64)
    generator = np.random.SFC64(0)
    for stream in range(_STREAMS):
        state = np.array([seed, stream, 0, 1], np.uint64)
        generator.state = {**generator.state, "state": {"state": state}}
        generator.random_raw(_WARM_UP, output=False)
        words[stream] = generator.random_raw(size)
    return torch.from_numpy(words.reshape(-1).view(np.int16))[:count]


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


def _is_plain(norm: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """A layer norm of the last dimension in float32, with a bias, and without hooks."""
    return (
        type(norm) is nn.LayerNorm
        and norm.bias is not None
        and norm.weight.dtype == norm.bias.dtype == torch.float32
        and len(norm.normalized_shape) == 1
        and kernels.can_run(norm.weight, norm.bias)
        and not has_any_hooks(norm)
    )
