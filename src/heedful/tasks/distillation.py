"""Learning from a larger model: losses against a teacher's outputs, and a student of its layers.

Sanh et al. 2019, "DistilBERT, a distilled version of BERT", sec. 2 and 3; for texts that a model
writes Kim and Rush 2016, "Sequence-Level Knowledge Distillation", sec. 3.1, whose word-level loss
is the first two terms.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heedful.config import Distillation
from heedful.data.batches import PairBatch
from heedful.data.packing import PackedBatch
from heedful.data.sequences import LabelledBatch
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead, OutputHead
from heedful.parts.losses import LossSum, cross_entropy
from heedful.parts.tokens import Tokens, padding_mask
from heedful.tasks.classification import text_states
from heedful.tasks.masked_lm import MaskedBatch, token_states
from heedful.zoo.saved import weights_of

# Logits of each of the two models that are formed at once; both are read several times.
_CHUNK_ELEMENTS = 5_000_000
_IN_BLOCK = re.compile(r"(.*\bblocks)\.(\d+)\.(.+)")

Read = Callable[[nn.Module], Float[Tensor, "N D"]]


def soft_target_loss(
    student: Float[Tensor, "N C"], teacher: Float[Tensor, "N C"], temperature: float
) -> Float[Tensor, ""]:
    """T² · Σ KL(softmax(teacher / T) ‖ softmax(student / T)), from logits, summed over N places.

    Gradients of soft targets shrink with 1/T²; the factor makes up for that, so that weights need
    no change with T (Hinton et al. 2015, sec. 2). It differs from their cross-entropy by the
    teacher's entropy, which has no gradient, and is 0 where both say the same.
    """
    wanted = (teacher.float() / temperature).log_softmax(-1)
    said = (student.float() / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(said, wanted, reduction="sum", log_target=True)


def cosine_loss(student: Float[Tensor, "N D"], teacher: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
    """Σ 1 - cos(student, teacher), summed over N states: their directions are to be the same."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).sum()


