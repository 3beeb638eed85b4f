"""The loss of a batch's targets, summed over batches, and token_metrics of the sums."""

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
    """The loss of a head's logits; those of words are never formed all at once (`head_loss`)."""
    if isinstance(head, ClassificationHead):
        options.pop("count_correct", None)
        return cross_entropy(head(states), targets, **options)
    return head_loss(head, states, targets, **options)


def batch_loss(net: Net, batch: Batch, **options: Any) -> LossSum:
    """Sums over the targets of a batch, differentiable; options as of `head_loss`."""
    return target_loss(net.head, target_states(net, batch), batch.targets, **options)


def sum_losses(parts: Sequence[LossSum]) -> LossSum:
    """The sums over all parts, on the CPU, in double precision.

    `correct` is None where a part has none.
    """
    correct = [part.correct for part in parts if part.correct is not None]
    return LossSum(
        torch.stack([part.loss for part in parts]).cpu().double().sum(),
        torch.stack([part.nll for part in parts]).cpu().double().sum(),
        torch.stack(correct).cpu().sum() if len(correct) == len(parts) else None,
        sum(part.tokens for part in parts),
    )


def unigram_entropy(targets: Iterable[Int64[Tensor, " M"]], enough: int = 50_000) -> float:
    """Entropy of the frequencies of targets, in nats a target: of all, or of the first `enough`.

    It is the loss of whoever knows how frequent each target is, and nothing of the texts. That of
    a sample is a little too low, never too high in the mean.
    """
    taken: list[np.ndarray] = []
    for some in targets:
        taken.append(some.numpy())
        if sum(map(len, taken)) >= enough:
            break
    _, counts = np.unique(np.concatenate(taken), return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def token_metrics(found: LossSum) -> dict[str, float]:
    """Perplexity and loss (without label smoothing) of sums over tokens, and accuracy where correct
    tokens were counted."""
    values = {
        "perplexity": perplexity(float(found.nll), found.tokens),
        "loss": float(found.nll) / found.tokens,
    }
    if found.correct is not None:
        values["token_accuracy"] = float(found.correct) / found.tokens
    return values
