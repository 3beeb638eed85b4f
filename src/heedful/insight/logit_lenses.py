"""Logit lens: the output that each layer would give, through the final norm and the head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError, describe
from heedful.insight.plots import heat_map, new_figure, plain
from heedful.insight.reading import Reading, Text, evaluating, read
from heedful.insight.watching import Watch, stacks_of
from heedful.parts.heads import ClassificationHead
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LogitLens:
    """Outputs of the states after the embedding (row 0) and after each of L layers.

    Attributes:
        layers: names of the rows: "embedding", "layer 0", ….
        positions: tokens of the columns; the first token only for a classifier, whose head reads
            that position.
        ids: (L + 1, P, k), the most probable outputs, best first.
        names: the same as pieces, or as labels of the classes.
        probabilities: (L + 1, P, k).
        ranks: (L + 1, P), rank of the last layer's most probable output; 1 is the most probable.
        final_probabilities: (L + 1, P), the probability of that output.
    """

    layers: tuple[str, ...]
    positions: tuple[str, ...]
    ids: Int[np.ndarray, "R P k"]
    names: tuple[tuple[tuple[str, ...], ...], ...]
    probabilities: Float[np.ndarray, "R P k"]
    ranks: Int[np.ndarray, "R P"]
    final_probabilities: Float[np.ndarray, "R P"]

    def plot(self) -> "Figure":
        """A heat map of the largest probability, with the most probable token in each cell."""
        figure, axes = new_figure(len(self.positions), len(self.layers), cell=0.7)
        heat_map(
            axes,
            self.probabilities[..., 0],
            self.layers,
            self.positions,
            "logit lens",
            low=0,
            high=1,
        )
        for row, names in enumerate(self.names):
            for column, cell in enumerate(names):
                is_dark = self.probabilities[row, column, 0] > 0.6
                axes.text(
                    column, row, plain(cell[0][:8]),
                    ha="center", va="center", fontsize=7, color="white" if is_dark else "black",
                )  # fmt: skip
        return figure


def logit_lens(
    model: SavedModel, text: Text, target: Text | None = None, *, top_k: int = 5, **options: Any
) -> LogitLens:
    """Logit lens (nostalgebraist 2020): the most probable outputs of every layer at each position.

    Of an encoder-decoder these are the layers of the decoder. The states of a layer are put through
    the final norm of the stack and the output head, so that the last row has the model's own
    probabilities.

    Args:
        top_k: outputs for each position, at most all.
        text, target, options: as in `attention`.

    Raises:
        UserError: a model without an output head, or a regression; `top_k` below 1; as in
            `attention`.

    >>> import heedful
    >>> from heedful import insight
    >>> lens = insight.logit_lens(heedful.load("runs/novel"), "the dog sat", top_k=3)
    >>> lens.layers[0], lens.ids.shape[-1]
    ('embedding', 3)
    """
    if not isinstance(top_k, int) or top_k < 1:
        raise UserError(f"top_k must be at least 1, not {describe(top_k)}")
    reading = read(model, text, target, **options)
    net = reading.net
    stack_name = [*stacks_of(net)][-1]
    stack = stacks_of(net)[stack_name]
    watched_names = [f"{stack_name}.embedding.state", f"{stack_name}.*.feedforward.state"]
    with evaluating(net), Watch(net, watched_names) as watched:
        final = reading.logits()[0]
        best = final.argmax(-1)
        rows = [
            _read_state(reading, reading.head_logits(stack.final_norm(state))[0], best, top_k)
            for state in watched.values()
        ]
    ids, probabilities, ranks, finals = (np.stack(column) for column in zip(*rows, strict=True))
    positions = reading.tokens[reading.output_side]
    if isinstance(net.head, ClassificationHead):
        positions = positions[:1]
    names = tuple(tuple(reading.output_names(cell.tolist()) for cell in layer) for layer in ids)
    layers = ("embedding", *(f"layer {index}" for index in range(len(rows) - 1)))
    return LogitLens(layers, positions, ids, names, probabilities, ranks, finals)


def _read_state(
    reading: Reading, logits: Tensor, best: Tensor, top_k: int
) -> tuple[np.ndarray, ...]:
    """Ids and probabilities of the most probable outputs, and rank and probability of `best`."""
    exact = logits.float() if logits.dtype.itemsize < 4 else logits
    probabilities = reading.log_probs(exact).exp()
    top = probabilities.topk(min(top_k, probabilities.size(-1)), dim=-1)
    best_logits = logits.gather(-1, best[:, None])
    ranks = (logits > best_logits).sum(-1) + 1
    share = probabilities.gather(-1, best[:, None])[:, 0]
    return tuple(part.cpu().numpy() for part in (top.indices, top.values, ranks, share))
