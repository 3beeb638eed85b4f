"""Blocks of attention and feed-forward, and stacks of blocks."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.parts.attention import AttentionPlan, plan_attention
from heedful.parts.cache import Cache, LayerCache, LayerShape
from heedful.parts.helpers import has_hooks, kernel_device
from heedful.parts.joined_cache import JoinedCache, JoinedLayer
from heedful.parts.residual import Residual
from heedful.parts.tokens import MaskSpec, Tokens
from heedful.parts.unpadding import Unpadding


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each in a residual connection.

    >>> attention, feedforward = Attention(16, 2), FeedForward(16)
    >>> norms = nn.LayerNorm(16), nn.LayerNorm(16)
    >>> block = Block(PreNorm(attention, norms[0]), None, PreNorm(feedforward, norms[1]))
    """

    def __init__(
        self,
        self_attention: Residual,
        cross_attention: Residual | None,
        feedforward: Residual,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feedforward = feedforward

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        self_plan: AttentionPlan,
        memory: Float[Tensor, "B S D"] | None = None,
        cross_plan: AttentionPlan | None = None,
        cache: LayerCache | JoinedLayer | None = None,
    ) -> Float[Tensor, "N T D"]:
        """The states after the block: (N, T, D).

        Args:
            self_plan, cross_plan: of self-attention and of cross-attention.
            memory: encoder states of the source; without a cache.
            cache: keys and values of the tokens before `x`, and of the source.
        """
        x = self.self_attention(x, mask=self_plan, cache=cache)
        if self.cross_attention is not None:
            projected = None if cache is None else cache.cross
            x = self.cross_attention(x, mask=cross_plan, memory=memory, projected=projected)
        return self.feedforward(x)


