"""Likelihoods of a batch's targets: per target, and summed over batches."""

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
from heedful.parts.losses import LossSum, cross_entropy, head_loss

Net = EncoderDecoder | DecoderOnly | EncoderOnly
# Distributions over the vocabulary that are formed at once: 128 of 262,144 entries are 134 MB of
# fp32, and enough rows for a matrix product to be efficient.
SCORED_ROWS = 128


class TargetScores(NamedTuple):
    """Natural log-probability of each target, and whether it is the most likely entry."""

    log_probs: Float[Tensor, " M"]
    correct: Bool[Tensor, " M"]


def score_targets(
    log_probs_of: Callable[[slice], Float[Tensor, "n V"]], targets: Int64[Tensor, " M"]
) -> TargetScores:
    """Scores of all targets; at most `SCORED_ROWS` distributions are in memory at a time.

    Args:
        log_probs_of: log-probabilities of all entries for a slice of the targets.
    """
    log_probs, correct = [], []
    for first in range(0, max(1, targets.size(0)), SCORED_ROWS):
        rows = slice(first, first + SCORED_ROWS)
        chunk, target = log_probs_of(rows), targets[rows]
        log_probs.append(chunk.gather(-1, target[:, None]).squeeze(-1))
        correct.append(chunk.argmax(-1) == target)
    return TargetScores(torch.cat(log_probs), torch.cat(correct))


def log_softmax(logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """Log-probabilities in fp32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def target_states(net: Net, batch: Batch) -> Float[Tensor, "M D"]:
    """The net's state for each target of a batch; its head makes logits of them.

    The types of pairs of texts go to nets that embed them. RoBERTa's table has one row, so that
    there both texts are of the same type.
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
    return states.flatten(0, 1).index_select(0, batch.places)


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


def total(parts: Sequence[LossSum]) -> LossSum:
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


def averages(found: LossSum) -> dict[str, float]:
    """Perplexity and loss (without label smoothing) of sums over tokens, and accuracy where correct
    tokens were counted."""
    values = {
        "perplexity": perplexity(float(found.nll), found.tokens),
        "loss": float(found.nll) / found.tokens,
    }
    if found.correct is not None:
        values["token_accuracy"] = float(found.correct) / found.tokens
    return values
