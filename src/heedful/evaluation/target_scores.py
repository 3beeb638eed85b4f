"""States of a net at the targets of a batch, and log-probabilities of the targets."""

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
# Distributions over the vocabulary in memory at a time. 128 distributions of 262,144 entries are
# 134 MB in fp32, and a matrix product of 128 rows is efficient.
SCORED_ROWS = 128


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
