"""The scale of a net by layer: of its weights, of its states, and of the gradient of a loss."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.insight.plots import MAX_INCHES, new_figure, plain
from heedful.insight.reading import evaluating
from heedful.insight.watching import Watch, stacks_of
from heedful.parts.losses import LossSum
from heedful.zoo.saved import trainable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scales = dict[str, float]
LossOfBatch = Callable[[Any, Batch], LossSum]
_STACK_PART = re.compile(r"(encoder|decoder)\.(?:blocks\.)?(\w+)")


@dataclass(frozen=True)
class LayerScales:
    """Scales of a net by the name of a layer: `embedding`, `decoder 0`, `decoder final_norm`, ….

    Attributes:
        states: root mean square of the states after an embedding or a block, over the real tokens.
        gradients: norm of the gradient of the mean loss by all trained parameters of a layer.
    """

    states: Scales
    gradients: Scales


@dataclass(frozen=True)
class RunScales:
    """The scales of a run's net by layer (L), at C checkpoints.

    Attributes:
        steps: of the checkpoints.
        layers: names of the layers, from the input to the output.
        weights: (C, L), root mean square of the entries of a layer's matrices that are trained; nan
            for a layer without.
        states: (C, L), root mean square of the states after an embedding or a block; nan for
            others. None: the run's data are missing.
        gradients: (C, L), norm of the gradient of the mean loss by a layer's parameters; nan for a
            layer that is not trained. None: the run's data are missing.
    """

    steps: tuple[int, ...]
    layers: tuple[str, ...]
    weights: Float[np.ndarray, "C L"]
    states: Float[np.ndarray, "C L"] | None
    gradients: Float[np.ndarray, "C L"] | None

    @classmethod
    def create(
        cls, steps: Sequence[int], weights: Sequence[Scales], measured: Sequence[LayerScales]
    ) -> "RunScales":
        """The scales of all checkpoints; `measured` is empty for a run without its data."""
        tables = [weights, [s.gradients for s in measured], [s.states for s in measured]]
        layers = sorted({name for table in tables for row in table for name in row}, key=_order)
        arrays = [
            np.array([[row.get(name, np.nan) for name in layers] for row in table])
            if table
            else None
            for table in tables
        ]
        assert arrays[0] is not None, "a run has at least one checkpoint here"
        return cls(tuple(steps), tuple(layers), arrays[0], arrays[2], arrays[1])

    def plot(self) -> "Figure":
        """A line over the layers for each checkpoint: weights, states, gradients."""
        figure, first = new_figure(len(self.layers), 8)
        first.remove()
        tables = {"rms of weights": self.weights, "rms of states": self.states,
                  "norm of gradients": self.gradients}  # fmt: skip
        shown = {name: table for name, table in tables.items() if table is not None}
        figure.set_figheight(min(MAX_INCHES, 3.2 * len(shown)))
        for axes, (name, table) in zip(
            np.atleast_1d(figure.subplots(len(shown), sharex=True)), shown.items(), strict=True
        ):
            for step, row in zip(self.steps, table, strict=True):
                axes.plot(range(len(row)), row, marker="o", markersize=3, label=f"step {step:,}")
            axes.set_ylabel(name)
        axes.set_xticks(range(len(self.layers)), [plain(name) for name in self.layers], rotation=90)
        axes.legend()
        return figure


def layer_scales(net: Any, batches: Sequence[Batch], loss: LossOfBatch = batch_loss) -> LayerScales:
    """Measure a net of any family on some batches, without dropout; the net is unchanged.

    Args:
        batches: on the device of the net.
        loss: sums over the targets of a batch, differentiable.

    Raises:
        UserError: no batches; a module that is no net of `heedful.models`.

    >>> import heedful
    >>> from heedful.data.collate import collate_texts
    >>> from heedful.data.columns import Sequences
    >>> model = heedful.load("runs/labels")
    >>> [ids] = model.encode(["the dog sat"])
    >>> texts = Sequences(np.array(ids), np.array([0, len(ids)]))
    >>> batch = collate_texts(texts, np.array([0]), pad_id=0, labels=np.array([1]))
    >>> next(iter(layer_scales(model.net, [batch]).states))
    'embedding'
    """
    if not batches:
        raise UserError("scales by layer need at least one batch")
    parameters, stacks = trainable(net), stacks_of(net)
    names = [f"{stack}.{part}.state" for stack in stacks for part in ("embedding", "*.feedforward")]
    squares: dict[str, list[float]] = {}
    sums = [torch.zeros_like(weight) for weight in parameters.values()]
    count = sum(batch.num_targets for batch in batches)
    with evaluating(net), torch.enable_grad():
        for batch in batches:
            with Watch(net, names) as watched:
                total = loss(net, batch).loss / max(1, count)
            gradients = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
            for place, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    place += gradient
            for name, state in watched.items():
                stack = name.partition(".")[0]
                is_source = stack == "encoder" and batch.source is not None
                tokens = batch.source if is_source else batch.tokens
                assert tokens is not None
                real = state.detach()[tokens.real].double()
                _add(
                    squares,
                    _layer_of_state(name, len(stacks)),
                    float(real.square().sum()),
                    real.numel(),
                )
    norms: dict[str, float] = {}
    for name, gradient in zip(parameters, sums, strict=True):
        layer = layer_of(name)
        norms[layer] = norms.get(layer, 0.0) + float(gradient.double().square().sum())
    return LayerScales(_roots(squares), {layer: square**0.5 for layer, square in norms.items()})


def weight_scales(tensors: Mapping[str, Tensor]) -> Scales:
    """Root mean square of the entries of the matrices of each layer, by names as in a net."""
    squares: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            _add(squares, layer_of(name), float(tensor.double().square().sum()), tensor.numel())
    return _roots(squares)


def layer_of(name: str) -> str:
    """The layer of a parameter: `decoder 0`, `decoder final_norm`, `embedding`, `head`."""
    part = _STACK_PART.match(name)
    return f"{part[1]} {part[2]}" if part else name.partition(".")[0]


def _order(layer: str) -> tuple[int, float, str]:
    """The order of layers from the input to the output."""
    first, _, part = layer.partition(" ")
    firsts = ("embedding", "src_embedding", "encoder", "tgt_embedding", "decoder")
    place = firsts.index(first) if first in firsts else len(firsts)
    # Modules that the blocks of a stack share come before its blocks, the final norm after them.
    number = float(part) if part.isdigit() else math.inf if part == "final_norm" else -1
    return place, number, layer


def _layer_of_state(name: str, num_stacks: int) -> str:
    """The layer that computes a watched state."""
    stack, part, *_ = name.split(".")
    if part != "embedding":
        return f"{stack} {part}"
    prefix = {"encoder": "src_", "decoder": "tgt_"}[stack] if num_stacks > 1 else ""
    return f"{prefix}embedding"


def _add(sums: dict[str, list[float]], layer: str, square: float, count: int) -> None:
    pair = sums.setdefault(layer, [0.0, 0])
    pair[0] += square
    pair[1] += count


def _roots(sums: dict[str, list[float]]) -> Scales:
    return {layer: (square / max(1, count)) ** 0.5 for layer, (square, count) in sums.items()}
