"""Blocks and stacks of blocks: what every Transformer is made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heedful.parts.cache import Cache, LayerCache, LayerShape
from heedful.parts.masks import AttentionMask, MaskSpec
from heedful.parts.residual import Residual
from heedful.parts.tokens import Span, Tokens


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward, each in its residual; `None` is absent."""

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
        self_mask: AttentionMask,
        memory: Float[Tensor, "B S D"] | None = None,
        cross_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "N T D"]:
        """The states after the block: (N, T, D).

        Args:
            self_mask, cross_mask: prepared masks of self-attention and of cross-attention.
            memory: encoder states of the source; without a cache.
            cache: keys and values of the tokens before `x`, and of the source.
        """
        x = self.self_attention(x, mask=self_mask, cache=cache)
        if self.cross_attention is not None:
            projected = None if cache is None else cache.cross
            x = self.cross_attention(x, mask=cross_mask, memory=memory, projected=projected)
        return self.feedforward(x)


class Stack(nn.Module):
    """Blocks one after the other, and a norm at the end where their placement leaves none.

    Args:
        blocks: in the order in which they are passed.
        final_norm: default: none.
        final_dropout: after the final norm, as in T5; default: none.
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
        # Keep the input of each block, and compute its activations again for the gradient (Chen et
        # al. 2016, "Training Deep Nets with Sublinear Memory Cost").
        self.activation_checkpointing = False

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        tokens: Tokens,
        *,
        causal: bool = False,
        memory: Float[Tensor, "N S D"] | None = None,
        source: Span | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "N T D"]:
        """States of embedded tokens.

        Args:
            tokens: that `x` are the embeddings of.
            causal: no token sees those after it.
            memory, source: of two stacks without a cache: the encoder's states, and which are real.
            cache: of the tokens before these, which are written to it.
        """
        across = layers = None
        seen: MaskSpec | list[MaskSpec]
        shape = x.shape
        if cache is not None:
            layers, seen, across = cache.begin(tokens)
            x = x.reshape(cache.num_sources, -1, x.size(-1))
        else:
            seen = MaskSpec.from_tokens(tokens, causal=causal)
            if source is not None:
                across = MaskSpec(tokens.span, source, causal=False)
        masks = self.masks(x, seen, across)
        # A cache must be written to once.
        is_checkpointed = (
            self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        )
        for index, (block, mask) in enumerate(zip(self.blocks, masks, strict=True)):
            layer = None if layers is None else layers[index]
            inputs = x, mask[0], memory, mask[1], layer
            if is_checkpointed:
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return self.final_dropout(self.final_norm(x)).view(shape)

    def masks(
        self,
        x: Float[Tensor, "N T D"],
        visible: MaskSpec | Sequence[MaskSpec],
        across: MaskSpec | None = None,
    ) -> list[tuple[AttentionMask, AttentionMask | None]]:
        """The masks of each block's self-attention and cross-attention, which equal layers share.

        They are formed once, before the first block: a block whose activations are checkpointed
        must not form anything that outlives it.

        Args:
            visible: what of the text each token may attend to, in all blocks or in each.
            across: what of the source; None: there is none.
        """
        trains = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        if isinstance(visible, MaskSpec):
            visible = [visible] * len(self.blocks)
        formed: dict[Any, AttentionMask] = {}
        masks: list[tuple[AttentionMask, AttentionMask | None]] = []
        for block, own in zip(self.blocks, visible, strict=True):
            found: list[Any] = []
            for residual, seen in (
                (block.self_attention, own),
                (block.cross_attention, across),
            ):
                if residual is None or seen is None:
                    found.append(None)
                    continue
                attention: Any = residual.sublayer  # type: ignore[union-attr]
                key = (seen is across, attention.mask_key)
                if key not in formed:
                    formed[key] = attention.prepare_mask(seen, x, needs_grad=trains)
                found.append(formed[key])
            masks.append((found[0], found[1]))
        return masks

    @property
    def cache_layers(self) -> list[LayerShape]:
        """The self-attention of each layer, as a `Cache` is made for it."""
        attentions: Any = [block.self_attention.sublayer for block in self.blocks]  # type: ignore[union-attr]
        return [LayerShape(a.num_kv_heads, a.head_dim, a.window) for a in attentions]
