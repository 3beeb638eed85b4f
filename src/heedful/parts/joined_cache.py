"""Several caches as one, so that texts of very different lengths share a decoding step.

A cache is padded to its longest text. In a joined cache everything but self-attention runs over all
texts at once, and self-attention over those of each part, so that no text is padded to the longest
one of another part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.parts.attend_options import Attend
from heedful.parts.cache import Cache, LayerCache
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec, Span, Tokens


class JoinedLayer(NamedTuple):
    """One layer of a `JoinedCache`.

    Attributes:
        parts: of each part; their texts are adjacent.
        sizes: numbers of texts of the parts.
        cross: there are no sources.
    """

    parts: list[LayerCache]
    sizes: list[int]
    cross: None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """`LayerCache.update` of each part."""
        rows = zip(self.parts, keys.split(self.sizes), values.split(self.sizes), strict=True)
        updated = [part.update(*new) for part, *new in rows]
        return [key for key, _ in updated], [value for _, value in updated]


class JoinedMask(MaskSpec):
    """The masks of groups of rows, each with keys of its own.

    Args:
        parts: of self-attention, each over the same number of queries without padding.
        sizes: rows of each part.
    """

    def __init__(self, parts: Sequence[MaskSpec], sizes: Sequence[int]) -> None:
        positions = [
            part.queries.positions.expand(size, -1) for part, size in zip(parts, sizes, strict=True)
        ]
        queries = Span(torch.cat(positions))
        super().__init__(queries, queries, causal=True)
        self.parts = parts
        self.sizes = sizes


@dataclass(frozen=True)
class Joined:
    """The attention of each group of rows, with the keys and values of `JoinedLayer.update`.

    Args:
        sizes: rows of each group.
    """

    attends: Sequence[Attend]
    sizes: Sequence[int]

    def __call__(
        self, query: Float[Tensor, "B H T E"], keys: Any, values: Any, dropout: Dropout
    ) -> tuple[Float[Tensor, "B H T E"], None]:
        groups = zip(self.attends, query.split(self.sizes), keys, values, strict=True)
        heads = [attend(*inputs, dropout=dropout)[0] for attend, *inputs in groups]
        return torch.cat(heads), None


class JoinedCache:
    """The caches of several groups of texts, in this order, of a decoder-only net.

    Each text has one branch. Passes have the new tokens of all texts; padding is not possible.
    """

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.sizes = [part.num_texts for part in parts]

    @property
    def num_texts(self) -> int:
        """Number of texts in all parts."""
        return sum(self.sizes)

    def begin(self, tokens: Tokens) -> tuple[list[JoinedLayer], list[MaskSpec], None]:
        """See `Cache.begin`."""
        assert tokens.real is None
        columns = zip(
            self.parts,
            tokens.ids.split(self.sizes),
            tokens.positions.split(self.sizes),
            strict=True,
        )
        begun = [cache.begin(Tokens(ids, positions)) for cache, ids, positions in columns]
        layers = zip(*(layers for layers, _, _ in begun), strict=True)
        masks: dict[tuple[int, ...], JoinedMask] = {}  # layers of one window share a mask
        joined = []
        for specs in zip(*(specs for _, specs, _ in begun), strict=True):
            key = tuple(map(id, specs))
            if key not in masks:
                masks[key] = JoinedMask(specs, self.sizes)
            joined.append(masks[key])
        return [JoinedLayer(list(parts), self.sizes) for parts in layers], list(joined), None
