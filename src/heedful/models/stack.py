"""Blocks and stacks of blocks: what every Transformer is made of."""

from collections.abc import Iterable

from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.parts.attention import Attention
from heedful.parts.cache import Cache, LayerCache
from heedful.parts.masks import AttentionMask
from heedful.parts.residual import Residual

Mask = AttentionMask | Bool[Tensor, "..."] | None


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
        x: Float[Tensor, "B T D"],
        mask: Mask = None,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_mask: Mask = None,
    ) -> Float[Tensor, "B T D"]:
        """Whole sequences. `mask`: (B, 1, T, T); `memory_mask`: (B, 1, T, S)."""
        x = self.self_attention(x, mask=mask)
        if self.cross_attention is not None:
            x = self.cross_attention(x, memory=memory, mask=memory_mask)
        return self.feedforward(x)

    def step(
        self, x: Float[Tensor, "N T D"], cache: LayerCache, mask: Mask = None
    ) -> Float[Tensor, "N T D"]:
        """New tokens only; those before, and the source, are in the cache. `mask`: (1, 1, T, K)."""
        x = self.self_attention(x, mask=mask, cache=cache)
        residual = self.cross_attention
        if residual is not None:
            cross = residual.sublayer
            assert isinstance(cross, Attention)
            keys, values = cache.cross
            x = residual.around(
                x, lambda y: cross.attend_to(y, keys, values, mask=cache.source_mask)
            )
        return self.feedforward(x)


class Stack(nn.Module):
    """Blocks one after the other, and a norm at the end where their placement leaves none."""

    def __init__(self, blocks: Iterable[Block], final_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.Identity() if final_norm is None else final_norm

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask = None,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_mask: Mask = None,
    ) -> Float[Tensor, "B T D"]:
        """As `Block.forward`, through all blocks."""
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask)
        return self.final_norm(x)

    def step(
        self, x: Float[Tensor, "N T D"], cache: Cache, mask: Mask = None
    ) -> Float[Tensor, "N T D"]:
        """As `Block.step`, through all blocks; the cache then holds T tokens more."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.step(x, cache.layer(index), mask)
        cache.advance(x.size(1))
        return self.final_norm(x)
