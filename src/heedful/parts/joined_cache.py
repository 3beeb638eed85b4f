"""Several caches as one, so that texts of very different lengths share a decoding step.

A cache is padded to its longest text. In a joined cache everything but self-attention runs over all
texts at once, and self-attention over those of each part, so that no text is padded to the longest
one of another part.
"""

from collections.abc import Sequence
from typing import NamedTuple

from heedful.parts.cache import Cache, LayerCache
from heedful.parts.masks import JoinedMask, MaskSpec
from heedful.parts.tokens import Tokens


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


class JoinedCache:
    """The caches of several groups of texts, in this order, of a decoder-only net without beams.

    Passes have the new tokens of all texts; padding is not possible.
    """

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.sizes = [part.num_sources for part in parts]

    @property
    def num_sources(self) -> int:
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
