"""Encoders as compiled graphs over packed tokens, and the backend that runs them.

Linear layers see the tokens of a batch one after the other without padding; only attention sees
the padded grid.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from heedful.backends.aot.compiled_net import CompiledFacts, CompiledNet
from heedful.backends.aot.kernels import Int8MatmulLinear, replace_linears
from heedful.backends.base import Capability, Settings
from heedful.backends.torch.threads import run_with
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.parts.masks import MaskSpec
from heedful.parts.tokens import Tokens, padding_mask

_DYNAMIC = torch.export.Dim.DYNAMIC


class PackedBatch(NamedTuple):
    """N tokens of B rows, one row after the other, and the grid (B, L) of their attention.

    Attributes:
        ids, positions, types: (N).
        token_indices: (B, L), the packed index of the token in each cell; any index at padding.
        real: (B, L), False at padding.
        cell_indices: (N), the index of each token's cell in the flattened grid.
    """

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    types: Int[Tensor, "N"]
    token_indices: Int[Tensor, "B L"]
    real: Bool[Tensor, "B L"]
    cell_indices: Int[Tensor, "N"]

    @classmethod
    def from_rows(
        cls, rows: list[list[int]], types: list[list[int]] | None, num_types: int
    ) -> "PackedBatch":
        """Pack rows of at least one token each."""
        ids = torch.cat([torch.tensor(row) for row in rows])
        type_ids = torch.zeros_like(ids)
        if types is not None and num_types:  # RoBERTa has a single type
            type_ids = torch.cat([torch.tensor(row) for row in types]).clamp(max=num_types - 1)
        lengths = torch.tensor([len(row) for row in rows])
        indices = torch.arange(len(ids)).split(lengths.tolist())
        token_indices = pad_sequence([*indices], batch_first=True)
        real = padding_mask(lengths, token_indices.size(1))
        positions = torch.arange(token_indices.size(1)).expand_as(token_indices)[real]
        cells = real.flatten().nonzero()[:, 0]
        return cls(ids, positions, type_ids, token_indices, real, cells)


class Graph(nn.Module):
    """A function of a net and tensors as a module: `call(net, *inputs)`."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.net, *inputs)


class PackedStates:
    """Computes the states (N, D) of a `PackedBatch` in float32.

    Args:
        net: hooks of its attention layers move queries, keys and values into the grid and the
            attention output back.
    """

    batch: PackedBatch  # of the present call

    def __init__(self, net: EncoderOnly) -> None:
        blocks: Any = net.encoder.blocks
        for block in blocks:
            attention = block.self_attention.sublayer
            attention.qkv.register_forward_hook(self._into_grid)
            attention.out.register_forward_pre_hook(self._out_of_grid)

    def __call__(self, net: EncoderOnly, *tensors: Tensor) -> Float[Tensor, "N D"]:
        self.batch = batch = PackedBatch(*tensors)
        types = None if net.embedding.types is None else batch.types[:, None]
        x = net.embedding(Tokens(batch.ids[:, None], batch.positions[:, None]), types)
        columns = torch.arange(batch.token_indices.size(1))[None]
        visible = MaskSpec.from_tokens(
            Tokens(batch.token_indices, columns, batch.real), causal=False
        )
        visible.real = None  # padding is not moved out of the grid
        encoder = net.encoder
        x = x.to(next(encoder.parameters()).dtype)
        for block, (mask, _) in zip(encoder.blocks, encoder.masks(x, visible), strict=True):
            x = block(x, mask)
        return encoder.final_dropout(encoder.final_norm(x))[:, 0].float()

    def _into_grid(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """(N, 1, W) to (B, L, W)."""
        return output[:, 0][self.batch.token_indices]

    def _out_of_grid(self, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        """(B, L, W) to (N, 1, W)."""
        return inputs[0].flatten(0, 1)[self.batch.cell_indices][:, None]


def encoder_graphs(
    net: EncoderOnly, precision: str
) -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    """Each graph of a net, as in `compile.decoder_graphs`; the net's stack gets the precision."""
    if precision == "bfloat16":
        net.encoder.bfloat16()
    if precision == "int8":
        replace_linears(net.encoder, Int8MatmulLinear)
    example = PackedBatch.from_rows([[1] * 5, [1] * 4, [1] * 3], None, 0)
    one, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    graphs: dict[str, Any] = {
        "states": (Graph(net, PackedStates(net)), tuple(example), (one, one, one, both, both, one))
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
    ) -> None:
        self.net: Any = CompiledNet(directory, weights, facts)
        self.precision = precision
        self.settings = replace(settings, threads=settings.threads or 1, workers=1)
        has_head = "head" in facts.graphs
        self.capabilities = frozenset({"states", "logits"} if has_head else {"states"})

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.states`."""
        with torch.inference_mode(), run_with(self.settings.threads or 1):
            return _split(self._states(rows, types), rows)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.logits`."""
        with torch.inference_mode(), run_with(self.settings.threads or 1):
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