class Stack(nn.Module):
    """A sequence of blocks, a final norm (needed with `PreNorm`) and a final dropout (T5).

    Args:
        blocks: applied in this order.
        final_norm: default: none.
        final_dropout: after the final norm; default: none.

    Attributes:
        activation_checkpointing: keep only the input of each block, and compute its activations
            again in the backward pass (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
            Cost").
        skips_padding: in training on a CPU, blocks compute the real tokens only (`Unpadding`): the
            states between their modules are (1, N, D) for N real tokens, with up to 15 of padding.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        final_norm: nn.Module | None = None,
        *,
        final_dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.Identity() if final_norm is None else final_norm
        self.final_dropout = nn.Identity() if final_dropout is None else final_dropout
        self.activation_checkpointing = False
        self.skips_padding = False
        # Called with a block and its inputs in training (`training/block_compiler.py`).
        self.compiled_block: Callable[..., Tensor] | None = None

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        tokens: Tokens,
        *,
        causal: bool = False,
        memory: Float[Tensor, "N S D"] | None = None,
        source: Tokens | None = None,
        cache: Cache | JoinedCache | None = None,
    ) -> Float[Tensor, "N T D"]:
        """States (N, T, D) after all blocks.

        Args:
            x: embeddings.
            tokens: the tokens of `x`.
            causal: hide the tokens after each one; with a cache this is always so.
            memory, source: states of the encoder, and their tokens; with cross-attention, without a
                cache.
            cache: keys and values of the tokens before; those of `x` are written to it.
        """
        if cache is not None:
            return self._decode(x, tokens, cache)
        self_mask = MaskSpec(tokens, causal=causal)
        cross_mask = None if source is None else MaskSpec(tokens, source, causal=False)
        unpaddings = None
        if self.skips_padding and self.training:
            unpaddings = self._unpaddings(x, tokens, memory, source)
        plans = self.plans(x, [self_mask] * len(self.blocks), cross_mask, unpaddings)
        if unpaddings is not None:
            x = unpaddings[0].unpad(x)
            memory = None if memory is None else unpaddings[1].unpad(memory)
        is_checkpointed = self.activation_checkpointing and torch.is_grad_enabled()
        compiled = self.compiled_block if self.training else None
        for block, (self_plan, cross_plan) in zip(self.blocks, plans, strict=True):
            run: Callable[..., Tensor] = block if compiled is None else partial(compiled, block)
            inputs = x, self_plan, memory, cross_plan
            x = checkpoint(run, *inputs, use_reentrant=False) if is_checkpointed else run(*inputs)
        x = self.final_dropout(self.final_norm(x))
        return x if unpaddings is None else unpaddings[0].pad(x)

    def _decode(
        self, x: Tensor, tokens: Tokens, cache: Cache | JoinedCache
    ) -> Float[Tensor, "N T D"]:
        """`forward` with a cache, to which each block writes: it must not run twice."""
        shape = x.shape
        layers, self_masks, cross_mask = cache.begin(tokens)
        x = x.reshape(cache.num_texts, -1, x.size(-1))
        plans = self.plans(x, self_masks, cross_mask)
        for block, plan, layer in zip(self.blocks, plans, layers, strict=True):
            x = block(x, plan[0], None, plan[1], layer)
        out: Tensor = self.final_dropout(self.final_norm(x))
        return out.view(shape)

    def _unpaddings(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None, source: Tokens | None
    ) -> tuple[Unpadding, Unpadding] | None:
        """The unpadding of the states and of the memory (without one: again of the states).

        None: the states stay padded, since the pass needs fixed shapes or runs on no CPU, a hook
        reads attention weights, the real tokens are not indexed, or a side has none.
        """
        is_eager = self.compiled_block is None and not torch.compiler.is_compiling()
        if not (is_eager and kernel_device(x) == "cpu"):
            return None
        blocks: Any = self.blocks
        parts = (part for b in blocks for part in (b.self_attention, b.cross_attention))
        if any(part is not None and has_hooks(part.sublayer.weights_hook) for part in parts):
            return None
        sides = [(x, tokens)]
        if memory is not None and source is not None:
            sides.append((memory, source))
        if any(side.real is not None and side.real_index is None for _, side in sides):
            return None
        unpaddings = [Unpadding(states.shape[:2], side.real_index) for states, side in sides]
        if not all(unpadding.num_tokens for unpadding in unpaddings):
            return None
        return unpaddings[0], unpaddings[-1]

    def plans(
        self,
        x: Float[Tensor, "N T D"],
        self_masks: Sequence[MaskSpec],
        cross_mask: MaskSpec | None = None,
        unpaddings: tuple[Unpadding, Unpadding] | None = None,
    ) -> list[tuple[AttentionPlan, AttentionPlan | None]]:
        """Plans of self-attention and cross-attention of each block; equal layers share them.

        They are made once, before the first block: a block whose activations are checkpointed must
        not compute tensors that are used outside of it.

        Args:
            x: embeddings.
            self_masks: for self-attention, of each block; of layers with one window they are equal.
            cross_mask: for cross-attention; None: without it.
            unpaddings: of the states and of the memory; None: they are padded.
        """
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        both = unpaddings and (unpaddings[0], unpaddings[0])
        plan_self = partial(plan_attention, x=x, needs_grad=needs_grad, unpaddings=both, made={})
        plan_cross = partial(plan_self, unpaddings=unpaddings, made={})
        plans: list[tuple[AttentionPlan, AttentionPlan | None]] = []
        block: Any
        for block, self_mask in zip(self.blocks, self_masks, strict=True):
            self_plan, cross_plan = plan_self(self_mask, block.self_attention.sublayer), None
            if cross_mask is not None and block.cross_attention is not None:
                cross_plan = plan_cross(cross_mask, block.cross_attention.sublayer)
            plans.append((self_plan, cross_plan))
        return plans

    @property
    def cache_layers(self) -> list[LayerShape]:
        """Sizes and window of the self-attention of each layer, for `Cache.empty`."""
        attentions: Any = [block.self_attention.sublayer for block in self.blocks]  # type: ignore[union-attr]
        return [LayerShape(a.num_kv_heads, a.head_dim, a.window) for a in attentions]
