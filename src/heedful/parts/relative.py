"""Position schemes that add scores to those of attention: what the distance of two tokens is worth.

Each is a module for an `Attention`; layers may share one.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError


def alibi_slopes(num_heads: int) -> Float[Tensor, "{num_heads}"]:
    """2^(-8/H), 2^(-16/H), … for a power of two; else as the authors' code fills up.

    That takes all slopes of the power of two below, and then every second one of the power above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    finer = [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return torch.tensor(slopes + finer[: num_heads - below])


def relative_buckets(
    distances: Int[Tensor, "*n"], *, num_buckets: int, max_distance: int, causal: bool
) -> Int[Tensor, "*n"]:
    """The bucket of each distance query - key (Raffel et al. 2020, as in the authors' code).

    Distances below a quarter of the buckets (causal: below half) have one each; beyond, buckets
    grow logarithmically up to `max_distance`. Causal, keys to the right share the bucket of
    distance 0; else they have the second half of the buckets.
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
    """Attention with linear biases (Press et al. 2022, sec. 3): -slope · distance; no weights.

    Where a stack may look at them, scores of tokens to the right fall off as those to the left.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)  # no buffer, for the reasons of `RotaryPositions`
        self._placed = self.slopes  # where the positions were last

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Of the positions of queries and keys."""
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        if self._placed.device != queries.device:
            self._placed = self.slopes.to(queries.device)
        return -self._placed[:, None, None] * distance


class RelativePositionBias(nn.Module):
    """A learned score for each head and bucket of distances (Raffel et al. 2020, sec. 2.1; T5).

    Args:
        num_buckets: half of them for single distances, the others logarithmically wider; a stack
            that looks both ways uses half of each for either side.
        max_distance: from here on all distances share the last bucket.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, causal: bool
    ) -> None:
        super().__init__()
        exact = num_buckets // (2 if causal else 4)  # distances with a bucket of their own
        if exact < 1 or max_distance <= exact:
            raise UserError(
                f"{num_buckets} buckets up to distance {max_distance}: there must "
                f"be {2 if causal else 4} at least, and the distance must be above {max(exact, 1)}"
            )
        self.max_distance, self.causal = max_distance, causal
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Of the positions of queries and keys."""
        buckets = relative_buckets(
            queries[:, :, None] - keys[:, None, :],
            num_buckets=self.weight.size(0),
            max_distance=self.max_distance,
            causal=self.causal,
        )
        return self.weight[buckets].permute(0, 3, 1, 2)
