"""Learning to go on with a text: the loss of a batch of windows."""

from heedful.data.packing import PackedBatch
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.losses import LossSum, head_loss
from heedful.parts.tokens import Tokens


def window_loss(
    net: DecoderOnly,
    batch: PackedBatch,
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """Each scored target from the tokens before it in its own document."""
    states = net.decode(Tokens.of(batch.ids, batch.lengths, segments=batch.documents))
    return head_loss(
        net.head,
        states[batch.scored],
        batch.targets[batch.scored],
        label_smoothing=label_smoothing,
        count_correct=count_correct,
    )
