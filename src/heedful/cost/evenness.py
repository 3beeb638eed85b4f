"""Evenness of an epoch's tokens over n ranks, each of which takes every n-th batch."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class Evenness:
    """Tokens of the ranks in an epoch.

    A step ends when its slowest rank is ready, so others are idle meanwhile.

    Attributes:
        steps: optimizer steps.
        tokens_per_rank: mean over the ranks.
        max_ratio: tokens of the rank that has most, as a ratio to the mean.
        idle_share: share of the time of all ranks in which one waits for the slowest of its step,
            if the time of a batch is proportional to its tokens; steps without a batch for a rank
            included.
    """

    steps: int
    tokens_per_rank: float
    max_ratio: float
    idle_share: float


def evenness(tokens: Int64[np.ndarray, " N"], ranks: int, accumulation: int = 1) -> Evenness:
    """Deal the batches of an epoch to ranks.

    Args:
        tokens: tokens of each batch with padding, in the order of the plan.
        accumulation: batches of each rank in an optimizer step.
    """
    size = ranks * accumulation
    steps = -(-len(tokens) // size)
    table = np.zeros(steps * size, dtype=np.int64)
    table[: len(tokens)] = tokens
    by_step = table.reshape(steps, accumulation, ranks).sum(1)
    by_rank = by_step.sum(0)
    busy, whole = by_step.sum(), by_step.max(1).sum() * ranks
    return Evenness(
        steps, float(by_rank.mean()), float(by_rank.max() / by_rank.mean()), float(1 - busy / whole)
    )