def distilled_loss(
    net: nn.Module,
    teacher: nn.Module,
    read: Read,
    targets: Int[Tensor, "N"],
    settings: Distillation,
    *,
    label_smoothing: float = 0.0,
) -> LossSum:
    """soft_weight · soft targets + hard_weight · targets + cosine_weight · cosine, all sums.

    The three are over the same N places, those of the task's own loss. Logits are formed some at a
    time, and once more on the way back.

    Args:
        read: (net) -> the states at those places, on which the net's head stands.
        teacher: in eval mode; gets no gradient.
        label_smoothing: of the targets alone.
    """
    states = read(net)
    with torch.no_grad():
        taught = read(teacher)

    def part_loss(
        states: Float[Tensor, "n D"], taught: Float[Tensor, "n E"], targets: Int[Tensor, "n"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = net.head(states)  # type: ignore[operator]
        hard = cross_entropy(logits, targets, label_smoothing=label_smoothing)
        loss = settings.hard_weight * hard.loss
        if settings.soft_weight:
            with torch.no_grad():
                wanted = teacher.head(taught)  # type: ignore[operator]
            soft = soft_target_loss(logits, wanted, settings.temperature)
            loss = loss + settings.soft_weight * soft
        if settings.cosine_weight:
            loss = loss + settings.cosine_weight * cosine_loss(states, taught)
        return loss, hard.nll, hard.correct

    size = max(1, _CHUNK_ELEMENTS // _num_classes(net))
    chunks = list(zip(states.split(size), taught.split(size), targets.split(size), strict=True))
    if len(chunks) == 1:
        found = [part_loss(*chunks[0])]
    else:
        found = [checkpoint(part_loss, *chunk, use_reentrant=False) for chunk in chunks]
    loss, nll, correct = (torch.stack(column).sum() for column in zip(*found, strict=True))
    return LossSum(loss, nll.detach(), correct, targets.numel())


def distilled_pairs(
    net: EncoderDecoder,
    teacher: EncoderDecoder,
    batch: PairBatch,
    settings: Distillation,
    *,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`tasks.translation.pair_loss` with a teacher: both hear the reference up to each token."""
    real = padding_mask(batch.tgt_lengths, batch.tgt_in.size(1))

    def read(model: nn.Module) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        source = Tokens.of(batch.src, batch.src_lengths)
        return model.states(source, Tokens.of(batch.tgt_in, batch.tgt_lengths))[real]

    return distilled_loss(
        net, teacher, read, batch.tgt_out[real], settings, label_smoothing=label_smoothing
    )


def distilled_windows(
    net: DecoderOnly,
    teacher: DecoderOnly,
    batch: PackedBatch,
    settings: Distillation,
    *,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`tasks.language_modelling.window_loss` with a teacher."""
    scored: Bool[Tensor, "B T"] = batch.scored

    def read(model: nn.Module) -> Tensor:
        assert isinstance(model, DecoderOnly)
        return model.decode(Tokens.of(batch.ids, batch.lengths, segments=batch.documents))[scored]

    return distilled_loss(
        net, teacher, read, batch.targets[scored], settings, label_smoothing=label_smoothing
    )


def distilled_masked(
    net: EncoderOnly,
    teacher: EncoderOnly,
    batch: MaskedBatch,
    settings: Distillation,
    *,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`tasks.masked_lm.masked_loss` with a teacher, at the selected places alone."""

    def read(model: nn.Module) -> Tensor:
        assert isinstance(model, EncoderOnly)
        return token_states(model, batch)[batch.selected]

    return distilled_loss(
        net, teacher, read, batch.targets, settings, label_smoothing=label_smoothing
    )


def distilled_labels(
    net: EncoderOnly,
    teacher: EncoderOnly,
    batch: LabelledBatch,
    settings: Distillation,
    *,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`tasks.classification.label_loss` with a teacher; states are those of the first tokens."""

    def read(model: nn.Module) -> Tensor:
        assert isinstance(model, EncoderOnly)
        return text_states(model, batch)[:, 0]

    return distilled_loss(
        net, teacher, read, batch.labels, settings, label_smoothing=label_smoothing
    )


@dataclass(frozen=True)
class CopiedLayers:
    """What a student took from its teacher.

    Attributes:
        layers: by stack, the teacher's layer that each of the student's own began as.
        copied, drawn: names of the student's tensors that are the teacher's, and of the others.
    """

    layers: dict[str, tuple[int, ...]]
    copied: tuple[str, ...]
    drawn: tuple[str, ...]

    @property
    def num_in_layers(self) -> int:
        """Copied tensors that are of a layer."""
        return sum(_IN_BLOCK.fullmatch(name) is not None for name in self.copied)


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module) -> CopiedLayers:
    """Begin a student as every so-manieth layer of its teacher, and all of what is no layer.

    Of L teacher's layers the student's layer i of N is ⌊i · L / N⌋: every second one, from the
    first, where N is half of L (Sanh et al. 2019, sec. 3). Tensors go by name and shape, a layer's
    by the name of its stack and its own number.

    Raises:
        ValueError: a stack of the student has more layers than the teacher's.
    """
    own, given = weights_of(student), weights_of(teacher)
    depths, known = _depths(own), _depths(given)
    layers = {}
    for stack, depth in depths.items():
        if depth > known.get(stack, 0):
            raise ValueError(f"{depth} layers in {stack}, the teacher {known.get(stack, 0)}")
        layers[stack] = tuple(index * known[stack] // depth for index in range(depth))
    copied = []
    for name, weight in own.items():
        place = _IN_BLOCK.fullmatch(name)
        origin = name
        if place is not None:
            stack, index, rest = place.groups()
            origin = f"{stack}.{layers[stack][int(index)]}.{rest}"
        if origin in given and given[origin].shape == weight.shape:
            weight.copy_(given[origin])
            copied.append(name)
    drawn = sorted(own.keys() - set(copied))
    return CopiedLayers(layers, tuple(sorted(copied)), tuple(drawn))


def _depths(names: dict[str, Tensor]) -> dict[str, int]:
    """How many layers each stack has."""
    found: dict[str, int] = {}
    for name in names:
        place = _IN_BLOCK.fullmatch(name)
        if place is not None:
            found[place[1]] = max(found.get(place[1], 0), int(place[2]) + 1)
    return found


def _num_classes(net: nn.Module) -> int:
    """How many logits the head gives."""
    head = net.head
    if isinstance(head, ClassificationHead):
        return head.labels.out_features
    assert isinstance(head, OutputHead), type(head)
    return head.out.out_features
