"""Residual connections with four placements of the norm, one class each, and Gemma's norm."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout, add_dropped, add_norm

Norm = Callable[[int], nn.Module]  # makes a norm from a width, for example nn.LayerNorm
NormPlacement = Literal["post", "pre", "output", "sandwich"]


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
