"""Learning to go on with a text: the loss of a batch of windows."""

from heedful.data.packing import PackedBatch
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.losses import LossSum, linear_cross_entropy


def window_loss(
    net: DecoderOnly,
    batch: PackedBatch,
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """Each scored target from the tokens before it in its own document."""
    states = net.hidden(batch.ids, batch.lengths, documents=batch.documents)
    return linear_cross_entropy(
        net.head.states(states[batch.scored]),
        net.head.weight,
        batch.targets[batch.scored],
        net.head.bias,
        label_smoothing=label_smoothing,
        count_correct=count_correct,
    )
