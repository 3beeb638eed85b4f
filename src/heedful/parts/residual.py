"""Normalisation, and where it stands around a sub-layer: four placements, one class each."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout

Norm = Callable[[int], nn.Module]  # makes the norm of a width, for example partial(nn.LayerNorm)
NormPlacement = Literal["post", "pre", "output", "sandwich"]


class Residual(nn.Module):
    """A sub-layer f with its norm, its dropout and the way around it: (B, T, D) -> (B, T, D).

    Inputs beside the states go to the sub-layer as they are.
    """

    def __init__(self, sublayer: nn.Module, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = norm
        self.dropout = Dropout(dropout)


class PostNorm(Residual):
    """norm(x + f(x)), as in Vaswani et al. 2017, sec. 3.1."""

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return self.norm(x + self.dropout(self.sublayer(x, **inputs)))


class PreNorm(Residual):
    """x + f(norm(x)), as in GPT-2 (Radford et al. 2019); a stack of these ends with a norm."""

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return x + self.dropout(self.sublayer(self.norm(x), **inputs))


class OutputNorm(Residual):
    """x + norm(f(x)): the sub-layer's output is normalised, the way around it is not."""

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return x + self.dropout(self.norm(self.sublayer(x, **inputs)))


class SandwichNorm(Residual):
    """x + norm₂(f(norm(x))) (Ding et al. 2021, CogView, sec. 2.4): bounds what f adds."""

    def __init__(self, sublayer: nn.Module, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__(sublayer, norm, dropout=dropout)
        self.output_norm = copy.deepcopy(norm)

    def forward(self, x: Float[Tensor, "B T D"], **inputs: Any) -> Float[Tensor, "B T D"]:
        return x + self.dropout(self.output_norm(self.sublayer(self.norm(x), **inputs)))


PLACEMENTS: dict[NormPlacement, type[Residual]] = {
    "post": PostNorm,
    "pre": PreNorm,
    "output": OutputNorm,
    "sandwich": SandwichNorm,
}


class ZeroCenteredRMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · (1 + weight), so that a weight of zero is the identity (Gemma).

    In fp32 at least: 1 + weight rounds in 16 bits.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)
