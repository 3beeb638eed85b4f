"""Attention weights of every layer and head for one text, and numbers that summarize each head."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from heedful.errors import UserError
from heedful.insight.plots import heat_map, new_figure
from heedful.insight.reading import Text, check_index, evaluating, read
from heedful.insight.watching import SUBLAYERS, Watch
from heedful.pipelines.base import SavedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Part = Literal["encoder", "decoder", "cross"]
_SUBLAYER_OF: dict[Part, tuple[str, str]] = {
    "encoder": ("encoder", SUBLAYERS[0]),
    "decoder": ("decoder", SUBLAYERS[0]),
    "cross": ("decoder", SUBLAYERS[1]),
}


class HeadSummaries(NamedTuple):
    """For each layer and head one number over all T queries of a text; NaN if not defined.

    Attributes:
        entropy: mean over queries of -Σ p ln p of their weights, in nats: 0 for one key, ln K for
            K equal weights.
        mean_distance: mean over queries of Σ p · |query position - key position|, in tokens; NaN
            in cross-attention, whose positions are of two texts.
        first_share: mean weight on the first key.
        previous_share: mean weight on the key before the query, over the queries but the first;
            NaN in cross-attention and for a single query.
    """

    entropy: Float[np.ndarray, "L H"]
    mean_distance: Float[np.ndarray, "L H"]
    first_share: Float[np.ndarray, "L H"]
    previous_share: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class AttentionMap:
    """The attention of all layers of one kind.

    Attributes:
        part: `encoder` or `decoder` self-attention, or `cross`-attention.
        weights: (L, H, T, K), after the softmax; a row sums to 1.
        queries, keys: tokens of the rows and of the columns.
    """

    part: Part
    weights: Float[np.ndarray, "L H T K"]
    queries: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.weights.shape[0])

    @property
    def num_heads(self) -> int:
        """H."""
        return int(self.weights.shape[1])

    @cached_property
    def summaries(self) -> HeadSummaries:
        """Statistics of each head, to find heads with a clear function."""
        return summarize(self.weights, is_cross=self.part == "cross")

    def plot(self, layer: int, head: int | None = None) -> "Figure":
        """A heat map, queries by keys.

        Args:
            layer, head: indices from 0, or from -1 downwards; `head` None: the mean over the heads.

        Raises:
            UserError: no such layer or head.
        """
        layer = check_index("layer", layer, self.num_layers)
        if head is None:
            weights, name = self.weights[layer].mean(0), "mean of the heads"
        else:
            head = check_index("head", head, self.num_heads)
            weights, name = self.weights[layer, head], f"head {head}"
        figure, axes = new_figure(len(self.keys), len(self.queries))
        title = f"{self.part} attention, layer {layer}, {name}"
        heat_map(axes, weights, self.queries, self.keys, title, low=0, high=1)
        return figure


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of a model for one text.

    Attributes:
        maps: by part, those that the model has.
        target: of an encoder-decoder, the tokens that the decoder predicts, one for each query of
            its maps; None: not known. Empty for other models.
    """

    maps: dict[Part, AttentionMap]
    target: tuple[str | None, ...] = ()

    def __getitem__(self, part: Part) -> AttentionMap:
        """The map of a part; raises UserError for a part that the model lacks."""
        if part not in self.maps:
            raise UserError(f"the model has attention in {', '.join(self.maps)}, not in {part}")
        return self.maps[part]


def attention(
    model: SavedModel, text: Text, target: Text | None = None, **options: Any
) -> AttentionMaps:
    """Attention weights of every layer and head for a text.

    Args:
        model: of any family, trained here or imported.
        text: a source, prompt or text.
        target: of an encoder-decoder; None: the output of `model`.
        options: of that output (`heedful.options.Options`).

    Raises:
        UserError: as in `heedful.insight.reading.read`.

    >>> import heedful
    >>> from heedful import insight
    >>> maps = insight.attention(heedful.load("runs/mine"), "the dog sat", "a dog ran")
    >>> maps["cross"].weights.shape[0] == maps["cross"].num_layers
    True
    >>> figure = maps["cross"].plot(layer=0)
    """
    reading = read(model, text, target, **options)
    net = reading.net
    with evaluating(net), Watch(net, ["*.weights"]) as watched:
        reading.states()  # a net without a head has attention too
        named = {name: tensor[0].float().cpu().numpy() for name, tensor in watched.items()}
    maps: dict[Part, AttentionMap] = {}
    for part, (stack, sublayer) in _SUBLAYER_OF.items():
        pattern = f"{stack}.*.{sublayer}.weights"
        layers = [weights for name, weights in named.items() if fnmatchcase(name, pattern)]
        if not layers:
            continue
        queries = reading.tokens[reading.stack_side(stack)]
        keys = reading.tokens["source"] if part == "cross" else queries
        maps[part] = AttentionMap(part, np.stack(layers), queries, keys)
    is_pair = len(reading.ids) == 2
    return AttentionMaps(maps, reading.output_tokens() if is_pair else ())


def summarize(weights: Float[np.ndarray, "L H T K"], *, is_cross: bool) -> HeadSummaries:
    """`HeadSummaries` of attention weights."""
    weights = weights.astype(np.float64)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    entropy = -(weights * logs).sum(-1).mean(-1)
    first = weights[..., 0].mean(-1)
    distance, previous = np.full_like(entropy, math.nan), np.full_like(entropy, math.nan)
    num_queries, num_keys = weights.shape[2:]
    if not is_cross:
        gaps = np.abs(np.arange(num_queries)[:, None] - np.arange(num_keys))
        distance = (weights * gaps).sum(-1).mean(-1)
        if num_queries > 1:
            previous = np.diagonal(weights, -1, axis1=2, axis2=3).mean(-1)
    return HeadSummaries(entropy, distance, first, previous)
