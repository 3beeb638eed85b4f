"""The graphs that a net is exported as, with example inputs: modules that torch can trace.

An encoder is one graph; a language model is one step, which reads some tokens after those of its
cache; an encoder-decoder is both. Batches, lengths and caches of any size are accepted.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.cache import FREE, Cache, LayerGroup, layers_by_window
from heedful.parts.heads import ClassificationHead
from heedful.parts.tokens import Tokens, padding_mask

_DYNAMIC = torch.export.Dim.DYNAMIC
_BOTH = {0: _DYNAMIC, 1: _DYNAMIC}
_CROSS = {0: _DYNAMIC, 2: _DYNAMIC}


class Graph(NamedTuple):
    """A module with the names of its inputs and outputs.

    Attributes:
        sizes: which sizes of the inputs vary: the `dynamic_shapes` of `torch.export`.
        examples: of the inputs; the first is traced, and all are checked.
    """

    module: nn.Module
    inputs: list[str]
    outputs: list[str]
    sizes: tuple[Any, ...]
    examples: list[list[Tensor]]


class _Encoder(nn.Module):
    """States and logits of an encoder-only net."""

    def __init__(self, net: EncoderOnly) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, lengths: Tensor, types: Tensor | None = None) -> Any:
        states = self.net.encode(Tokens.from_ids(ids, lengths), types)
        head: Any = self.net.head
        if head is None:
            return states
        return states, head(states[:, 0] if isinstance(head, ClassificationHead) else states)


class _Sources(nn.Module):
    """Keys and values of the sources in each layer of an encoder-decoder's decoder."""

    def __init__(self, net: EncoderDecoder) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        states = self.net.encode(Tokens.from_ids(ids, lengths)).states
        blocks: Any = self.net.decoder.blocks
        return [block.cross_attention.sublayer.project_memory(states) for block in blocks]


class _Step(nn.Module):
    """The logits after some new tokens, and the cache with them."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.num_layers = len(net.decoder.cache_layers)

    def forward(
        self, ids: Tensor, lengths: Tensor, past_lengths: Tensor, *stores: Tensor
    ) -> list[Tensor]:
        """`stores`: the past of each layer; then the lengths of the sources and their keys."""
        past, sources = stores[: self.num_layers], stores[self.num_layers :]
        cross = [*sources[1:]]
        real = padding_mask(lengths, ids.size(1))
        columns = torch.arange(ids.size(1), device=ids.device)
        tokens = Tokens(ids, past_lengths[:, None] + columns, real)
        slots = torch.arange(past[0].size(1) + ids.size(1) + 1, device=ids.device)
        slots = slots.expand(ids.size(0), -1)  # the last one is for padding
        filled = torch.where(slots < past_lengths[:, None], slots, FREE)
        visible = torch.zeros_like(filled, dtype=torch.bool)[:, None]
        groups, full = [], {}
        for window, layers in layers_by_window(self.net.decoder.cache_layers).items():
            for layer in layers:
                store = past[layer]
                more = store.new_zeros(store.size(0), ids.size(1) + 1, *store.shape[2:])
                full[layer] = torch.cat([store, more], 1)
            own = [full[layer] for layer in layers]
            used = past_lengths.clone()
            groups.append(LayerGroup(own, filled.clone(), used, visible.clone(), layers, window))
        source_real = padding_mask(sources[0], cross[0].size(2)) if cross else None
        states = self.net.decode(tokens, Cache(groups, cross, source_real))
        rows = torch.arange(ids.size(0), device=ids.device)
        logits = self.net.head(states[rows, lengths - 1])
        return [logits, *(full[layer][:, :-1] for layer in range(self.num_layers))]


def graphs_of(net: Any, config: Any) -> dict[str, Graph]:
    """The graphs of a net, `encoder` and `decoder` or one of them, with inputs of several sizes."""
    if isinstance(net, EncoderOnly):
        return {"encoder": _encoder_graph(net, config)}
    if isinstance(net, EncoderDecoder):
        sources = _sources_graph(net, config)
        return {"encoder": sources, "decoder": _step_graph(net, config, sources)}
    return {"decoder": _step_graph(net, config, None)}


def _encoder_graph(net: EncoderOnly, config: Any) -> Graph:
    """The graph of an encoder-only net."""
    types = net.embedding.types
    num_types = 0 if types is None else types.num_embeddings
    names = ["ids", "lengths", "types"][: 3 if num_types > 1 else 2]
    outputs = ["states"] if net.head is None else ["states", "logits"]
    examples = []
    for rows, width in _batch_sizes(config.max_length):
        inputs = [*_padded_ids(rows, width, config.vocab_size)]
        if num_types > 1:
            inputs.append(torch.randint(num_types, (rows, width)))
        examples.append(inputs)
    sizes = (_BOTH, {0: _DYNAMIC}, _BOTH)[: len(names)]
    return Graph(_Encoder(net), names, outputs, sizes, examples)


def _sources_graph(net: EncoderDecoder, config: Any) -> Graph:
    """The graph of the encoder of an encoder-decoder."""
    sources = _batch_sizes(config.max_length)
    examples = [[*_padded_ids(*size, config.src_vocab_size)] for size in sources]
    names = [f"cross_{layer}" for layer in range(len(net.decoder.blocks))]
    sizes = (_BOTH, {0: _DYNAMIC})
    return Graph(_Sources(net), ["ids", "lengths"], names, sizes, examples)


def _step_graph(net: Any, config: Any, sources: Graph | None) -> Graph:
    """The graph of the step of a net.

    Args:
        sources: the graph of an encoder-decoder's encoder.
    """
    layers = net.decoder.cache_layers
    past = [f"past_{layer}" for layer in range(len(layers))]
    cross = [] if sources is None else sources.outputs
    names = ["ids", "lengths", "past_lengths", *past]
    names += ["source_lengths", *cross] if cross else []
    examples = []
    half = config.max_length // 2
    for number, (rows, width) in enumerate(_batch_sizes(half)):
        before = min(half, (3, 0, 1, 4)[number])
        ids, lengths = _padded_ids(rows, width, _vocab_size(config))
        pasts = torch.randint(before + 1, (rows,))
        pasts[0] = before
        stores = [torch.randn(rows, before, 2 * heads, head_dim) for heads, head_dim, _ in layers]
        examples.append([ids, lengths, pasts, *stores])
        if sources is not None:
            source, source_lengths = sources.examples[number]
            examples[-1] += [source_lengths, *sources.module(source, source_lengths)]
    one = {0: _DYNAMIC}
    of_stores: list[Any] = [_BOTH] * len(past)
    of_stores += [one, *[_CROSS] * len(cross)] if cross else []
    outputs = ["logits", *(f"cache_{layer}" for layer in range(len(layers)))]
    return Graph(_Step(net), names, outputs, (_BOTH, one, one, tuple(of_stores)), examples)


def _vocab_size(config: Any) -> int:
    """Entries of the vocabulary that a decoder reads."""
    size: int = getattr(config, "tgt_vocab_size", None) or config.vocab_size
    return size


def _batch_sizes(longest: int) -> Iterator[tuple[int, int]]:
    """Rows and widths of the batches that a graph is checked with; the first one is traced."""
    for rows, width in ((3, 5), (1, 1), (2, 7), (4, 2)):
        yield rows, max(1, min(width, longest))


def _padded_ids(rows: int, width: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Random ids (B, T), and lengths of at least 1, the first of which is T."""
    generator = torch.Generator().manual_seed(rows * 100 + width)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return torch.randint(vocab_size, (rows, width), generator=generator), lengths
