"""Keys and values that a decoding keeps for every layer: tensors, made and held by the caller."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.parts.masks import MaskSpec
from heedful.parts.tokens import Span, Tokens

FREE = 2**31 - 1  # position of a slot that holds nothing: after every query, so that none sees it


class LayerShape(NamedTuple):
    """Sizes of a layer's keys and values, and how many keys its queries see; None: all."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class LayerCache(NamedTuple):
    """One layer's keys and values, and the slots that a pass writes to."""

    store: Float[Tensor, "B C both E"]
    slots: Int[Tensor, "n"]
    limit: int | None
    cross: Float[Tensor, "B both S E"] | None

    def update(
        self, keys: Float[Tensor, "B G T E"], values: Float[Tensor, "B G T E"]
    ) -> tuple[Float[Tensor, "B G C E"], Float[Tensor, "B G C E"]]:
        """Write the keys and values of new tokens; returns all that the layer holds."""
        rows = torch.cat([keys, values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
        flat = self.store.view(-1, rows.size(1))
        flat.index_copy_(0, self.slots, rows.to(self.store.dtype))
        keys, values = self.store[:, : self.limit].transpose(1, 2).chunk(2, dim=1)
        return keys, values


@dataclass
class LayerGroup:
    """Keys and values of the layers that have one window, which write to the same slots.

    Attributes:
        stores: keys and values of each layer, (B, C + 1, 2·G, E), the keys first; the last slot
            takes what must not be written.
        positions: (B, C + 1), position of the token in each slot; `FREE` where there is none.
        used: (B,), slots in use.
        seen: (B, W, C + 1), which slots belong to the text of each beam; not kept for one beam.
        layers: indices of the layers in their stack.
        window: keys that a query of these layers sees; None: all.
        limit: slots that attention reads, where the host knows that no other is in use; None: all,
            so that every step of a compiled net has the same shapes.
    """

    stores: list[Tensor]
    positions: Int[Tensor, "B C"]
    used: Int[Tensor, "B"]
    seen: Bool[Tensor, "B W C"]
    layers: list[int]
    window: int | None
    limit: int | None = None

    @property
    def beams(self) -> int:
        """W, of each text."""
        return self.seen.size(1)

    @property
    def capacity(self) -> int:
        """C, tokens that a text's beams may have here together."""
        return self.positions.size(1) - 1

    def write_positions(self, new: Span, beams: int) -> tuple[Int[Tensor, "n"], MaskSpec]:
        """The slots of new tokens, those of all texts in one row of indices, and what they see.

        `beams`: rows of each text that the tokens come from, one after the other.
        """
        slots = self._take_slots(new)
        texts, length = slots.size(0), slots.size(1) // beams
        allowed = None
        if self.beams > 1:
            own = slots.view(texts, beams, length).expand(-1, self.beams, -1)
            self.seen.scatter_(2, own, True)
            if beams > 1:
                seen = self.seen[:, :, : self.limit]
                allowed = seen if length == 1 else seen.repeat_interleave(length, 1)
        held = Span(self.positions[:, : self.limit])
        if self.limit == slots.size(1) and new.real is None and allowed is None:
            held = new  # the first tokens, in their order: kernels know such a mask
        first = torch.arange(texts, device=slots.device) * (self.capacity + 1)
        flat = (first[:, None] + slots).flatten()
        return flat, MaskSpec(new, held, causal=True, allowed=allowed)

    def _take_slots(self, new: Span) -> Int[Tensor, "B n"]:
        """The slot of each new token; padding shares the last."""
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

    def with_room(self, count: int, *, forgets: bool) -> "LayerGroup":
        """With slots for `count` new tokens of each text, counted in `limit`.

        What the window hides from every token to come is dropped where there is no room for them,
        or where most of the capacity is free without it. Half of a new capacity is free, so that a
        token is moved once at most for each one that is written.
        """
        limit = kept = self.limit or 0
        if forgets and self.window is not None:
            kept = min(limit, self.window * self.beams)
        capacity = capacity_for(max(kept + count, 2 * kept))
        fits = limit + count <= self.capacity
        if fits and (kept == limit or capacity >= self.capacity):
            return replace(self, limit=limit + count)
        if kept == limit:
            return replace(self.resized(capacity), limit=limit + count)
        group = self.without_hidden(capacity)
        if capacity == self.capacity:  # a recorded step goes on with the tensors that it knows
            for own, new in zip(self.tensors(), group.tensors(), strict=True):
                own.copy_(new)
            group = self
        return replace(group, limit=kept + count)

    def without_hidden(self, capacity: int) -> "LayerGroup":
        """Without the tokens that no query to come can see through the window.

        At most `window · beams` slots of a text are in use then, the first ones; nothing waits for
        the device. Not to be rewound afterwards.
        """
        assert self.window is not None
        held = self.positions.ne(FREE)[:, None]
        seen = held if self.beams == 1 else held & self.seen
        positions = self.positions[:, None]
        newest = positions.masked_fill(~seen, -1).amax(2, keepdim=True)
        kept = (seen & (positions > newest - self.window)).any(1)
        # The kept slots of a text, in their order, before all others.
        size = min(self.window * self.beams, self.capacity)
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :size]
        kept = kept.gather(1, order)
        group = self._empty(capacity)
        first = torch.arange(len(order), device=order.device)[:, None] * (self.capacity + 1)
        flat = (first + order).flatten()
        for new, old in zip(group.stores, self.stores, strict=True):
            new[:, :size] = old.flatten(0, 1).index_select(0, flat).unflatten(0, order.shape)
        group.positions[:, :size] = self.positions.gather(1, order).masked_fill(~kept, FREE)
        slots = order[:, None].expand(-1, self.beams, -1)
        group.seen[:, :, :size] = self.seen.gather(2, slots) & kept[:, None]
        return replace(group, used=kept.sum(1), limit=None)

    def resized(self, capacity: int) -> "LayerGroup":
        """The same with a larger capacity."""
        if capacity == self.capacity:
            return self
        group, size = self._empty(capacity), self.capacity  # the last slot holds nothing
        for new, old in zip(group.stores, self.stores, strict=True):
            new[:, :size] = old[:, :size]
        group.positions[:, :size] = self.positions[:, :size]
        group.seen[:, :, :size] = self.seen[:, :, :size]
        return replace(group, used=self.used)

    def _empty(self, capacity: int) -> "LayerGroup":
        """Without any token, and with this capacity."""
        texts, size = self.used.size(0), capacity + 1
        return replace(
            self,
            stores=[store.new_zeros(texts, size, *store.shape[2:]) for store in self.stores],
            positions=self.positions.new_full((texts, size), FREE),
            used=torch.zeros_like(self.used),
            seen=self.seen.new_zeros(texts, self.beams, size),
        )

    def select(self, texts: Int[Tensor, "M"]) -> "LayerGroup":
        """Only these texts."""
        stores = [store.index_select(0, texts) for store in self.stores]
        rest = {name: getattr(self, name)[texts] for name in ("positions", "used", "seen")}
        return replace(self, stores=stores, **rest)

    def tensors(self) -> list[Tensor]:
        """All tensors; each has the texts in its first dimension."""
        return [*self.stores, self.positions, self.used, self.seen]


@dataclass
class Cache:
    """Keys and values of B texts with W beams each and, for two stacks, of their B sources.

    What it remembers is tensors, written in place, so that a step can be compiled. The beams of a
    text share one pool of slots, in which every token is written once: a beam is the set of slots
    that it sees, and following another beam changes that set alone. So no key is ever copied, and a
    prompt is stored once for all its beams. Rows N = B · W, beams side by side. Layers with a
    window have slots of their own, so that they need not keep what only other layers still see.

    Attributes:
        groups: the layers of each window.
        cross: keys and values of the sources in each layer, (B, 2·G, S, E); empty for one stack.
        source_real: (B, S), False at the padding of sources; None: there is none.
    """

    groups: list[LayerGroup]
    cross: list[Tensor] = field(default_factory=list)
    source_real: Bool[Tensor, "B S"] | None = None

    @classmethod
    def empty(
        cls,
        layers: Sequence[LayerShape],
        num_sources: int,
        capacity: int,
        beams: int,
        like: Tensor,
    ) -> "Cache":
        """`layers`: of the stack, in its order; `like` has the stores' type and device."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_sources, *shape, dtype=dtype, device=like.device)

        size = capacity + 1
        groups = []
        for window, indices in layers_by_window(layers).items():
            shapes = [layers[index] for index in indices]
            group = LayerGroup(
                [zeros(size, 2 * heads, width, dtype=like.dtype) for heads, width, _ in shapes],
                zeros(size, dtype=torch.int64).fill_(FREE),
                zeros(dtype=torch.int64),
                zeros(beams, size, dtype=torch.bool),
                indices,
                window,
            )
            groups.append(group)
        return cls(groups)

    @property
    def num_sources(self) -> int:
        """B, texts decoded side by side."""
        return self.groups[0].used.size(0)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.groups[0].used.device

    @property
    def beams(self) -> int:
        """W, of each text."""
        return self.groups[0].beams

    @property
    def capacity(self) -> int:
        """C, tokens that a text's beams may have together in any layer."""
        return min(group.capacity for group in self.groups)

    @property
    def stores(self) -> list[Tensor]:
        """Keys and values of each layer, in the order of the stack."""
        found: dict[int, Tensor] = {}
        for group in self.groups:
            found |= zip(group.layers, group.stores, strict=True)
        return [found[index] for index in range(len(found))]

    def begin(self, tokens: Tokens) -> tuple[list[LayerCache], list[MaskSpec], MaskSpec | None]:
        """Give slots to new tokens: of B rows, which all beams of a text share, or of B · W rows.

        Padding is given none. The rows of a text become queries of one: the layers take its tokens
        as (B, rows · T), and write to their slots in turn. Gives what each layer is called with,
        and what the tokens may attend to of the text, in each layer, and of the source.
        """
        rows, length = tokens.ids.shape
        texts, beams = self.num_sources, rows // self.num_sources
        assert rows in (texts, texts * self.beams), (rows, self.beams)
        real = None if tokens.real is None else tokens.real.reshape(texts, -1)
        queries = Span(tokens.positions.expand(rows, length).reshape(texts, -1), real)
        across = None
        if self.cross:
            places = torch.arange(self.cross[0].size(2), device=queries.positions.device)[None]
            across = MaskSpec(queries, Span(places, self.source_real), causal=False)
        layers: dict[int, LayerCache] = {}
        visible: dict[int, MaskSpec] = {}
        for group in self.groups:
            slots, seen = group.write_positions(queries, beams)
            for index, store in zip(group.layers, group.stores, strict=True):
                cross = self.cross[index] if self.cross else None
                layers[index] = LayerCache(store, slots, group.limit, cross)
                visible[index] = seen
        order = range(len(layers))
        return [layers[index] for index in order], [visible[index] for index in order], across

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Beam w of text b goes on from its former beam parents[b, w]."""
        for group in self.groups:
            group.seen.copy_(group.seen.gather(1, parents[..., None].expand_as(group.seen)))

    def select(self, sources: Int[Tensor, "M"]) -> "Cache":
        """Only these texts, for example those that go on."""
        real = self.source_real
        return Cache(
            [group.select(sources) for group in self.groups],
            [store.index_select(0, sources) for store in self.cross],
            None if real is None else real.index_select(0, sources),
        )

    def grow(self, capacity: int) -> "Cache":
        """The same with a larger capacity."""
        return replace(self, groups=[group.resized(capacity) for group in self.groups])

    def with_all_slots(self) -> "Cache":
        """The same tensors, of which attention reads all slots: its shapes do not change."""
        return replace(self, groups=[replace(group, limit=None) for group in self.groups])

    def reserve(self, count: int, *, forgets: bool) -> bool:
        """Make room for `count` new tokens of each text, all beams together; padding counts.

        From the first token on, the host thereby knows how many slots are in use (`limit`).
        Capacities are powers of two. Returns whether tensors were replaced by others.

        Args:
            forgets: whether layers with a window may drop what no token to come sees: a cache that
                has done so cannot be rewound.
        """
        before = self.groups
        self.groups = [group.with_room(count, forgets=forgets) for group in before]
        pairs = zip(self.groups, before, strict=True)
        return any(group.positions is not old.positions for group, old in pairs)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of every text; for one beam."""
        assert self.beams == 1, self.beams
        for group in self.groups:
            group.used.clamp_(max=length)
            group.positions[:, length:] = FREE
            if group.limit is not None:
                group.limit = min(group.limit, length)

    def write_rows(self, rows: Int[Tensor, "M"], other: "Cache") -> None:
        """Texts `rows` leave, and those of `other` take their places."""
        for index, (mine, new) in enumerate(zip(self.groups, other.groups, strict=True)):
            capacity = max(mine.capacity, new.capacity)
            mine = mine.resized(capacity)
            known = mine.limit is not None and new.limit is not None
            mine.limit = max(mine.limit or 0, new.limit or 0) if known else None
            for tensor, values in zip(mine.tensors(), new.resized(capacity).tensors(), strict=True):
                tensor.index_copy_(0, rows, values)
            self.groups[index] = mine
        for tensor, values in zip(self._of_sources(), other._of_sources(), strict=True):
            tensor.index_copy_(0, rows, values)

    def _of_sources(self) -> list[Tensor]:
        return [*self.cross, *([] if self.source_real is None else [self.source_real])]

    def tensors(self) -> list[Tensor]:
        """All tensors; each has the texts in its first dimension."""
        return [t for group in self.groups for t in group.tensors()] + self._of_sources()


def layers_by_window(layers: Sequence[LayerShape]) -> dict[int | None, list[int]]:
    """Indices of the layers of each window, in the order of their first layers."""
    found: dict[int | None, list[int]] = {}
    for index, (_, _, window) in enumerate(layers):
        found.setdefault(window, []).append(index)
    return found


def capacity_for(slots: int) -> int:
    """The capacity of a cache that must hold so many tokens: few sizes, powers of two."""
    return 1 << max(4, (slots - 1).bit_length())


torch.export.register_dataclass(LayerGroup)  # so that an exported step takes a cache
torch.export.register_dataclass(Cache)
