"""Losses of batches: for training, summed over batches, and as metrics."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from heedful.data.collate import Batch
from heedful.evaluation.metrics import perplexity
from heedful.evaluation.target_scores import Net, target_states
from heedful.parts.heads import ClassificationHead
from heedful.parts.losses import (
    LossSum,
    cross_entropy,
    head_loss,
    sigmoid_cross_entropy,
    squared_error,
)

Targets = Int64[Tensor, " M"] | Bool[Tensor, "M C"] | Float[Tensor, "M C"]


def target_loss(
    head: Any, states: Float[Tensor, "M D"], targets: Targets, **options: Any
) -> LossSum:
    """The loss of a head at M states.

    Logits of the vocabulary are computed in chunks (`head_loss`), those of classes at once: the
    cross-entropy of ids, the binary cross-entropy of classes that are true, the squared error of
    values.

    Args:
        targets: as `Batch.targets`.
        options: as in `head_loss`; `label_smoothing` is for ids.
    """
    if isinstance(head, ClassificationHead):
        options.pop("count_correct", None)
        logits = head(states)
        if targets.dim() == 1:
            return cross_entropy(logits, targets, **options)
        assert not any(options.values()), options
        loss = sigmoid_cross_entropy if targets.dtype == torch.bool else squared_error
        return loss(logits, targets)
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


def unigram_entropy(targets: Iterable[Targets], enough: int = 50_000) -> float | None:
    """Entropy of the unigram distribution of targets, in nats per target; None for values.

    It is the loss of a model that knows only the frequency of each target. The estimate from a
    sample is biased towards lower values. That of classes that do not exclude each other is the
    mean over them.

    Args:
        targets: the targets of batches.
        enough: stop after the batch with this number of targets.
    """
    sample: list[np.ndarray] = []
    for batch_targets in targets:
        sample.append(batch_targets.numpy())
        if sum(map(len, sample)) >= enough:
            break
    known = np.concatenate(sample)
    if known.dtype.kind == "f":
        return None
    if known.ndim == 1:
        counts = np.unique(known, return_counts=True)[1][:, None]
    else:
        counts = np.stack([known.sum(0), (~known).sum(0)])
    frequencies = counts / counts.sum(0)
    terms = frequencies * np.log(np.maximum(frequencies, np.finfo(float).tiny))
    return float(-terms.sum(0).mean())


def token_metrics(sums: LossSum) -> dict[str, float]:
    """Perplexity, mean loss without label smoothing, and accuracy (if counted) per token."""
    values = {
        "perplexity": perplexity(float(sums.nll), sums.tokens),
        "loss": float(sums.nll) / sums.tokens,
    }
    if sums.correct is not None:
        values["token_accuracy"] = float(sums.correct) / sums.tokens
    return values
