"""Encoders as compiled graphs over packed tokens, and the backend that runs them.

The tokens of a batch lie one after the other without padding, in attention too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.backends.aot.compiled_net import CompiledFacts, CompiledNet
from heedful.backends.aot.kernels import (
    PackedFeedForward,
    packed_linear,
    replace_linears,
    text_attention,
)
from heedful.backends.base import Capability, Settings
from heedful.backends.torch.threads import ThreadPolicy
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.attention import Attention
from heedful.parts.heads import ClassificationHead
from heedful.parts.positions import RotaryPositions, rotate
from heedful.parts.tokens import Tokens

_DYNAMIC = torch.export.Dim.DYNAMIC


class PackedBatch(NamedTuple):
    """N tokens of B rows, one row after the other.

    Attributes:
        ids, positions, types: (N).
        starts: (B + 1), the index of the first token of each row, then N.
    """

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    types: Int[Tensor, "N"]
    starts: Int[Tensor, "starts"]

    @classmethod
    def from_rows(
        cls, rows: list[list[int]], types: list[list[int]] | None, num_types: int
    ) -> "PackedBatch":
        """Pack rows of at least one token each."""
        ids = torch.tensor([token for row in rows for token in row])
        type_ids = torch.zeros_like(ids)
        if types is not None and num_types:  # RoBERTa has a single type
            flat = [kind for row in types for kind in row]
            type_ids = torch.tensor(flat).clamp(max=num_types - 1)
        lengths = torch.tensor([0, *map(len, rows)])
        starts = lengths.cumsum(0)
        positions = torch.arange(len(ids)) - starts[:-1].repeat_interleave(lengths[1:])
        return cls(ids, positions, type_ids, starts)


class Graph(nn.Module):
    """A function of a net and tensors as a module: `call(net, *inputs)`."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.net, *inputs)


class PackedAttention(nn.Module):
    """Self-attention within each text of a packed batch; the mask is a `PackedMask`."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        assert isinstance(attention.position, RotaryPositions | None)
        assert attention.softcap is None
        self.qkv, self.out = attention.qkv, attention.out
        self.query_norm, self.key_norm = attention.query_norm, attention.key_norm
        self.heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        self.head_dim, self.window = attention.head_dim, attention.window or 0
        self.scale = attention.scale or attention.head_dim**-0.5
        self.position = attention.position

    def forward(
        self, x: Float[Tensor, "N 1 D"], mask: "PackedMask", cache: None = None
    ) -> Float[Tensor, "N 1 D"]:
        """The output for each token; `cache` is that of `Block`, and unused."""
        query, key, value = self.qkv(x).view(x.size(0), -1, 1, self.head_dim).split(self.heads, 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.position is not None:
            rotation = self.position(mask.positions)
            query, key = rotate(query, rotation), rotate(key, rotation)
        tensors = [item[:, :, 0].float() for item in (query, key, value)]
        heads = text_attention(*tensors, mask.starts, self.scale, self.window)
        out: Tensor = self.out(heads.flatten(1)[:, None].to(x.dtype))
        return out


class PackedMask(NamedTuple):
    """Positions (N, 1) and `PackedBatch.starts` of a batch."""

    positions: Int[Tensor, "N 1"]
    starts: Int[Tensor, "starts"]


def packed_states(net: EncoderOnly, *tensors: Tensor) -> Float[Tensor, "N D"]:
    """The states of a `PackedBatch` in float32, by a net with `PackedAttention`."""
    batch = PackedBatch(*tensors)
    types = None if net.embedding.types is None else batch.types[:, None]
    positions = batch.positions[:, None]
    x = net.embedding(Tokens(batch.ids[:, None], positions), types)
    encoder: Any = net.encoder
    x = x.to(next(encoder.parameters()).dtype)
    for block in encoder.blocks:
        x = block(x, PackedMask(positions, batch.starts))
    states: Tensor = encoder.final_dropout(encoder.final_norm(x))[:, 0].float()
    return states


def encoder_graphs(
    net: EncoderOnly, precision: str
) -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    """Each graph of a net, as in `compile.decoder_graphs`; the net's stack gets the precision."""
    if precision == "bfloat16":
        net.encoder.bfloat16()
    blocks: Any = net.encoder.blocks
    for block in blocks:
        block.self_attention.sublayer = PackedAttention(block.self_attention.sublayer)
        if precision == "int8" and PackedFeedForward.can_replace(block.feedforward.sublayer):
            block.feedforward.sublayer = PackedFeedForward(block.feedforward.sublayer)
    if precision == "int8":
        make = partial(packed_linear, precision=precision, releases_lock=True)
        replace_linears(net.encoder, make)
    example = PackedBatch.from_rows([[1] * 5, [1] * 4, [1] * 3], None, 0)
    one = {0: _DYNAMIC}
    graphs: dict[str, Any] = {
        "states": (Graph(net, packed_states), tuple(example), (one, one, one, one))
    }
    if net.head is not None:
        width = net.embedding.tokens.embedding_dim
        graphs["head"] = (Graph(net, _head), (torch.ones(3, width),), (one,))
    return graphs


def encoder_facts(net: EncoderOnly) -> dict[str, Any]:
    """The `CompiledFacts` that are specific to encoders."""
    types = net.embedding.types
    return {
        "family": "encoder_only",
        "num_types": 0 if types is None else types.num_embeddings,
        "first_token_only": isinstance(net.head, ClassificationHead),
    }


class CompiledEncoder:
    """The compiled graphs of an encoder-only net as a backend; CPU only.

    Args:
        directory: of the graphs (`heedful.backends.aot.compile`).
        weights: the model's own file of weights.
        trusted: as in `CompiledNet`.

    Raises:
        UserError: as in `CompiledNet`.
    """

    name = "compiled"
    capabilities: frozenset[Capability]

    def __init__(
        self,
        directory: Path,
        weights: Path,
        facts: CompiledFacts,
        precision: str,
        settings: Settings,
        *,
        trusted: bool = False,
    ) -> None:
        self.net: Any = CompiledNet(directory, weights, facts, settings.workers, trusted=trusted)
        self.precision = precision
        self.settings = replace(settings, threads=settings.threads or 1)
        self.threads = ThreadPolicy(self.settings)
        has_head = "head" in facts.graphs
        self.capabilities = frozenset({"states", "logits"} if has_head else {"states"})

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.states`."""
        with torch.inference_mode(), self.threads.for_tokens(sum(map(len, rows))):
            return _split(self._states(rows, types), rows)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.logits`."""
        with torch.inference_mode(), self.threads.for_tokens(sum(map(len, rows))):
            states = self._states(rows, types)
            if not self.net.facts.first_token_only:
                return _split(self.net.run("head", [states]), rows)
            lengths = torch.tensor([len(row) for row in rows])
            first_states = states[lengths.cumsum(0) - lengths]
            return list(self.net.run("head", [first_states]).numpy())

    def _states(self, rows: list[list[int]], types: list[list[int]] | None) -> Float[Tensor, "N D"]:
        batch = PackedBatch.from_rows(rows, types, self.net.facts.num_types)
        states: Tensor = self.net.run("states", [*batch])
        return states


def _head(net: EncoderOnly, states: Tensor) -> Tensor:
    head: Any = net.head
    logits: Tensor = head(states)
    return logits


def _split(values: Float[Tensor, "N W"], rows: list[list[int]]) -> list[np.ndarray]:
    """The values of each row's tokens."""
    return [of_row.numpy() for of_row in values.split([len(row) for row in rows])]
