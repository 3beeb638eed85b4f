"""Activation patching: the effect of states from one text on the output of another."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from heedful.errors import UserError
from heedful.insight.attribution import Output, choose_output
from heedful.insight.plots import heat_map, new_figure
from heedful.insight.reading import Reading, Text, evaluating, read
from heedful.insight.watching import Watch, stacks_of
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Put each state of another text into the pass of a text, one at a time (Meng et al. 2022).

    A large effect shows where the information is on which the output depends.

    Args:
        other: a text of as many tokens.
        target: of an encoder-decoder, for both texts; None: the output for `text`.
        stack: `encoder` or `decoder`; None: the encoder where there is one.
        position, output: as of `attributions`.
        text, options: as of `attention`.

    Raises:
        UserError: texts of different lengths; no such stack; as of `attributions`.
    """
    reading = read(model, text, target, **options)
    if "target" in reading.ids and target is None:
        target = [token for token in reading.outputs if token is not None]
    others = read(model, other, target, **options)
    stacks = stacks_of(reading.net)
    stack = next(iter(stacks)) if stack is None else stack
    if stack not in stacks:
        raise UserError(f"the model has the stack {' and '.join(stacks)}, not {stack}")
    side = reading.stack_side(stack)
    tokens, other_tokens = reading.tokens[side], others.tokens[side]
    if len(tokens) != len(other_tokens):
        raise UserError(
            f"the texts have {len(tokens)} and {len(other_tokens)} tokens; patching needs texts of "
            "as many tokens, such as one with another name or number"
        )
    names = [
        f"{stack}.embedding.state",
        *(f"{stack}.{layer}.feedforward.state" for layer in range(len(stacks[stack].blocks))),
    ]
    with evaluating(reading.net):
        chosen = choose_output(reading, position, output)
        [value] = _log_probs(reading, chosen, 1)
        with Watch(reading.net, names) as watched:
            [other_value] = _log_probs(others, chosen, 1)
        rows = [_patched(reading, chosen, name, watched[name], len(tokens)) for name in names]
    layers = ("embedding", *(f"layer {layer}" for layer in range(len(names) - 1)))
    return Patching(chosen, stack, layers, tokens, other_tokens, np.stack(rows), value, other_value)


def _patched(
    reading: Reading, output: Output, name: str, states: torch.Tensor, length: int
) -> np.ndarray:
    """Log-probabilities (T) where row t of a batch has the other text's state at position t."""
    is_patched = torch.eye(length, dtype=torch.bool, device=states.device)[:, :, None]
    # No name is recorded: the hooks only replace.
    with Watch(reading.net, ()) as watch:
        watch.change(name, lambda own: torch.where(is_patched, states, own.expand(length, -1, -1)))
        return np.array(_log_probs(reading, output, length))


def _log_probs(reading: Reading, output: Output, rows: int) -> list[float]:
    """The log-probability of the output in each of `rows` equal texts."""
    embedded = {side: reading.embed(side).expand(rows, -1, -1) for side in reading.ids}
    logits = reading.logits(embedded)[:, output.position].double()
    values: list[float] = logits.log_softmax(-1)[:, output.id].tolist()
    return values
