"""Learning to turn one text into another: the loss of a batch of pairs."""

from heedful.data.batches import PairBatch
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.losses import LossSum, head_loss
from heedful.parts.tokens import Tokens, padding_mask


def pair_loss(
    net: EncoderDecoder,
    batch: PairBatch,
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """Teacher forcing: each target token from the source and the target tokens before it.

    Padding never reaches the output projection: logits are formed at real targets only.
    """
    source = Tokens.of(batch.src, batch.src_lengths)
    states = net.states(source, Tokens.of(batch.tgt_in, batch.tgt_lengths))
    real = padding_mask(batch.tgt_lengths, batch.tgt_in.size(1))
    return head_loss(
        net.head,
        states[real],
        batch.tgt_out[real],
        label_smoothing=label_smoothing,
        count_correct=count_correct,
    )
