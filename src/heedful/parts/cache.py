"""What a decoding remembers: keys and values of every layer, made and held by the caller."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.parts.masks import MaskSpec
from heedful.parts.tokens import Span, Tokens

FREE = 2**31 - 1  # position of a slot that holds nothing: after every query, so that none sees it


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
class Cache:
    """Keys and values of B texts with W beams each and, for two stacks, of their B sources.

    What it remembers is tensors of fixed shape, written in place, so that a step can be compiled.
    The beams of a text share one pool of slots, in which every token is written once: a beam is the
    set of slots that it sees, and following another beam changes that set alone. So no key is ever
    copied, and a prompt is stored once for all its beams. Rows N = B · W, beams side by side.

    Attributes:
        stores: keys and values of each layer, (B, C + 1, 2·G, E), the keys first; the last slot
            takes what must not be written.
        positions: (B, C + 1), position of the token in each slot; `FREE` where there is none.
        used: (B,), slots in use.
        seen: (B, W, C + 1), which slots belong to the text of each beam.
        cross: keys and values of the sources in each layer, (B, 2·G, S, E); empty for one stack.
        source_real: (B, S), False at the padding of sources; None: there is none.
        limit: slots that attention reads, where the host knows that no other is in use; None: all,
            so that every step of a compiled net has the same shapes.
    """

    stores: list[Tensor]
    positions: Int[Tensor, "B C"]
    used: Int[Tensor, "B"]
    seen: Bool[Tensor, "B W C"]
    cross: list[Tensor] = field(default_factory=list)
    source_real: Bool[Tensor, "B S"] | None = None
    limit: int | None = None

    @classmethod
    def empty(
        cls,
        shapes: list[tuple[int, int]],
        num_sources: int,
        capacity: int,
        beams: int,
        like: Tensor,
    ) -> "Cache":
        """`shapes`: key heads G and head width E of each layer; `like` has its type and device."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=like.device)

        size = capacity + 1
        return cls(
            [zeros(num_sources, size, 2 * g, e, dtype=like.dtype) for g, e in shapes],
            zeros(num_sources, size, dtype=torch.int64).fill_(FREE),
            zeros(num_sources, dtype=torch.int64),
            zeros(num_sources, beams, size, dtype=torch.bool),
        )

    @property
    def num_sources(self) -> int:
        """B, texts decoded side by side."""
        return self.used.size(0)

    @property
    def beams(self) -> int:
        """W, of each text."""
        return self.seen.size(1)

    @property
    def capacity(self) -> int:
        """C, tokens that a text's beams may have together."""
        return self.positions.size(1) - 1

    def begin(self, tokens: Tokens) -> tuple[list[LayerCache], MaskSpec, MaskSpec | None]:
        """Give slots to new tokens: of B rows, which all beams of a text share, or of B · W rows.

        Padding is given none. The rows of a text become queries of one: the layers take its tokens
        as (B, rows · T), and write to their slots in turn. Gives what each layer is called with,
        and what the tokens may attend to of the text and of the source.
        """
        rows, length = tokens.ids.shape
        texts, beams = self.num_sources, rows // self.num_sources
        assert rows in (texts, texts * self.beams), (rows, self.beams)
        real = None if tokens.real is None else tokens.real.reshape(texts, -1)
        queries = Span(tokens.positions.expand(rows, length).reshape(texts, -1), real)
        slots = self._take_slots(queries)
        allowed = None
        if self.beams > 1:
            own = slots.view(texts, beams, length).expand(-1, self.beams, -1)
            self.seen.scatter_(2, own, True)
            if beams > 1:
                seen = self.seen[:, :, : self.limit]
                allowed = seen if length == 1 else seen.repeat_interleave(length, 1)
        held = Span(self.positions[:, : self.limit])
        visible = MaskSpec(queries, held, causal=True, allowed=allowed)
        across = None
        if self.cross:
            places = torch.arange(self.cross[0].size(2), device=self.used.device)[None]
            across = MaskSpec(queries, Span(places, self.source_real), causal=False)
        first = torch.arange(texts, device=slots.device) * (self.capacity + 1)
        flat = (first[:, None] + slots).flatten()
        crosses: Sequence[Tensor | None] = self.cross or [None] * len(self.stores)
        layers = [
            LayerCache(store, flat, self.limit, cross)
            for store, cross in zip(self.stores, crosses, strict=True)
        ]
        return layers, visible, across

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Beam w of text b goes on from its former beam parents[b, w]."""
        self.seen = self.seen.gather(1, parents[..., None].expand_as(self.seen))

    def select(self, sources: Int[Tensor, "M"]) -> "Cache":
        """Only these texts, for example those that go on."""

        def of(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, sources)

        return Cache(
            [of(store) for store in self.stores],
            of(self.positions),
            of(self.used),
            of(self.seen),
            [of(store) for store in self.cross],
            None if self.source_real is None else of(self.source_real),
        )

    def grow(self, capacity: int) -> "Cache":
        """The same with a larger capacity."""
        shapes = [(store.size(2) // 2, store.size(3)) for store in self.stores]
        grown = Cache.empty(shapes, self.num_sources, capacity, self.beams, self.stores[0])
        size = self.capacity  # without the last slot, which holds nothing
        for large, small in zip(grown.stores, self.stores, strict=True):
            large[:, :size] = small[:, :size]
        grown.positions[:, :size] = self.positions[:, :size]
        grown.seen[:, :, :size] = self.seen[:, :, :size]
        return replace(grown, used=self.used, cross=self.cross, source_real=self.source_real)

    def forget(self, window: int) -> None:
        """Free the slots that no query to come can see through a window of so many positions.

        Afterwards at most `window · beams` slots of a text are in use, the first ones. In place,
        and nothing waits for the device. Not to be rewound afterwards.
        """
        held = self.positions.ne(FREE)
        newest = self.positions.masked_fill(~held, -1).amax(1, keepdim=True)
        kept = held & (self.positions > newest - window)
        # The kept slots of a text, in their order, before all others.
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
        order = order[:, : min(window * self.beams, self.capacity)]
        size = order.size(1)
        kept = kept.gather(1, order)
        for store in self.stores:
            index = order[:, :, None, None].expand(-1, -1, *store.shape[2:])
            store[:, :size] = store.gather(1, index)
        positions = self.positions.gather(1, order).masked_fill(~kept, FREE)
        self.positions.fill_(FREE)[:, :size] = positions
        seen = self.seen.gather(2, order[:, None].expand(-1, self.beams, -1)) & kept[:, None]
        self.seen.zero_()[:, :, :size] = seen
        self.used.copy_(kept.sum(1))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of every text; for one beam."""
        assert self.beams == 1, self.beams
        self.used.clamp_(max=length)
        self.positions[:, length:] = FREE

    def write_rows(self, rows: Int[Tensor, "M"], other: "Cache") -> None:
        """Texts `rows` leave, and those of `other`, of the same capacity, take their places."""
        for mine, new in zip(self._tensors(), other._tensors(), strict=True):
            mine.index_copy_(0, rows, new)

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

    def _tensors(self) -> list[Tensor]:
        """All tensors; each has the texts in its first dimension."""
        real = [] if self.source_real is None else [self.source_real]
        return [*self.stores, *self.cross, self.positions, self.used, self.seen, *real]


torch.export.register_dataclass(Cache)  # so that an exported step takes it
