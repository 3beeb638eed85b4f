"""What one decoding remembers: keys and values of every layer, made and held by the caller."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.parts.masks import AttentionMask


class Cache:
    """Self-attention keys and values of N rows, and those of their B sources.

    The capacity is fixed when it is made. N is a multiple of B: the N / B beams of a source stand
    side by side, and share its cross-attention keys and values, which are kept once.

    Attributes:
        length: () int64 tensor, how many tokens every row holds (for positions and masks that must
            not be constants of a compiled step). `filled` is the same number on the host.
        source_mask: which source positions may be attended to, (B, 1, 1, S).
    """

    def __init__(
        self,
        cross: list[tuple[Float[Tensor, "B H S E"], Float[Tensor, "B H S E"]]],
        source_mask: Bool[Tensor, "B 1 1 S"],
        *,
        rows: int,
        capacity: int,
    ) -> None:
        keys = cross[0][0]
        _, heads, _, width = keys.shape
        self.capacity = capacity
        self.filled = 0
        self.length = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.cross = cross
        self.source_mask = AttentionMask(source_mask)
        # One tensor for all layers: a reorder is then one gather instead of two a layer.
        self._store = torch.zeros(
            len(cross), 2, rows, heads, capacity, width, dtype=keys.dtype, device=keys.device
        )

    @property
    def rows(self) -> int:
        """N, hypotheses decoded side by side."""
        return self._store.size(2)

    def layer(self, index: int) -> "LayerCache":
        """The view that layer `index` writes its keys and values to."""
        return LayerCache(self, index)

    def advance(self, count: int) -> None:
        """Every layer has added its `count` new tokens."""
        self.filled += count
        self.length += count

    def reorder(self, rows: Int[Tensor, "M"]) -> None:
        """New row i is old row rows[i], in all layers, sources included.

        M rows may be fewer (finished sentences leave) or more (a start is copied for its beams);
        the rows of a source must stay side by side, equally many for each.
        """
        sources_before = self.cross[0][0].size(0)
        owners = rows // (self.rows // sources_before)
        kept, counts = owners.unique_consecutive(return_counts=True)
        assert bool((counts == counts[:1]).all()), "rows of a source must be equally many"
        if kept.numel() != sources_before or not torch.equal(
            kept, torch.arange(sources_before, device=kept.device)
        ):
            self.cross = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in self.cross]
            self.source_mask = AttentionMask(self.source_mask.allowed.index_select(0, kept))
        used = self._store[..., : self.filled, :].index_select(2, rows)
        if rows.numel() != self.rows:
            shape = list(self._store.shape)
            shape[2] = rows.numel()
            self._store = self._store.new_zeros(shape)
        self._store[..., : self.filled, :] = used


class LayerCache:
    """One layer's part of a `Cache`."""

    def __init__(self, cache: Cache, index: int) -> None:
        self._cache = cache
        self._index = index

    @property
    def cross(self) -> tuple[Tensor, Tensor]:
        """This layer's keys and values of the sources, (B, H, S, E) each."""
        return self._cache.cross[self._index]

    @property
    def source_mask(self) -> AttentionMask:
        """Which source positions may be attended to, (B, 1, 1, S)."""
        return self._cache.source_mask

    def update(
        self, keys: Float[Tensor, "N H T E"], values: Float[Tensor, "N H T E"]
    ) -> tuple[Float[Tensor, "N H K E"], Float[Tensor, "N H K E"]]:
        """Add T new keys and values, and get all K so far."""
        cache = self._cache
        end = cache.filled + keys.size(2)
        if end > cache.capacity:
            raise UserError(f"{end} tokens do not fit a cache made for {cache.capacity}")
        mine = cache._store[self._index]
        mine[0, :, :, cache.filled : end] = keys
        mine[1, :, :, cache.filled : end] = values
        return mine[0, :, :, :end], mine[1, :, :, :end]
