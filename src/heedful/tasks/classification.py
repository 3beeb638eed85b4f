"""Learning to name the class of a text, or of a pair of texts: loss, table of errors, F1."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from heedful.data.sequences import LabelledBatch
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.parts.losses import LossSum, cross_entropy
from heedful.parts.tokens import Tokens
from heedful.tasks.masking import example_rng


def hide_words(
    batch: LabelledBatch, *, chance: float, tokenizer: Tokenizer, seed: int, epoch: int
) -> LabelledBatch:
    """The batch with each ordinary token hidden by chance (Iyyer et al. 2015, "word dropout").

    A token is hidden behind the mask, or is unknown where the tokenizer has none. What is hidden
    is a pure function of the seed, the epoch and the text's place in its store.
    """
    hidden_id = tokenizer.specials.mask_id
    if hidden_id is None:
        hidden_id = tokenizer.unk_id
    if hidden_id < 0:
        raise UserError("objective.word_dropout needs a mask or an unknown token in the tokenizer")
    ids = batch.ids.cpu().numpy().copy()
    special = np.isin(ids, sorted(tokenizer.special_ids))
    for row, index in enumerate(batch.indices.tolist()):
        drawn = example_rng(seed, epoch, index).random(int(batch.lengths[row])) < chance
        ids[row, : len(drawn)][drawn & ~special[row, : len(drawn)]] = hidden_id
    return replace(batch, ids=torch.from_numpy(ids).to(batch.ids.device))


def text_states(net: EncoderOnly, batch: LabelledBatch) -> Float[Tensor, "B T D"]:
    """The encoder's states of a batch.

    The segments of pairs go to nets that embed them. RoBERTa's table has one row, so that there
    both texts are of the same type.
    """
    types, table = batch.segments, net.embedding.types
    if types is not None and table is not None:
        types = types.clamp(max=table.num_embeddings - 1)
    return net.encode(Tokens.of(batch.ids, batch.lengths), types)


def label_logits(net: EncoderOnly, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B C"]:
    """What the head says of each text, by the state of its first token."""
    assert isinstance(net.head, ClassificationHead), type(net.head)
    return net.head(states[:, 0])


def label_loss(
    net: EncoderOnly,
    batch: LabelledBatch,
    *,
    states: Float[Tensor, "B T D"] | None = None,
    label_smoothing: float = 0.0,
) -> LossSum:
    """The class of each text (Devlin et al. 2019, sec. 4.1).

    Args:
        states: `text_states(net, batch)`, where the caller has them already.
    """
    if states is None:
        states = text_states(net, batch)
    return cross_entropy(label_logits(net, states), batch.labels, label_smoothing=label_smoothing)


def confusion(
    labels: Int64[np.ndarray, " N"], predictions: Int64[np.ndarray, " N"], num_labels: int
) -> Int64[np.ndarray, "C C"]:
    """How many texts of each label (row) were taken for each label (column)."""
    places = labels * num_labels + predictions
    return np.bincount(places, minlength=num_labels**2).reshape(num_labels, num_labels)


def accuracy(table: Int64[np.ndarray, "C C"]) -> float:
    """The share of a `confusion` that was named rightly."""
    return float(table.trace() / table.sum())


def macro_f1(table: Int64[np.ndarray, "C C"]) -> float:
    """The mean of all labels' F1, 2 · right / (texts of it + texts taken for it).

    Each label weighs alike, however rare. One that neither a text has nor any was taken for has no
    F1 and is left out.
    """
    right, both = table.diagonal(), table.sum(axis=0) + table.sum(axis=1)
    return float((2 * right[both > 0] / both[both > 0]).mean())
