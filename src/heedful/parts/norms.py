"""Normalisation: which kind, said as a small value that builds its module."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation (Ba et al. 2016): biased variance, `eps` inside the root."""

    eps: float = 1e-5
    bias: bool = True

    def build(self, width: int) -> nn.Module:
        """A module (…, width) -> (…, width)."""
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm:
    """Root-mean-square normalisation (Zhang and Sennrich 2019): no mean is taken off, no bias.

    `centred`: the scale is 1 + weight, so that a weight of zero is the identity (Gemma).
    """

    eps: float = 1e-6
    centred: bool = False

    def build(self, width: int) -> nn.Module:
        """A module (…, width) -> (…, width)."""
        return CentredRMSNorm(width, self.eps) if self.centred else nn.RMSNorm(width, eps=self.eps)


class CentredRMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · (1 + weight), in fp32 at least: 1 + weight rounds in 16 bits."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)


Norm = LayerNorm | RMSNorm
