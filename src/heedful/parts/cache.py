"""The key/value cache of incremental decoding: tensors that the caller creates and passes in."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.parts.tokens import MaskSpec, Span, Tokens

FREE = 2**31 - 1  # position of an empty slot: after every query, so that the causal mask hides it


class LayerShape(NamedTuple):
    """Key/value heads G, head width E and window of a layer (None: no window)."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class LayerCache(NamedTuple):
    """Keys and values of one layer, and the slots that a forward pass writes to.

    Attributes:
        store: keys and then values, (B, C, 2·G, E).
        slots: index into the flattened (B · C) slots for each new token.
        num_read: number of slots that attention reads; None: all.
        cross: keys and then values of the sources, (B, 2·G, S, E).
    """

    store: Float[Tensor, "B C both E"]
    slots: Int[Tensor, "n"]
    num_read: int | None
    cross: Float[Tensor, "B both S E"] | None

    def update(
        self, keys: Float[Tensor, "B G T E"], values: Float[Tensor, "B G T E"]
    ) -> tuple[Float[Tensor, "B G C E"], Float[Tensor, "B G C E"]]:
        """Write keys and values of new tokens; returns those of all slots that attention reads."""
        rows = torch.cat([keys, values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
        flat = self.store.view(-1, rows.size(1))
        flat.index_copy_(0, self.slots, rows.to(self.store.dtype))
        keys, values = self.store[:, : self.num_read].transpose(1, 2).chunk(2, dim=1)
        return keys, values


@dataclass
class LayerGroup:
    """Keys and values of all layers with the same window, which write to the same slots.

    Attributes:
        stores: keys and then values of each layer, (B, C + 1, 2·G, E); padding is written to the
            last slot.
        positions: (B, C + 1), position of the token in each slot; `FREE` in empty slots.
        used: (B,), number of slots in use.
        visible: (B, W, C + 1), True for the slots of each branch's tokens; unused with one branch.
        layers: indices of the layers in the stack.
        window: number of keys that a query attends to; None: all.
        num_read: number of slots that attention reads, if the host knows that the others are
            empty; None: all, so that every step of a compiled net has the same shapes.
    """

    stores: list[Tensor]
    positions: Int[Tensor, "B C"]
    used: Int[Tensor, "B"]
    visible: Bool[Tensor, "B W C"]
    layers: list[int]
    window: int | None
    num_read: int | None = None

    @property
    def branches(self) -> int:
        """Number W of branches per text."""
        return self.visible.size(1)

    @property
    def capacity(self) -> int:
        """Slots C per text, for the tokens of all its branches."""
        return self.positions.size(1) - 1

    def write_positions(self, new: Span, branches: int) -> tuple[Int[Tensor, "n"], MaskSpec]:
        """Assign slots to new tokens and store their positions.

        Args:
            new: positions and padding (B, branches · T) of the new tokens.
            branches: rows of each text, concatenated: 1 (tokens of all branches) or W.

        Returns:
            Indices of the slots, (B · branches · T,) over all texts, and the mask of the tokens.
        """
        slots = self._take_slots(new)
        num_texts, length = slots.size(0), slots.size(1) // branches
        allowed = None
        if self.branches > 1:
            branch_slots = slots.view(num_texts, branches, length).expand(-1, self.branches, -1)
            self.visible.scatter_(2, branch_slots, True)
            if new.real is not None:
                self.visible[:, :, -1] = False  # padding
            if branches > 1:
                allowed = self.visible[:, :, : self.num_read]
                allowed = allowed if length == 1 else allowed.repeat_interleave(length, 1)
        keys = Span(self.positions[:, : self.num_read])
        if self.num_read == slots.size(1) and new.real is None and allowed is None:
            keys = new  # the first tokens, in order: the causal mask of a kernel is enough
        first = torch.arange(num_texts, device=slots.device) * (self.capacity + 1)
        flat = (first[:, None] + slots).flatten()
        # The slots that a branch has seen hold its new token and those before: none is hidden.
        causal = allowed is None or length > 1
        return flat, MaskSpec(new, keys, causal=causal, allowed=allowed)

    def _take_slots(self, new: Span) -> Int[Tensor, "B n"]:
        """The slot of each new token; the last slot for padding."""
        used, count = self.used[:, None], new.positions.size(1)
        if new.real is None:
            slots = used + torch.arange(count, device=used.device)
            self.used.add_(count)
            self.positions.scatter_(1, slots, new.positions)
            return slots
        counts = new.real.cumsum(1)
        slots = torch.where(new.real, used + counts - 1, self.capacity)
        self.used.add_(counts[:, -1])
        self.positions.scatter_(1, slots, torch.where(new.real, new.positions, FREE))
        return slots

    def with_room(self, count: int, *, drops_hidden: bool) -> "LayerGroup":
        """The group itself or a new one, with `count` more slots included in `num_read`.

        Tokens outside of the window of all later queries are removed if there are too few free
        slots, or if a smaller capacity is enough without them. Half of a new capacity is free, so
        that at most one token is moved for each one that is written.
        """
        num_read = num_kept = self.num_read or 0
        if drops_hidden and self.window is not None:
            num_kept = min(num_read, self.window * self.branches)
        elif num_read + count <= self.capacity:
            self.num_read = num_read + count
            return self
        capacity = capacity_for(max(num_kept + count, 2 * num_kept))
        fits = num_read + count <= self.capacity
        if fits and (num_kept == num_read or capacity >= self.capacity):
            self.num_read = num_read + count
            return self
        if num_kept == num_read:
            return replace(self.resized(capacity), num_read=num_read + count)
        group = self.without_hidden(capacity)
        if capacity == self.capacity:  # a recorded step needs the same tensors
            for own, new in zip(self.tensors(), group.tensors(), strict=True):
                own.copy_(new)
            group = self
        return replace(group, num_read=num_kept + count)

    def without_hidden(self, capacity: int) -> "LayerGroup":
        """A group without the tokens outside of the window of all later queries.

        The remaining tokens, at most window · W per text, are in the first slots. It does not
        synchronize with the device. The result cannot be rewound.
        """
        assert self.window is not None
        occupied = self.positions.ne(FREE)[:, None]
        occupied = occupied if self.branches == 1 else occupied & self.visible
        positions = self.positions[:, None]
        newest = positions.masked_fill(~occupied, -1).amax(2, keepdim=True)
        keep = (occupied & (positions > newest - self.window)).any(1)
        # Slots to keep first, in their order.
        size = min(self.window * self.branches, self.capacity)
        order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :size]
        keep = keep.gather(1, order)
        group = self._empty(capacity)
        first = torch.arange(len(order), device=order.device)[:, None] * (self.capacity + 1)
        flat = (first + order).flatten()
        for new, old in zip(group.stores, self.stores, strict=True):
            new[:, :size] = old.flatten(0, 1).index_select(0, flat).unflatten(0, order.shape)
        group.positions[:, :size] = self.positions.gather(1, order).masked_fill(~keep, FREE)
        slots = order[:, None].expand(-1, self.branches, -1)
        group.visible[:, :, :size] = self.visible.gather(2, slots) & keep[:, None]
        return replace(group, used=keep.sum(1), num_read=None)

    def resized(self, capacity: int, num_texts: int | None = None) -> "LayerGroup":
        """A copy with another capacity, which holds all slots in use; the group itself if equal.

        Args:
            num_texts: the first texts are kept, or empty ones are added behind; None: all are kept.
        """
        num_texts = self.used.size(0) if num_texts is None else num_texts
        if capacity == self.capacity and num_texts == self.used.size(0):
            return self
        group = self._empty(capacity, num_texts)
        count, size = min(num_texts, self.used.size(0)), min(capacity, self.capacity)
        for new, old in zip(group.stores, self.stores, strict=True):
            new[:count, :size] = old[:count, :size]  # the last slot holds padding
        group.positions[:count, :size] = self.positions[:count, :size]
        group.visible[:count, :, :size] = self.visible[:count, :, :size]
        group.used[:count] = self.used[:count]
        return group

    def _empty(self, capacity: int, num_texts: int | None = None) -> "LayerGroup":
        """A group without tokens, with this capacity and number of texts."""
        num_texts, size = self.used.size(0) if num_texts is None else num_texts, capacity + 1
        return replace(
            self,
            stores=[store.new_zeros(num_texts, size, *store.shape[2:]) for store in self.stores],
            positions=self.positions.new_full((num_texts, size), FREE),
            used=self.used.new_zeros(num_texts),
            visible=self.visible.new_zeros(num_texts, self.branches, size),
        )

    def first(self, count: int) -> "LayerGroup":
        """The first texts, in the same tensors."""
        rest = {name: getattr(self, name)[:count] for name in ("positions", "used", "visible")}
        return replace(self, stores=[store[:count] for store in self.stores], **rest)

    def select(self, texts: Int[Tensor, "M"]) -> "LayerGroup":
        """A copy with these texts only."""
        stores = [store.index_select(0, texts) for store in self.stores]
        rest = {name: getattr(self, name)[texts] for name in ("positions", "used", "visible")}
        return replace(self, stores=stores, **rest)

    def tensors(self) -> list[Tensor]:
        """All tensors; their first dimension is the texts."""
        return [*self.stores, self.positions, self.used, self.visible]


@dataclass
class Cache:
    """Keys and values of B texts with W branches each; of an encoder-decoder also of their sources.

    The branches of a text are its continuations: hypotheses of a beam, or samples. The state is
    tensors, which are written in place, so that a step can be compiled. The branches of a text have
    one pool of slots, and each token is written once: a branch is a set of slots, and `reorder`
    changes these sets only. So keys are never copied, and a prompt is stored once for all branches.
    Rows N = B · W, with the branches of a text adjacent. Layers with a window have separate slots,
    so that they can drop tokens that other layers still need.

    Attributes:
        groups: the layers of each window.
        cross: keys and then values of the sources in each layer, (B, 2·G, S, E); empty for a
            decoder-only net.
        source_real: (B, S), padding mask of the sources; None: no padding.
    """

    groups: list[LayerGroup]
    cross: list[Tensor] = field(default_factory=list)
    source_real: Bool[Tensor, "B S"] | None = None

    @classmethod
    def empty(
        cls,
        layers: Sequence[LayerShape],
        num_texts: int,
        capacity: int,
        branches: int,
        like: Tensor,
    ) -> "Cache":
        """A cache without tokens, with the dtype and device of `like`; `layers` in stack order."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_texts, *shape, dtype=dtype, device=like.device)

        size = capacity + 1
        groups = []
        for window, indices in layers_by_window(layers).items():
            shapes = [layers[index] for index in indices]
            group = LayerGroup(
                [zeros(size, 2 * heads, width, dtype=like.dtype) for heads, width, _ in shapes],
                zeros(size, dtype=torch.int64).fill_(FREE),
                zeros(dtype=torch.int64),
                zeros(branches, size, dtype=torch.bool),
                indices,
                window,
            )
            groups.append(group)
        return cls(groups)

    @property
    def num_texts(self) -> int:
        """Number B of texts that are decoded together."""
        return self.groups[0].used.size(0)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.groups[0].used.device

    @property
    def branches(self) -> int:
        """Number W of branches per text."""
        return self.groups[0].branches

    @property
    def capacity(self) -> int:
        """Slots C per text in the smallest group, for the tokens of all its branches."""
        return min(group.capacity for group in self.groups)

    def begin(self, tokens: Tokens) -> tuple[list[LayerCache], list[MaskSpec], MaskSpec | None]:
        """Assign slots to new tokens, before a forward pass.

        The rows of a text are concatenated to one row of queries: layers are called with states
        (B, rows · T, D), and write keys and values to the slots. Padding has no slot.

        Args:
            tokens: B rows, shared by all branches of a text, or B · W rows, one for each branch.

        Returns:
            The cache and the self-attention mask of each layer, and the cross-attention mask.

        Raises:
            UserError: packed rows; a row of a cache is one text.
        """
        if tokens.segments is not None:
            raise UserError("a cache has one text for each row: leave out segments, or the cache")
        rows, length = tokens.ids.shape
        num_texts, branches = self.num_texts, rows // self.num_texts
        assert rows in (num_texts, num_texts * self.branches), (rows, self.branches)
        real = None if tokens.real is None else tokens.real.reshape(num_texts, -1)
        queries = Span(tokens.positions.expand(rows, length).reshape(num_texts, -1), real)
        cross_mask = None
        if self.cross:
            columns = torch.arange(self.cross[0].size(2), device=queries.positions.device)[None]
            cross_mask = MaskSpec(queries, Span(columns, self.source_real), causal=False)
        layers: dict[int, LayerCache] = {}
        masks: dict[int, MaskSpec] = {}
        for group in self.groups:
            slots, mask = group.write_positions(queries, branches)
            for index, store in zip(group.layers, group.stores, strict=True):
                cross = self.cross[index] if self.cross else None
                layers[index] = LayerCache(store, slots, group.num_read, cross)
                masks[index] = mask
        order = range(len(layers))
        return [layers[index] for index in order], [masks[index] for index in order], cross_mask

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Branch w of text b continues its former branch parents[b, w]."""
        for group in self.groups:
            group.visible.copy_(
                group.visible.gather(1, parents[..., None].expand_as(group.visible))
            )

    def select(self, texts: Int[Tensor, "M"]) -> "Cache":
        """A copy with these texts only, for example the unfinished ones."""
        real = self.source_real
        return Cache(
            [group.select(texts) for group in self.groups],
            [store.index_select(0, texts) for store in self.cross],
            None if real is None else real.index_select(0, texts),
        )

    def grow(self, capacity: int) -> "Cache":
        """A copy with a larger capacity."""
        return replace(self, groups=[group.resized(capacity) for group in self.groups])

    def with_all_slots(self) -> "Cache":
        """The same tensors with `num_read` None: attention reads all slots, in fixed shapes."""
        return replace(self, groups=[replace(group, num_read=None) for group in self.groups])

    def with_texts(self, num_texts: int, slots: int) -> "Cache":
        """A copy with this number of texts and `slots` free slots: the first ones, or all and empty
        ones behind them. It has no sources, and its groups know the slots in use (`num_read`)."""
        assert not self.cross
        return Cache(
            [g.resized(capacity_for((g.num_read or 0) + slots), num_texts) for g in self.groups]
        )

    def first(self, count: int) -> "Cache":
        """The first texts of a cache without sources, in the same tensors."""
        assert not self.cross
        return Cache([group.first(count) for group in self.groups])

    def reserve(self, count: int, *, drops_hidden: bool) -> bool:
        """Reserve slots for new tokens; returns True if tensors were replaced by others.

        Called before every pass, it keeps the number of used slots on the host (`num_read`).
        Capacities are powers of two.

        Args:
            count: new tokens per text, over all its branches, padding included.
            drops_hidden: layers with a window may drop tokens that no later query attends to; the
                cache cannot be rewound afterwards.
        """
        before = self.groups
        self.groups = [group.with_room(count, drops_hidden=drops_hidden) for group in before]
        pairs = zip(self.groups, before, strict=True)
        return any(group.positions is not old.positions for group, old in pairs)

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens of every text; for W = 1, without padding."""
        assert self.branches == 1, self.branches
        for group in self.groups:
            group.used.clamp_(max=length)
            group.positions[:, length:] = FREE
            if group.num_read is not None:
                group.num_read = min(group.num_read, length)

    def write_rows(self, rows: Int[Tensor, "M"], other: "Cache") -> None:
        """Replace the texts `rows` by those of `other`."""
        for index, (old, new) in enumerate(zip(self.groups, other.groups, strict=True)):
            capacity = max(old.capacity, new.capacity)
            group = old.resized(capacity)
            is_known = old.num_read is not None and new.num_read is not None
            group.num_read = max(old.num_read or 0, new.num_read or 0) if is_known else None
            new = new.resized(capacity)
            for tensor, values in zip(group.tensors(), new.tensors(), strict=True):
                tensor.index_copy_(0, rows, values)
            self.groups[index] = group
        for tensor, values in zip(self._source_tensors(), other._source_tensors(), strict=True):
            tensor.index_copy_(0, rows, values)

    def _source_tensors(self) -> list[Tensor]:
        return [*self.cross, *([] if self.source_real is None else [self.source_real])]

    def tensors(self) -> list[Tensor]:
        """All tensors; their first dimension is the texts."""
        tensors: list[Tensor] = []
        for group in self.groups:
            tensors += group.tensors()
        return tensors + self._source_tensors()


def layers_by_window(layers: Sequence[LayerShape]) -> dict[int | None, list[int]]:
    """Window -> indices of its layers, in the order of the first layers."""
    groups: dict[int | None, list[int]] = {}
    for index, (_, _, window) in enumerate(layers):
        groups.setdefault(window, []).append(index)
    return groups


def capacity_for(slots: int) -> int:
    """The capacity for a number of tokens: the next power of two, so that few sizes occur."""
    return 1 << max(4, (slots - 1).bit_length())


torch.export.register_dataclass(LayerGroup)  # for `torch.export` of a step
torch.export.register_dataclass(Cache)
