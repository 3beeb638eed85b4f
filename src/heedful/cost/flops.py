"""FLOPs of the matrix products of a training step, by formulas over the modules of a net.

A product (m, k) x (k, n) is 2 m n k FLOPs. A linear layer takes 2 N P forward for N rows and P
weights, 2 N P for the gradient of its input and 2 N P for that of its weights, if they are
needed; so 6 N P in all (Kaplan et al. 2020, table 1 and sec. 2.1; Hoffmann et al. 2022, appendix
F). Attention takes 2 B H T K E for the scores and the same for the values; its backward pass twice
that, and a fused kernel computes the scores again (Dao 2023, FlashAttention-2). Scores of hidden
keys count where the products compute them. Norms, activations, softmax, embeddings and the
optimizer are no products.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from heedful.data.collate import Batch
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attend_blocks import diagonal_blocks
from heedful.parts.attend_products import needs_products
from heedful.parts.attention import MultiHead
from heedful.parts.experts import Experts
from heedful.parts.helpers import simulated_device
from heedful.parts.lora import LoRALinear
from heedful.parts.masks import MaskSpec
from heedful.parts.residual import PreNorm


@dataclass(frozen=True)
class Flops:
    """FLOPs of the products of a step.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, without the products that activation checkpointing repeats.
        recomputed: forward products of blocks that activation checkpointing repeats.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """FLOPs of the step."""
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recomputed + other.recomputed,
        )

    def __mul__(self, factor: int) -> "Flops":
        return Flops(self.forward * factor, self.backward * factor, self.recomputed * factor)


def step_flops(
    net: nn.Module,
    batch: Batch,
    *,
    passes: int = 1,
    checkpointed: bool = False,
    on_accelerator: bool = False,
) -> Flops:
    """FLOPs of the products of the forward and the backward pass of a batch.

    Args:
        net: on any device.
        passes: forward passes with their backward passes (R-Drop has two).
        checkpointed: activation checkpointing computes the blocks again.
        on_accelerator: count attention and experts as on a GPU: a fused kernel, and every expert
            called with all tokens.
    """
    counter = _Counter(batch, checkpointed, on_accelerator)
    return sum(counter.products(net), Flops()) * passes


