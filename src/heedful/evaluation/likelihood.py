"""Losses of batches: for training, summed over batches, and as metrics."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from heedful.data.collate import Batch
from heedful.evaluation.metrics import perplexity
from heedful.evaluation.target_scores import Net, target_states
from heedful.parts.heads import ClassificationHead
from heedful.parts.losses import LossSum, cross_entropy, head_loss


def target_loss(
    head: Any, states: Float[Tensor, "M D"], targets: Int64[Tensor, " M"], **options: Any
) -> LossSum:
    """The loss of a head at M states.

    Logits of the vocabulary are computed in chunks (`head_loss`), those of classes at once.

    Args:
        options: as in `head_loss`.
    """
    if isinstance(head, ClassificationHead):
        options.pop("count_correct", None)
        return cross_entropy(head(states), targets, **options)
    return head_loss(head, states, targets, **options)


def batch_loss(net: Net, batch: Batch, **options: Any) -> LossSum:
    """The loss of a batch, summed over its targets; differentiable. Options as in `head_loss`."""
    return target_loss(net.head, target_states(net, batch), batch.targets, **options)


def sum_losses(parts: Sequence[LossSum]) -> LossSum:
    """The sum of losses, on the CPU, in double precision; without `correct` if a part has none.

    The sum of no parts is zero.
    """
    correct = [part.correct for part in parts if part.correct is not None]

    def total(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([*values]).cpu() if values else torch.zeros(0, dtype=torch.int64)

    return LossSum(
        total([part.loss for part in parts]).double().sum(),
        total([part.nll for part in parts]).double().sum(),
        total(correct).sum() if len(correct) == len(parts) else None,
        sum(part.tokens for part in parts),
    )


def unigram_entropy(targets: Iterable[Int64[Tensor, " M"]], enough: int = 50_000) -> float:
    """Entropy of the unigram distribution of targets, in nats per target.

    It is the loss of a model that knows only the frequency of each target. The estimate from a
    sample is biased towards lower values.

    Args:
        targets: the targets of batches.
        enough: stop after the batch with this number of targets.
    """
    sample: list[np.ndarray] = []
    for batch_targets in targets:
        sample.append(batch_targets.numpy())
        if sum(map(len, sample)) >= enough:
            break
    _, counts = np.unique(np.concatenate(sample), return_counts=True)
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def token_metrics(sums: LossSum) -> dict[str, float]:
    """Perplexity, mean loss without label smoothing, and accuracy (if counted) per token."""
    values = {
        "perplexity": perplexity(float(sums.nll), sums.tokens),
        "loss": float(sums.nll) / sums.tokens,
    }
    if sums.correct is not None:
        values["token_accuracy"] = float(sums.correct) / sums.tokens
    return values
