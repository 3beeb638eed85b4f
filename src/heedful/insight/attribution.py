"""Attributions: how much each input token contributes to one output, by two methods."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import UserError, describe
from heedful.insight.plots import new_figure, plain
from heedful.insight.reading import Reading, Side, Text, check_index, evaluating, read
from heedful.parts.heads import ClassificationHead
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["integrated_gradients", "occlusion"]
Baseline = Literal["zero", "mean"]
Vectors = Mapping[Side, Float[Tensor, "T D"]]
_NODES = 8  # of the Gauss-Legendre rule of one interval
_ROWS = 64  # of a batch of occluded texts


class Output(NamedTuple):
    """One output of a net.

    Attributes:
        position: index of the position whose logits are read.
        id: index of the logit: a token of the vocabulary, or a class.
        name: the token as text, or the label.
    """

    position: int
    id: int
    name: str


@dataclass(frozen=True)
class Attributions:
    """The contributions of all input tokens to one logit.

    Attributes:
        output: the output that they explain.
        tokens: by side, the tokens that the net reads.
        scores: by side, for each token its contribution to the logit; negative ones lower it.
        value: the logit.
        baseline_value: the logit of the baseline, whose token embeddings are all equal.
        convergence_error: of integrated gradients: |Σ scores - (value - baseline_value)|; None for
            occlusion, whose scores need not sum to the difference.
        num_passes: texts that were run forward.
    """

    method: Method
    output: Output
    tokens: dict[Side, tuple[str, ...]]
    scores: dict[Side, Float[np.ndarray, " T"]]
    value: float
    baseline_value: float
    convergence_error: float | None
    num_passes: int

    def plot(self) -> "Figure":
        """Bars, one for each token."""
        names = [plain(name) for row in self.tokens.values() for name in row]
        values = np.concatenate([*self.scores.values()])
        figure, axes = new_figure(len(names), 4)
        axes.bar(range(len(names)), values, color=np.where(values < 0, "#b93a22", "#2563c9"))
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_ylabel("contribution to the logit")
        axes.set_title(plain(f"{self.method.replace('_', ' ')} for {self.output.name}"))
        return figure


def attributions(
    model: SavedModel,
    text: Text,
    target: Text | None = None,
    *,
    position: int | None = None,
    output: str | int | None = None,
    method: Method = "integrated_gradients",
    baseline: Baseline = "mean",
    tolerance: float = 1e-3,
    **options: Any,
) -> Attributions:
    """The contribution of each token of a text to the logit of one output.

    * `integrated_gradients` (Sundararajan et al. 2017, equation 1): the gradient by the token
      embeddings, integrated along the straight line from the baseline to the text, times the
      distance. The integral is computed by a Gauss-Legendre rule on intervals, which are halved
      where the sum of gradients differs from the change of the logit.
    * `occlusion` (Zeiler and Fergus 2014): the fall of the logit where one token's embedding is
      replaced by that of the baseline.

    Positions, token types and norms are applied to a baseline as to a text.

    Args:
        position: index of the position of the output, from 0 or from -1 downwards; None: the first
            mask if there is one, else the last position. A classifier has one, 0.
        output: the token (a piece as text, or an id) or the label; None: the token of the text at
            this position, else the most probable one.
        baseline: every token embedding is `zero`, or the `mean` of the embedding matrix. RMSNorm
            hides the scale of its input, so that with rotary positions a path from zero is all in
            its first step.
        tolerance: intervals are halved until the convergence error is at most this share of the
            difference of logits, or there are 64.
        text, target, options: as in `attention`.

    Raises:
        UserError: a model without an output head; no such position or output; an unknown method;
            as in `attention`.

    >>> import heedful
    >>> from heedful import insight
    >>> model = heedful.load("runs/mine")
    >>> result = insight.attributions(model, "the dog sat", "a dog ran", position=0)
    >>> result.output.name, len(result.tokens["source"]) == len(result.scores["source"])
    ('▁a', True)
    """
    if method not in get_args(Method):
        raise UserError(f"method must be {' or '.join(get_args(Method))}, not {method!r}")
    if baseline not in get_args(Baseline):
        raise UserError(f"baseline must be {' or '.join(get_args(Baseline))}, not {baseline!r}")
    if not isinstance(tolerance, int | float) or not tolerance > 0:
        raise UserError(f"tolerance must be a number above 0, not {describe(tolerance)}")
    reading = read(model, text, target, **options)
    return explain(reading, position, output, method, baseline, tolerance)


def explain(
    reading: Reading,
    position: int | None,
    output: str | int | None,
    method: Method,
    baseline: Baseline = "mean",
    tolerance: float = 1e-3,
    max_intervals: int = 64,
) -> Attributions:
    """`attributions` of a text that is encoded already, by at most `max_intervals`."""
    with evaluating(reading.net):
        selected = choose_output(reading, position, output)
        path = _Path(reading, selected, baseline)
        if method == "occlusion":
            scores, error = _occlude(path), None
        else:
            scores, error = _integrate(path, tolerance, max_intervals)
        value, baseline_value = path.value(1.0), path.value(0.0)
    return Attributions(
        method,
        selected,
        dict(reading.tokens),
        {side: values.double().cpu().numpy() for side, values in scores.items()},
        value,
        baseline_value,
        error,
        path.num_passes,
    )


def choose_output(reading: Reading, position: int | None, output: str | int | None) -> Output:
    """The output that a caller named, or the default (`attributions`).

    Raises:
        UserError: no such position, token or label.
    """
    logits = reading.logits()[0]
    if position is None:
        unknown = [i for i, token in enumerate(reading.outputs) if token is None]
        is_masked = reading.outputs and len(unknown) < len(reading.outputs) and unknown
        first_mask = unknown[0] if is_masked else -1
        position = first_mask if reading.output_side == "text" else -1
    position = check_index("position", position, len(logits))
    if output is None:
        known = reading.outputs[position] if reading.outputs else None
        index = int(logits[position].argmax()) if known is None else known
    else:
        index = _output_id(reading, output, logits.size(1))
    return Output(position, index, reading.output_names([index])[0])


def _output_id(reading: Reading, output: str | int, count: int) -> int:
    """The index of an output that is given by name or number."""
    if isinstance(output, int):
        if not 0 <= output < count:
            raise UserError(f"outputs have indices 0 to {count - 1}, not {output}")
        return output
    if isinstance(reading.net.head, ClassificationHead):
        names = list(reading.output_names(range(count)))
        if output not in names:
            raise UserError(f"the model has no label {output}; labels: {', '.join(names)}")
        return names.index(output)
    tokenizer = reading.output_tokenizer
    if tokenizer is None:
        raise UserError("this model has no tokenizer: give the output as an id")
    for token in range(min(count, tokenizer.vocab_size)):
        if output in (tokenizer.piece(token), tokenizer.tokens([token])[0]):
            return token
    ids = tokenizer.encode(output)
    if len(ids) != 1:
        shown = ", ".join(tokenizer.tokens(ids)) or "nothing"
        raise UserError(f"{output!r} is not one token of the model, but {shown}; give one token")
    return ids[0]


class _Path:
    """The straight line from a baseline to a text, in the space of token embeddings."""

    def __init__(self, reading: Reading, output: Output, baseline: Baseline) -> None:
        self.reading, self.output = reading, output
        self.num_passes = 0
        self.ends: Vectors = {side: reading.vectors(side) for side in reading.ids}
        self.starts: Vectors = {
            side: torch.zeros_like(vectors)
            if baseline == "zero"
            else _mean_vector(reading, side).expand_as(vectors)
            for side, vectors in self.ends.items()
        }
        self.value: Callable[[float], float] = cache(self._value)

    def logits(self, vectors: Mapping[Side, Float[Tensor, "N T D"]]) -> Float[Tensor, "N"]:
        """The logit of the output for token embeddings of N texts."""
        embedded = {side: self.reading.embed(side, rows) for side, rows in vectors.items()}
        logits = self.reading.logits(embedded, self.output.position)
        self.num_passes += len(logits)
        return logits[:, 0, self.output.id]

    def points(self, shares: Float[Tensor, "N"]) -> dict[Side, Float[Tensor, "N T D"]]:
        """Token embeddings at these shares of the line."""
        return {
            side: self.starts[side] + shares.to(end)[:, None, None] * (end - self.starts[side])
            for side, end in self.ends.items()
        }

    def _value(self, share: float) -> float:
        return float(self.logits(self.points(torch.tensor([share])))[0])


def _mean_vector(reading: Reading, side: Side) -> Float[Tensor, "D"]:
    """The mean of the embedding matrix, as the module embeds it."""
    module = reading.embedding(side).tokens
    ids = torch.arange(module.num_embeddings, device=reading.model.device)
    total, rows = torch.zeros(1), 4096
    for first in range(0, len(ids), rows):
        part = module(ids[first : first + rows]).sum(0)
        total = part if not first else total + part
    return total / len(ids)


def _integrate(
    path: _Path, tolerance: float, max_intervals: int
) -> tuple[dict[Side, Float[Tensor, "T"]], float]:
    """Integrated gradients, and their convergence error.

    The gradients of an interval sum to the change of the logit over it, if they are integrated
    exactly. The interval with the largest error is halved until the sum of errors is small.
    """
    difference = path.value(1.0) - path.value(0.0)
    # An error of rounding, which no more intervals reduce.
    least = 1e-6 * max(1.0, abs(path.value(1.0)), abs(path.value(0.0)))
    intervals = [_Interval.integrate(path, 0.0, 1.0)]
    while len(intervals) < max_intervals:
        if sum(part.error for part in intervals) <= max(tolerance * abs(difference), least):
            break
        worst = max(intervals, key=lambda part: part.error)
        intervals.remove(worst)
        middle = (worst.start + worst.stop) / 2
        intervals += [
            _Interval.integrate(path, worst.start, middle),
            _Interval.integrate(path, middle, worst.stop),
        ]
    scores = {
        side: torch.stack([part.scores[side] for part in intervals]).sum(0) for side in path.ends
    }
    total = sum(float(values.sum()) for values in scores.values())
    return scores, abs(total - difference)


class _Interval(NamedTuple):
    """A part of the line: the integral of each token, and its error against the change."""

    start: float
    stop: float
    scores: dict[Side, Float[Tensor, "T"]]
    error: float

    @classmethod
    def integrate(cls, path: _Path, start: float, stop: float) -> "_Interval":
        """Integrate the gradients over an interval by a Gauss-Legendre rule."""
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        width = stop - start
        shares = torch.from_numpy(start + width * (nodes + 1) / 2)
        factors = torch.from_numpy(weights * width / 2)
        with torch.enable_grad():
            points = {s: x.detach().requires_grad_() for s, x in path.points(shares).items()}
            total = path.logits(points).sum()
            gradients = torch.autograd.grad(total, [*points.values()])
        scores: dict[Side, Tensor] = {}
        for side, gradient in zip(points, gradients, strict=True):
            mean = (gradient.double() * factors.to(gradient.device)[:, None, None]).sum(0)
            scores[side] = (mean * (path.ends[side] - path.starts[side]).double()).sum(-1)
        change = path.value(stop) - path.value(start)
        return cls(start, stop, scores, abs(sum(float(x.sum()) for x in scores.values()) - change))


def _occlude(path: _Path) -> dict[Side, Float[Tensor, "T"]]:
    """The fall of the logit for each token."""
    scores: dict[Side, Tensor] = {}
    for side, end in path.ends.items():
        falls = []
        for first in range(0, len(end), _ROWS):
            columns = torch.arange(first, min(first + _ROWS, len(end)))
            rows = {s: x.expand(len(columns), -1, -1).clone() for s, x in path.ends.items()}
            rows[side][torch.arange(len(columns)), columns] = path.starts[side][columns]
            falls.append(path.value(1.0) - path.logits(rows))
        scores[side] = torch.cat(falls)
    return scores
