"""Losses of batches, for training and as metrics, and scores of their targets."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from heedful.data.collate import Batch
from heedful.evaluation.metrics import perplexity
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.parts.losses import (
    LossSum,
    cross_entropy,
    head_loss,
    sigmoid_cross_entropy,
    squared_error,
)

Net = EncoderDecoder | DecoderOnly | EncoderOnly
# Distributions over the vocabulary in memory at a time. 128 distributions of 262,144 entries are
# 134 MB in fp32, and a matrix product of 128 rows is efficient.
SCORED_ROWS = 128
Targets = Int64[Tensor, " M"] | Bool[Tensor, "M C"] | Float[Tensor, "M C"]


def target_states(net: Net, batch: Batch) -> Float[Tensor, "M D"]:
    """The net's state for each target of a batch, to which its head can be applied.

    Token types are used by encoders with an embedding for them. RoBERTa's has one row, so that both
    texts of a pair have the same type.
    """
    if isinstance(net, EncoderDecoder):
        assert batch.source is not None
        states = net.states(batch.source, batch.tokens)
    elif isinstance(net, DecoderOnly):
        states = net.decode(batch.tokens)
    else:
        types, table = batch.types, net.embedding.types
        if types is not None and table is not None:
            types = types.clamp(max=table.num_embeddings - 1)
        states = net.encode(batch.tokens, types)
    return states.flatten(0, 1).index_select(0, batch.target_positions)


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


class TargetScores(NamedTuple):
    """Natural log-probability of each target, and True where it is the most probable token."""

    log_probs: Float[Tensor, " M"]
    correct: Bool[Tensor, " M"]


def score_targets(
    log_probs_of: Callable[[slice], Float[Tensor, "n V"]], targets: Int64[Tensor, " M"]
) -> TargetScores:
    """Scores of all targets, `SCORED_ROWS` at a time.

    Args:
        log_probs_of: function from a slice of the targets to the log-probabilities (n, V) of all
            tokens.
    """
    log_probs, correct = [], []
    for first in range(0, max(1, targets.size(0)), SCORED_ROWS):
        rows = slice(first, first + SCORED_ROWS)
        chunk, target = log_probs_of(rows), targets[rows]
        log_probs.append(chunk.gather(-1, target[:, None]).squeeze(-1))
        correct.append(chunk.argmax(-1) == target)
    return TargetScores(torch.cat(log_probs), torch.cat(correct))


def log_softmax(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """Log-probabilities, computed in fp32 for logits of lower precision."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
