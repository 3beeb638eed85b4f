"""What one decoding remembers: keys and values of every layer, made and held by the caller."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.parts.masks import AttentionMask, MaskRule


class Cache:
    """Self-attention keys and values of N rows and, for two stacks, those of their B sources.

    The capacity is fixed when it is made. N is a multiple of B: the N / B beams of a source stand
    side by side, and share its cross-attention keys and values, which are kept once.

    Args:
        shape: (L, G, E): layers, key/value heads of each, and their width.
        rows: N.
        capacity: most tokens that a row will hold, padding on its left counted.
        like: a tensor whose type and device the keys and values have.
        starts: (N,), how many tokens of each row are padding on its left; default: none are.
        cross: for each layer keys and values of the sources.
        source_mask: which source positions may be attended to.

    Attributes:
        length: () int64 tensor, how many tokens every row holds (for positions and masks that must
            not be constants of a compiled step). `filled` is the same number on the host.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        rows: int,
        capacity: int,
        like: Tensor,
        starts: Int[Tensor, "N"] | None = None,
        cross: list[tuple[Float[Tensor, "B G S E"], Float[Tensor, "B G S E"]]] | None = None,
        source_mask: Bool[Tensor, "B 1 1 S"] | None = None,
    ) -> None:
        layers, groups, width = shape
        self.capacity = capacity
        self.filled = 0
        self.length = torch.zeros((), dtype=torch.int64, device=like.device)
        self.starts = starts
        self.cross = cross or []
        self.source_mask = AttentionMask.of(source_mask)
        # One tensor for all layers: a reorder is then one gather instead of two a layer.
        self._store = torch.zeros(
            layers, 2, rows, groups, capacity, width, dtype=like.dtype, device=like.device
        )

    @property
    def rows(self) -> int:
        """N, hypotheses decoded side by side."""
        return self._store.size(2)

    def layer(self, index: int) -> "LayerCache":
        """The view that layer `index` writes its keys and values to."""
        return LayerCache(self, index)

    def positions(self, count: int) -> Int[Tensor, "N count"] | None:
        """Positions of the next `count` tokens; None where they are the same in every row."""
        if self.starts is None:
            return None
        places = torch.arange(self.filled, self.filled + count, device=self.starts.device)
        return (places - self.starts[:, None]).clamp(min=0)

    def mask(self, count: int) -> AttentionMask:
        """What the next `count` tokens may attend to: those before them that are not padding."""
        keys, real = self.filled + count, None
        if self.starts is not None:
            real = torch.arange(keys, device=self.starts.device) >= self.starts[:, None]
        rule = MaskRule(
            count,
            keys,
            causal=True,
            real_keys=real,
            real_queries=None if real is None else real[:, self.filled :],
        )
        return AttentionMask(rule, device=self.length.device)

    def advance(self, count: int) -> None:
        """Every layer has added its `count` new tokens."""
        self.filled += count
        self.length += count

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row."""
        assert 0 <= length <= self.filled, (length, self.filled)
        self.filled = length
        self.length.fill_(length)

    def reorder(self, rows: Int[Tensor, "M"]) -> None:
        """New row i is old row rows[i], in all layers, sources included.

        M rows may be fewer (finished sentences leave) or more (a start is copied for its beams).
        Rows of a source stand side by side; where they are not equally many for each (one sample
        of a source ends before another), every row gets its own copy of the source.
        """
        if self.cross:
            self._reorder_sources(rows)
        if self.starts is not None:
            self.starts = self.starts.index_select(0, rows)
        used = self._store[..., : self.filled, :].index_select(2, rows)
        if rows.numel() != self.rows:
            shape = list(self._store.shape)
            shape[2] = rows.numel()
            self._store = self._store.new_zeros(shape)
        self._store[..., : self.filled, :] = used

    def _reorder_sources(self, rows: Int[Tensor, "M"]) -> None:
        sources_before = self.cross[0][0].size(0)
        owners = rows // (self.rows // sources_before)
        kept, counts = owners.unique_consecutive(return_counts=True)
        if not bool((counts == counts[:1]).all()):
            kept = owners
        if kept.numel() == sources_before and torch.equal(
            kept, torch.arange(sources_before, device=kept.device)
        ):
            return
        self.cross = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in self.cross]
        if self.source_mask is not None:
            assert self.source_mask.allowed is not None
            self.source_mask = AttentionMask(self.source_mask.allowed.index_select(0, kept))


class LayerCache:
    """One layer's part of a `Cache`."""

    def __init__(self, cache: Cache, index: int) -> None:
        self._cache = cache
        self._index = index

    @property
    def cross(self) -> tuple[Tensor, Tensor]:
        """This layer's keys and values of the sources, (B, G, S, E) each."""
        return self._cache.cross[self._index]

    @property
    def source_mask(self) -> AttentionMask | None:
        """Which source positions may be attended to, (B, 1, 1, S)."""
        return self._cache.source_mask

    def update(
        self, keys: Float[Tensor, "N G T E"], values: Float[Tensor, "N G T E"]
    ) -> tuple[Float[Tensor, "N G K E"], Float[Tensor, "N G K E"]]:
        """Add T new keys and values, and get all K so far."""
        cache = self._cache
        end = cache.filled + keys.size(2)
        if end > cache.capacity:
            raise UserError(f"{end} tokens do not fit a cache made for {cache.capacity}")
        mine = cache._store[self._index]
        mine[0, :, :, cache.filled : end] = keys
        mine[1, :, :, cache.filled : end] = values
        return mine[0, :, :, :end], mine[1, :, :, :end]
