"""Learning to say which tokens were hidden: a masked batch of texts, and its loss."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor

from heedful.data.sequences import collate_sequences
from heedful.data.store import IdStore
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import MaskedTokenHead
from heedful.parts.losses import LossSum, head_loss
from heedful.parts.tokens import Tokens
from heedful.tasks.masking import Masking, example_rng, mask_ids


@dataclass
class MaskedBatch:
    """Texts with some of their tokens hidden, padded on the right.

    What is padding is told by `lengths`, what is to be said by `selected`, neither by ids.
    """

    ids: Int64[Tensor, "B T"]
    lengths: Int64[Tensor, " B"]
    selected: Bool[Tensor, "B T"]
    targets: Int64[Tensor, " M"]  # what stood at the selected places, row by row
    indices: Int64[np.ndarray, " B"]
    num_tokens: int  # that are not padding

    @property
    def num_targets(self) -> int:
        """What a loss sums over: the selected places."""
        return self.targets.numel()


def masked_batch(
    rows: IdStore,
    indices: Integer[np.ndarray, " B"],
    *,
    tokenizer: Tokenizer,
    masking: Masking,
    seed: int,
    epoch: int,
    device: torch.device | str | None = None,
) -> MaskedBatch:
    """The rows at `indices`, each masked by what is drawn from (seed, epoch, its own index) alone.

    Raises:
        UserError: the tokenizer has no mask.
    """
    batch = collate_sequences(rows, indices, pad_id=tokenizer.pad_id)
    ids = batch.ids.numpy()
    hidden, selected = ids.copy(), np.zeros(ids.shape, dtype=np.bool_)
    mask_id = mask_id_of(tokenizer)
    for row, (index, length) in enumerate(
        zip(indices.tolist(), batch.lengths.tolist(), strict=True)
    ):
        text = ids[row, :length]
        starts = np.array(tokenizer.word_starts(text.tolist())) if masking.whole_word else None
        hidden[row, :length], selected[row, :length] = mask_ids(
            text,
            rng=example_rng(seed, epoch, index),
            masking=masking,
            mask_id=mask_id,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            word_starts=starts,
        )
    return MaskedBatch(
        ids=torch.from_numpy(hidden).to(device),
        lengths=batch.lengths.to(device),
        selected=torch.from_numpy(selected).to(device),
        targets=torch.from_numpy(ids[selected]).to(device),
        indices=batch.indices,
        num_tokens=batch.num_tokens,
    )


def mask_id_of(tokenizer: Tokenizer) -> int:
    """The id that stands for a hidden token; raises UserError where the tokenizer has none."""
    if tokenizer.specials.mask_id is None:
        raise UserError(
            "this model's tokenizer has no mask, so none of its words can be hidden; start from a"
            " model that was trained as a masked language model"
        )
    return tokenizer.specials.mask_id


def token_states(net: EncoderOnly, batch: MaskedBatch) -> Float[Tensor, "B T D"]:
    """The encoder's states of a batch: what the loss is formed of."""
    return net.encode(Tokens.of(batch.ids, batch.lengths))


def masked_loss(
    net: EncoderOnly,
    batch: MaskedBatch,
    *,
    states: Float[Tensor, "B T D"] | None = None,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """What stood at each selected place, from the whole text around it (Devlin et al. 2019, 3.1).

    Logits are formed at the selected places only.

    Args:
        states: `token_states(net, batch)`, where the caller has them already.
    """
    assert isinstance(net.head, MaskedTokenHead), type(net.head)
    if states is None:
        states = token_states(net, batch)
    return head_loss(
        net.head,
        states[batch.selected],
        batch.targets,
        label_smoothing=label_smoothing,
        count_correct=count_correct,
    )


def fill_in(net: EncoderOnly, batch: MaskedBatch, never: frozenset[int]) -> Int64[Tensor, "B T"]:
    """The texts with the likeliest token at each selected place, none of those in `never`."""
    assert isinstance(net.head, MaskedTokenHead), type(net.head)
    logits = net.head(token_states(net, batch)[batch.selected])
    logits[:, sorted(never)] = -torch.inf
    filled = batch.ids.clone()
    filled[batch.selected] = logits.argmax(-1)
    return filled
