"""The decoding step as an ONNX graph over a `Cache`, which the searches of heedful call.

The graph of `heedful export onnx` returns a longer cache at each step. Here the new keys and values
are scattered into the stores of a `Cache`: each store is an input and an output, and where both are
bound to the same memory nothing is copied. The host assigns slots and computes the masks.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.backends.onnxruntime.graphs import (
    BOTH,
    CROSS,
    DYNAMIC,
    Graph,
    batch_sizes,
    vocab_size,
)
from heedful.parts.cache import Cache, layers_by_window
from heedful.parts.masks import MaskSpec, visible_keys
from heedful.parts.tokens import Span, Tokens

_OF_GROUP = ("slots", "read", "key_positions", "visible")


class CachedStep(nn.Module):
    """Logits after some of the new tokens, and the stores of a cache with their keys and values.

    Inputs, for B texts with n new tokens each (those of all beams, one beam after the other):
    `ids` and `positions` (B, n); `indices` (R), the new tokens whose logits are returned; for the
    layers of each window `slots` (B, n) and `read` (B, L), indices into the flattened slots of all
    texts that are written and then read, `key_positions` (B, L), and `visible` (B, n, L), True
    where a token may attend to a slot; `store_i` (B · C, 2·G·E) of each layer; of an
    encoder-decoder `source_real` (B, S) and `cross_i` (B, 2·G, S, E).
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.windows = layers_by_window(net.decoder.cache_layers)

    def forward(self, ids: Tensor, positions: Tensor, indices: Tensor, *tensors: Tensor) -> Any:
        cache = _GraphCache(self.windows, tensors)
        states = self.net.decode(Tokens(ids, positions), cache)
        logits = self.net.head(states.index_select(1, indices))
        return [logits, *(cache.layers[index].store for index in range(len(cache.layers)))]