class _Counter:
    """Products of a batch in the order of the forward pass.

    `needs_input_grad` is True after the first parameter that is trained: before it, no product
    computes the gradient of its input.
    """

    def __init__(self, batch: Batch, checkpointed: bool, on_accelerator: bool) -> None:
        self.batch = batch
        self.checkpointed = checkpointed
        self.on_accelerator = on_accelerator
        self.needs_input_grad = False

    def products(self, net: nn.Module) -> Iterator[Flops]:
        """All products of a net of one of the three families."""
        batch, head = self.batch, net.get_submodule("head") if hasattr(net, "head") else None
        rows = batch.tokens.ids.numel()
        targets = MaskSpec.from_tokens(batch.tokens, causal=not _is_encoder(net))
        if isinstance(net, EncoderDecoder):
            assert batch.source is not None
            source = MaskSpec.from_tokens(batch.source, causal=False)
            cross = MaskSpec(batch.tokens.span, batch.source.span, causal=False)
            yield from self._stack(net.src_embedding, net.encoder, source, batch.source.ids.numel())
            source_flows = self.needs_input_grad
            self.needs_input_grad = False
            memory = batch.source.ids.numel(), source_flows
            yield from self._stack(net.tgt_embedding, net.decoder, targets, rows, cross, memory)
            self.needs_input_grad |= source_flows
        else:
            stack: Any = next(m for m in net.children() if isinstance(m, Stack))
            yield from self._stack(net.get_submodule("embedding"), stack, targets, rows)
        if head is None:
            return
        for module in head.modules():
            if isinstance(module, nn.Linear):
                yield from self._linear(module, batch.num_targets, is_repeated=False)

    def _stack(
        self,
        embedding: nn.Module,
        stack: Stack,
        spec: MaskSpec,
        rows: int,
        cross: MaskSpec | None = None,
        memory: tuple[int, bool] = (0, False),
    ) -> Iterator[Flops]:
        self._pass(embedding)
        for block in stack.blocks:
            assert isinstance(block, Block)
            yield from self._block(block, spec, rows, cross, memory)

    def _block(
        self,
        block: Block,
        spec: MaskSpec,
        rows: int,
        cross: MaskSpec | None,
        memory: tuple[int, bool],
    ) -> Iterator[Flops]:
        attention: Any = block.self_attention.sublayer
        self._pass(block.self_attention.norm)
        yield from self._linear(attention.qkv, rows)
        yield self._scores(attention, spec)
        yield from self._linear(attention.out, rows)
        if block.cross_attention is not None:
            assert cross is not None
            attention = block.cross_attention.sublayer
            self._pass(block.cross_attention.norm)
            source_rows, source_flows = memory
            flows, self.needs_input_grad = self.needs_input_grad, source_flows
            yield from self._linear(attention.kv, source_rows)
            source_flows, self.needs_input_grad = self.needs_input_grad, flows
            yield from self._linear(attention.q, rows)
            self.needs_input_grad |= source_flows
            yield self._scores(attention, cross)
            yield from self._linear(attention.out, rows)
        self._pass(block.feedforward.norm)
        yield from self._feedforward(block.feedforward, rows)

    def _feedforward(self, residual: Any, rows: int) -> Iterator[Flops]:
        sublayer = residual.sublayer
        networks = [(sublayer, rows)]
        if isinstance(sublayer, Experts):
            yield from self._linear(sublayer.router, rows)
            count = len(sublayer.experts)
            routed, rest = divmod(rows * sublayer.top_k, count)
            calls = [rows] * count if self.on_accelerator else None
            shares = calls or [routed + (index < rest) for index in range(count)]
            networks = list(zip(sublayer.experts, shares, strict=True))
        products = [
            product
            for network, number in networks
            for module in network.modules()
            if type(module) is nn.Linear or isinstance(module, LoRALinear)
            for product in self._linear(module, number)
        ]
        # The last product is not repeated if no later operation keeps its result.
        is_last = type(residual) is PreNorm and not residual.dropout.p
        if is_last and not isinstance(sublayer, Experts):
            products[-1] = replace(products[-1], recomputed=0)
        yield from products

    def _linear(self, module: Any, rows: int, *, is_repeated: bool = True) -> Iterator[Flops]:
        weight = module.weight
        flows = self.needs_input_grad
        factor = flows + weight.requires_grad
        yield self._product(2 * rows * weight.numel(), factor, is_repeated)
        if isinstance(module, LoRALinear):
            yield self._product(2 * rows * module.lora_a.numel(), flows + 1)
            yield self._product(2 * rows * module.lora_b.numel(), 2)
        self._pass(module)

    def _scores(self, attention: MultiHead, spec: MaskSpec) -> Flops:
        """Scores and values over the blocks of the mask."""
        parts = diagonal_blocks(spec, attention.window)
        queries, keys = (span.positions.size(1) for span in (spec.queries, spec.keys))
        pairs = sum(queries * keys if p is None else len(p[0]) * len(p[1]) for p in parts)
        rows = self.batch.tokens.ids.size(0)
        flops = 4 * rows * attention.num_heads * attention.head_dim * pairs
        with simulated_device("cuda" if self.on_accelerator else "cpu"):
            options, x = attention.options, torch.empty(0)
            forms = needs_products(spec, options, parts[0], x, needs_grad=True)
        if not self.needs_input_grad:
            return self._product(flops, 0)
        return self._product(flops, 2 if forms else 2.5)

    def _product(self, flops: int, backward: float, is_repeated: bool = True) -> Flops:
        """A product of the forward pass, with the factor of its backward pass."""
        repeated = flops if self.checkpointed and is_repeated else 0
        return Flops(flops, round(flops * backward), repeated)

    def _pass(self, module: nn.Module) -> None:
        """The values after this module need a gradient if one of its parameters is trained."""
        self.needs_input_grad |= any(p.requires_grad for p in module.parameters())


def _is_encoder(net: nn.Module) -> bool:
    return hasattr(net, "encoder") and not isinstance(net, EncoderDecoder)
