"""Normalisation: which kind, said as a small value that builds its module."""

from dataclasses import dataclass

from torch import nn


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
    """Root-mean-square normalisation (Zhang and Sennrich 2019): no mean is taken off, no bias."""

    eps: float = 1e-6

    def build(self, width: int) -> nn.Module:
        """A module (…, width) -> (…, width)."""
        return nn.RMSNorm(width, eps=self.eps)


Norm = LayerNorm | RMSNorm
