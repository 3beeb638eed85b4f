"""Relative position schemes: biases of the attention scores by the distance of two tokens.

Each is a module for the argument `position` of `Attention`; layers may share one.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.checked import check_positive


def alibi_slopes(num_heads: int) -> Float[Tensor, "{num_heads}"]:
    """Slopes of the heads: 2^(-8/H), 2^(-16/H), … if H is a power of two.

    Otherwise, as in the authors' code, the slopes of the next lower power of two, and then every
    second slope of the next higher one.
    """
    check_positive(num_heads=num_heads)
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    finer = [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return torch.tensor(slopes + finer[: num_heads - below])


def relative_buckets(
    distances: Int[Tensor, "*n"], *, num_buckets: int, max_distance: int, causal: bool
) -> Int[Tensor, "*n"]:
    """Bucket index of each distance query - key (Raffel et al. 2020, the authors' code).

    Distances below num_buckets / 4 (causal: num_buckets / 2) have a bucket each; wider buckets
    grow logarithmically up to `max_distance`. Keys after the query have the second half of the
    buckets; with `causal` they share the bucket of distance 0.
    """
    offset = torch.zeros_like(distances)
    if causal:
        distances = distances.clamp(min=0)
    else:
        num_buckets //= 2
        offset = (distances < 0) * num_buckets
        distances = distances.abs()
    exact = num_buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distances < exact, distances, wide)


class AlibiBias(nn.Module):
    """ALiBi, attention with linear biases (Press et al. 2022, sec. 3): -slope · |distance|.

    It has no weights. In a stack that is not causal, the bias is symmetric.

    >>> attention = Attention(16, 2, position=AlibiBias(2))
    >>> attention(torch.randn(1, 5, 16), causal=True).shape
    torch.Size([1, 5, 16])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)  # not a buffer, see `RotaryPositions`
        self._on_device = self.slopes  # on the device of the last call

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Biases (#B, H, t, k) from positions of queries and keys."""
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        if self._on_device.device != queries.device:
            self._on_device = self.slopes.to(queries.device)
        return -self._on_device[:, None, None] * distance


class RelativePositionBias(nn.Module):
    """A trained bias per head and bucket of distances (T5; Raffel et al. 2020, sec. 2.1).

    Args:
        num_heads: H.
        num_buckets: half of them for single distances, half logarithmically wider; without
            `causal`, half of each kind for keys before the query and half for keys after it.
        max_distance: distances from this one on share the last bucket.
        causal: the stack is causal.

    Raises:
        UserError: too few buckets, or `max_distance` within the buckets of single distances.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, causal: bool
    ) -> None:
        super().__init__()
        exact = num_buckets // (2 if causal else 4)  # distances with one bucket each
        if exact < 1 or max_distance <= exact:
            raise UserError(
                f"num_buckets {num_buckets} with max_distance {max_distance}: num_buckets must be "
                f"at least {2 if causal else 4}, and max_distance above {max(exact, 1)}"
            )
        self.max_distance, self.causal = max_distance, causal
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Biases (#B, H, t, k) from positions of queries and keys."""
        buckets = relative_buckets(
            queries[:, :, None] - keys[:, None, :],
            num_buckets=self.weight.size(0),
            max_distance=self.max_distance,
            causal=self.causal,
        )
        return self.weight[buckets].permute(0, 3, 1, 2)
