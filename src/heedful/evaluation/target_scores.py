"""A net's states at a batch's targets, and the scores of the targets; imports no loss function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from heedful.data.collate import Batch
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly

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
    return states.flatten(0, 1).index_select(0, batch.target_positions)
