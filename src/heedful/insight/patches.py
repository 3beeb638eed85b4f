"""Activation patching: the effect of states from one text on the output of another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.insight.attribution import Output, choose_output
from heedful.insight.plots import heat_map, new_figure
from heedful.insight.reading import Reading, Text, evaluating, read
from heedful.insight.watching import Watch, stacks_of
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 64  # of a batch of patched texts


@dataclass(frozen=True)
class Patching:
    """The log-probability of one output where one state of a text is replaced.

    Attributes:
        output: the output that is measured.
        stack: `encoder` or `decoder`, whose states are replaced.
        layers: names of the rows: "embedding", "layer 0", ….
        tokens, other_tokens: tokens of the columns, in the text and in the other one.
        log_probs: (L + 1, T), with the state after that layer at that position from the other text.
        value, other_value: the log-probability for each text, unchanged.
    """

    output: Output
    stack: str
    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    other_tokens: tuple[str, ...]
    log_probs: Float[np.ndarray, "R T"]
    value: float
    other_value: float

    @property
    def effects(self) -> Float[np.ndarray, "R T"]:
        """The change of the log-probability by each patch, in nats."""
        return self.log_probs - self.value

    def plot(self) -> "Figure":
        """A heat map of the effects."""
        figure, axes = new_figure(len(self.tokens), len(self.layers), cell=0.5)
        names = [
            token if token == other else f"{token} / {other}"
            for token, other in zip(self.tokens, self.other_tokens, strict=True)
        ]
        title = f"effect on log p({self.output.name}) of a state of the {self.stack}"
        heat_map(axes, self.effects, self.layers, names, title, diverging=True)
        return figure


def patching(
    model: SavedModel,
    text: Text,
    other: Text,
    target: Text | None = None,
    *,
    stack: str | None = None,
    position: int | None = None,
    output: str | int | None = None,
    **options: Any,
) -> Patching:
    """Activation patching: replace one state of a text's forward pass at a time by that of another
    text (Meng et al. 2022).

    A large effect shows where the information is on which the output depends.

    Args:
        other: a text with the same number of tokens.
        target: of an encoder-decoder, for both texts; None: the output for `text`.
        stack: `encoder` or `decoder`; None: the encoder where there is one.
        position, output: as in `attributions`.
        text, options: as in `attention`.

    Raises:
        UserError: texts of different lengths, or the same text; no such stack; a regression; as
            in `attributions`.

    >>> import heedful
    >>> from heedful import insight
    >>> model = heedful.load("runs/novel")
    >>> patched = insight.patching(model, "the dog sat", "the cat sat")
    >>> len(patched.effects) == len(patched.layers)
    True
    """
    reading = read(model, text, target, **options)
    stacks = stacks_of(reading.net)
    stack = next(iter(stacks)) if stack is None else stack
    if stack not in stacks:
        raise UserError(f"the model has the stack {' and '.join(stacks)}, not {stack}")
    others = read_other(reading, other, **options)
    [patched] = patch_outputs(reading, others, stack, [(position, output)])
    return patched


def read_other(reading: Reading, other: Text, **options: Any) -> Reading:
    """The other text of a patching, with the target of the first one.

    Raises:
        UserError: a text of another length, or the same text; as in `read`.
    """
    target = None
    if "target" in reading.ids:
        target = [token for token in reading.outputs if token is not None]
    others = read(reading.model, other, target, **options)
    side = next(iter(reading.ids))
    counts = [len(row.ids[side]) for row in (reading, others)]
    if counts[0] != counts[1]:
        raise UserError(
            f"the texts have {counts[0]} and {counts[1]} tokens; patching needs texts of as many "
            "tokens, such as one with another name or number"
        )
    if reading.ids == others.ids:
        raise UserError("the texts have the same tokens; to patch, give one with other tokens")
    return others


def patch_outputs(
    reading: Reading,
    others: Reading,
    stack: str,
    chosen: Sequence[tuple[int | None, str | int | None]],
) -> list[Patching]:
    """The patching of several outputs, each a position and an output as in `attributions`.

    A pass with a replaced state gives the log-probabilities of all outputs.

    Raises:
        UserError: as in `attributions`.
    """
    side, blocks = reading.stack_side(stack), len(stacks_of(reading.net)[stack].blocks)
    names = [
        f"{stack}.embedding.state",
        *(f"{stack}.{layer}.feedforward.state" for layer in range(blocks)),
    ]
    with evaluating(reading.net):
        outputs = [choose_output(reading, *choice) for choice in chosen]
        own, values = _watched(reading, outputs, names)
        other, other_values = _watched(others, outputs, names)
        tables = []
        for name in names:
            # A state that equals the other text's has no effect.
            changed = (own[name] != other[name]).any(-1).nonzero()[:, 0]
            table = np.tile(values[:, None], len(own[name]))
            for columns in changed.split(_ROWS):
                table[:, columns.cpu().numpy()] = _patched(
                    reading, outputs, name, other[name], columns
                )
            tables.append(table)
    layers = ("embedding", *(f"layer {layer}" for layer in range(blocks)))
    log_probs = np.stack(tables, axis=1)
    return [
        Patching(
            output, stack, layers, reading.tokens[side], others.tokens[side],
            log_probs[index], float(values[index]), float(other_values[index]),
        )
        for index, output in enumerate(outputs)
    ]  # fmt: skip


def _watched(
    reading: Reading, outputs: Sequence[Output], names: Sequence[str]
) -> tuple[dict[str, Float[Tensor, "T D"]], Float[np.ndarray, "O"]]:
    """States of a text by name, and the log-probability of each output."""
    with Watch(reading.net, names) as watched:
        values = _log_probs(reading, outputs, 1)[:, 0]
    return {name: watched[name][0] for name in names}, values


def _patched(
    reading: Reading,
    outputs: Sequence[Output],
    name: str,
    states: Float[Tensor, "T D"],
    columns: Int[Tensor, "N"],
) -> Float[np.ndarray, "O N"]:
    """Log-probabilities where row n of a batch has the other state at position `columns[n]`."""
    positions = torch.arange(len(states), device=states.device)
    is_patched = (columns[:, None] == positions)[:, :, None]
    # No name is recorded: the hooks only replace.
    with Watch(reading.net, ()) as watch:
        watch.change(name, lambda own: torch.where(is_patched, states, own))
        return _log_probs(reading, outputs, len(columns))


def _log_probs(reading: Reading, outputs: Sequence[Output], rows: int) -> Float[np.ndarray, "O N"]:
    """The log-probability of each output in each of `rows` equal texts."""
    embedded = {side: reading.embed(side).expand(rows, -1, -1) for side in reading.ids}
    states = reading.states(embedded)
    values = []
    for output in outputs:
        logits = reading.head_logits(states[:, output.position : output.position + 1])[:, 0]
        values.append(reading.log_probs(logits.double())[:, output.id].cpu().numpy())
    return np.stack(values)
