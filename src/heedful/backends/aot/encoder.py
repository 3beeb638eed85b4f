"""Encoders as graphs in which products see real tokens alone, and the engine that calls them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from heedful.backends.aot.decoder import Compiled
from heedful.backends.aot.kernels import quantize
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.parts.masks import MaskSpec
from heedful.parts.tokens import Tokens, padding_mask

_DYNAMIC = torch.export.Dim.DYNAMIC


class Packed(NamedTuple):
    """N tokens of B texts, one text behind the other, and a grid (B, L) for their attention.

    Attributes:
        ids, positions, types: (N).
        places: (B, L), which token stands where in the grid; that of padding is any.
        real: (B, L), False at padding.
        back: (N), where in the flattened grid each token stands.
    """

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    types: Int[Tensor, "N"]
    places: Int[Tensor, "B L"]
    real: Tensor
    back: Int[Tensor, "N"]

    @classmethod
    def of(cls, rows: list[list[int]], types: list[list[int]] | None, num_types: int) -> "Packed":
        """Of texts that are not empty, and which of two texts each token is of."""
        ids = torch.cat([torch.tensor(row) for row in rows])
        of_tokens = torch.zeros_like(ids)
        if types is not None and num_types:  # RoBERTa has one type alone
            of_tokens = torch.cat([torch.tensor(row) for row in types]).clamp(max=num_types - 1)
        lengths = torch.tensor([len(row) for row in rows])
        places = pad_sequence([*torch.arange(len(ids)).split(lengths.tolist())], batch_first=True)
        real = padding_mask(lengths, places.size(1))
        positions = torch.arange(places.size(1)).expand_as(places)[real]
        return cls(ids, positions, of_tokens, places, real, real.flatten().nonzero()[:, 0])


class Graph(nn.Module):
    """A call of a net with tensors alone: `call(net, *tensors)`."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, *given: Any) -> Any:
        return self.call(self.net, *given)


class States:
    """States (N, D), in float32, of what `Packed` holds.

    Args:
        net: the projections of its attention then lead into the grid of a call and out of it.
    """

    packed: Packed  # of the call in hand

    def __init__(self, net: EncoderOnly) -> None:
        blocks: Any = net.encoder.blocks
        for block in blocks:
            attention = block.self_attention.sublayer
            attention.qkv.register_forward_hook(self._into_grid)
            attention.out.register_forward_pre_hook(self._out_of_grid)

    def __call__(self, net: EncoderOnly, *given: Tensor) -> Float[Tensor, "N D"]:
        self.packed = packed = Packed(*given)
        kinds = None if net.embedding.types is None else packed.types[:, None]
        x = net.embedding(Tokens(packed.ids[:, None], packed.positions[:, None]), kinds)
        columns = torch.arange(packed.places.size(1))[None]
        visible = MaskSpec.from_tokens(Tokens(packed.places, columns, packed.real), causal=False)
        visible.real = None  # padding does not come out of the grid
        encoder = net.encoder
        x = x.to(next(encoder.parameters()).dtype)
        for block, (mask, _) in zip(encoder.blocks, encoder.masks(x, visible), strict=True):
            x = block(x, mask)
        return encoder.final_dropout(encoder.final_norm(x))[:, 0].float()

    def _into_grid(self, module: nn.Module, given: Any, found: Tensor) -> Tensor:
        """From (N, 1, W) to (B, L, W)."""
        return found[:, 0][self.packed.places]

    def _out_of_grid(self, module: nn.Module, given: tuple[Tensor]) -> Tensor:
        """Back to (N, 1, W)."""
        return given[0].flatten(0, 1)[self.packed.back][:, None]


class Int8Product(nn.Module):
    """A linear layer in int8 by torch's product: one scale an output, and one a row of inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole, scale = quantize(linear.weight)
        bias = torch.zeros_like(scale) if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("weight", whole.t().contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        weight, scale, bias = (self.get_buffer(name) for name in ("weight", "scale", "bias"))
        flat = x.reshape(-1, x.size(-1))
        size = flat.abs().amax(-1, keepdim=True) / 127
        size = torch.where(size > 0, size, 1.0)
        sums = torch._int_mm(torch.round(flat / size).to(torch.int8), weight)
        return (sums * (size * scale) + bias).view(*x.shape[:-1], -1)


def encoder_parts(
    net: EncoderOnly, precision: str
) -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    """Each graph of a net, whose stack then has the precision; as of `compiling.compile_net`."""
    if precision == "bfloat16":
        net.encoder.bfloat16()
    if precision == "int8":
        for module in list(net.encoder.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Int8Product(child))
    given = Packed.of([[1] * 5, [1] * 4, [1] * 3], None, 0)
    one, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    parts: dict[str, Any] = {
        "states": (Graph(net, States(net)), tuple(given), (one, one, one, both, both, one))
    }
    if net.head is not None:
        width = net.embedding.tokens.embedding_dim
        parts["head"] = (
            Graph(net, lambda net, states: net.head(states)),
            (torch.ones(3, width),),
            (one,),
        )
    return parts


def encoder_facts(net: EncoderOnly) -> dict[str, Any]:
    """What `CompiledFacts` says of an encoder."""
    types = net.embedding.types
    return {
        "family": "encoder_only",
        "num_types": 0 if types is None else types.num_embeddings,
        "of_first": isinstance(net.head, ClassificationHead),
    }


class CompiledEncoder(Compiled):
    """The graphs of an encoder as an `Backend`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        has_head = "head" in self.net.facts.graphs
        self.reads = frozenset({"states", "logits"} if has_head else {"states"})

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.states`."""
        with torch.inference_mode(), self._threads(0):
            return _of_rows(self._states(rows, types), rows)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.logits`."""
        with torch.inference_mode(), self._threads(0):
            states = self._states(rows, types)
            if not self.net.facts.of_first:
                return _of_rows(self.net.run("head", [states]), rows)
            lengths = torch.tensor([len(row) for row in rows])
            firsts = states[lengths.cumsum(0) - lengths]
            return list(self.net.run("head", [firsts]).numpy())

    def _states(self, rows: list[list[int]], types: list[list[int]] | None) -> Float[Tensor, "N D"]:
        found: Tensor = self.net.run("states", [*Packed.of(rows, types, self.net.facts.num_types)])
        return found


def _of_rows(found: Float[Tensor, "N W"], rows: list[list[int]]) -> list[np.ndarray]:
    """What is of each row's tokens."""
    return [each.numpy() for each in found.split([len(row) for row in rows])]