class _GraphLayer:
    """A `LayerCache` in a graph, where nothing is written in place."""

    def __init__(self, store: Tensor, slots: Tensor, read: Tensor, cross: Tensor | None) -> None:
        self.store = store
        self.slots = slots
        self.read = read
        self.cross = cross

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.update`."""
        heads, width = keys.size(1), keys.size(3)
        rows = torch.cat([keys, values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
        self.store = self.store.index_put((self.slots.flatten(),), rows)
        halves = self.store.view(-1, heads * width)  # keys, then values, of each slot
        keys, values = (
            F.embedding(self.read * 2 + half, halves).unflatten(2, (heads, width)).transpose(1, 2)
            for half in (0, 1)
        )
        return keys, values


class _GraphCache:
    """A `Cache` in a graph, with the inputs of `CachedStep`."""

    def __init__(self, windows: dict[int | None, list[int]], tensors: tuple[Tensor, ...]) -> None:
        count = len(_OF_GROUP)
        self._groups = [
            (tensors[count * number : count * (number + 1)], layers)
            for number, layers in enumerate(windows.values())
        ]
        num_layers = sum(map(len, windows.values()))
        stores = tensors[count * len(windows) :]
        cross = stores[num_layers + 1 :]
        self._source_real = stores[num_layers] if cross else None
        self.layers: dict[int, _GraphLayer] = {}
        for (slots, read, _, _), layers in self._groups:
            for index in layers:
                source = cross[index] if cross else None
                self.layers[index] = _GraphLayer(stores[index], slots, read, source)
        self.num_sources = tensors[0].size(0)

    def begin(self, tokens: Tokens) -> tuple[list[Any], list[MaskSpec], MaskSpec | None]:
        """See `Cache.begin`."""
        queries = Span(tokens.positions)
        masks: dict[int, MaskSpec] = {}
        for (_, _, key_positions, visible), layers in self._groups:
            keys = Span(key_positions)
            masks |= dict.fromkeys(layers, MaskSpec(queries, keys, causal=False, allowed=visible))
        cross_mask = None
        if self._source_real is not None:
            columns = torch.arange(self._source_real.size(1))[None]
            cross_mask = MaskSpec(queries, Span(columns, self._source_real), causal=False)
        order = range(len(masks))
        return [self.layers[index] for index in order], [masks[i] for i in order], cross_mask


class StepInputs(NamedTuple):
    """The inputs of a `CachedStep` that differ between calls, in its order, and the stores."""

    tensors: list[Tensor]
    stores: list[Tensor]
    sources: list[Tensor]

    @classmethod
    def of_tokens(cls, tokens: Tokens, cache: Cache, indices: Int[Tensor, "R"]) -> "StepInputs":
        """The inputs for new tokens, which get slots of the cache.

        Args:
            tokens: one row per text, or one per beam (`Cache.begin`).
        """
        texts = cache.num_sources
        positions = tokens.positions.expand(tokens.ids.shape).reshape(texts, -1)
        layers, masks, _ = cache.begin(tokens)
        tensors = [tokens.ids.reshape(texts, -1), positions, indices]
        for group in cache.groups:
            layer, mask = layers[group.layers[0]], masks[group.layers[0]]
            keys = mask.keys.positions
            width = group.capacity + 1
            first = torch.arange(0, texts * width, width)[:, None]
            read = first + torch.arange(keys.size(1))
            visible = visible_keys(mask.queries, mask.keys, causal=mask.causal)
            if mask.allowed is not None:
                visible = mask.allowed if visible is None else visible & mask.allowed
            assert visible is not None, "a cache without beams is causal"
            shape = (texts, positions.size(1), keys.size(1))
            tensors += [layer.slots.view(texts, -1), read, keys.expand(texts, -1)]
            tensors += [visible.expand(shape)]
        stores = [store.flatten(0, 1).flatten(1) for store in cache.stores]
        sources = [] if cache.source_real is None else [cache.source_real, *cache.cross]
        return cls([tensor.contiguous() for tensor in tensors], stores, sources)


def step_names(windows: int, layers: int, *, has_sources: bool) -> list[str]:
    """The names of the inputs of a `CachedStep`, in their order."""
    groups = [f"{name}_{number}" for number in range(windows) for name in _OF_GROUP]
    names = ["ids", "positions", "indices", *groups, *(f"store_{i}" for i in range(layers))]
    return [*names, "source_real", *(f"cross_{i}" for i in range(layers))] if has_sources else names


def cached_step_graph(net: Any, config: Any, sources: Graph | None) -> Graph:
    """The `CachedStep` of a net, with inputs of several sizes.

    Args:
        sources: the graph of an encoder-decoder's encoder.
    """
    layers = net.decoder.cache_layers
    examples = []
    for number, (rows, width) in enumerate(batch_sizes(config.max_length // 2)):
        beams = (1, 1, 2, 1)[number]
        cache = Cache.empty(layers, rows, 13 + number, beams, torch.empty(0))
        for group_number, group in enumerate(cache.groups):
            cache.groups[group_number] = group.resized(13 + number + group_number)
            for store in cache.groups[group_number].stores:
                store.normal_()
        if sources is not None:
            source, lengths = sources.examples[number]
            cache.cross = [*sources.module(source, lengths)]
            cache.source_real = Tokens.from_ids(source, lengths).real
        ids = torch.randint(vocab_size(config), (rows * beams, width))
        if number > 0:  # after earlier tokens
            first = Tokens(ids[:rows, :1], torch.zeros(rows, 1, dtype=torch.long))
            StepInputs.of_tokens(first, cache, torch.tensor([0]))
        columns = torch.arange(width)[None] + min(number, 1)
        last = torch.arange(width - 1, beams * width, width)
        indices = torch.tensor([1, 0]) % width if number == 0 else last
        inputs = StepInputs.of_tokens(Tokens(ids, columns), cache, indices)
        examples.append([*inputs.tensors, *inputs.stores, *inputs.sources])
    windows = len(layers_by_window(layers))
    of_group = (BOTH, BOTH, BOTH, BOTH | {2: DYNAMIC})
    rest: list[Any] = [*of_group * windows, *[{0: DYNAMIC}] * len(layers)]
    rest += [] if sources is None else [BOTH, *[CROSS] * len(layers)]
    names = step_names(windows, len(layers), has_sources=sources is not None)
    outputs = ["logits", *(f"stored_{layer}" for layer in range(len(layers)))]
    sizes = (BOTH, BOTH, {0: DYNAMIC}, tuple(rest))
    return Graph(CachedStep(net), names, outputs, sizes, examples)
