"""Blocks and stacks of blocks: what every Transformer is made of."""

from collections.abc import Iterable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.parts.attention import Attention
from heedful.parts.cache import Cache, LayerCache
from heedful.parts.masks import AttentionMask
from heedful.parts.residual import Residual
from heedful.parts.rotary import Rotation

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
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Whole sequences. `mask`: (B, 1, T, T); `memory_mask`: (B, 1, T, S)."""
        x = self.self_attention(x, mask=mask, rotation=rotation)
        if self.cross_attention is not None:
            x = self.cross_attention(x, memory=memory, mask=memory_mask)
        return self.feedforward(x)

    def step(
        self,
        x: Float[Tensor, "N T D"],
        cache: LayerCache,
        mask: Mask = None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "N T D"]:
        """New tokens only; those before, and the source, are in the cache. `mask`: (N, 1, T, K)."""
        x = self.self_attention(x, mask=mask, rotation=rotation, cache=cache)
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
    """Blocks one after the other, and a norm at the end where their placement leaves none.

    Args:
        blocks: in the order in which they are passed.
        final_norm: default: none.
        relative: the position scheme inside attention (`parts/rotary.py`, `parts/relative.py`),
            shared by all blocks; default: none, positions come with the embeddings.
        final_dropout: after the final norm, as in T5; default: none.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        final_norm: nn.Module | None = None,
        *,
        relative: nn.Module | None = None,
        final_dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.Identity() if final_norm is None else final_norm
        self.relative = relative
        self.final_dropout = nn.Identity() if final_dropout is None else final_dropout

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask = None,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """As `Block.forward`, through all blocks. `positions`: where not 0, 1, 2, … in each row."""
        ready, rotation = self._placed(x, AttentionMask.of(mask), x.size(1), positions)
        across = AttentionMask.of(memory_mask)
        for block in self.blocks:
            x = block(x, ready, memory, across, rotation)
        return self.final_dropout(self.final_norm(x))

    def step(
        self, x: Float[Tensor, "N T D"], cache: Cache, positions: Int[Tensor, "#N T"] | None = None
    ) -> Float[Tensor, "N T D"]:
        """As `Block.step`, through all blocks; the cache then holds T tokens more."""
        count = x.size(1)
        mask, rotation = self._placed(x, cache.mask(count), cache.filled + count, positions)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.step(x, cache.layer(index), mask, rotation)
        cache.advance(count)
        return self.final_dropout(self.final_norm(x))

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key/value heads and head width: what a `Cache` is made for."""
        attention = self.blocks[0].self_attention.sublayer  # type: ignore[union-attr]
        assert isinstance(attention, Attention)
        return len(self.blocks), attention.num_kv_heads, attention.head_dim

    def _placed(
        self,
        x: Tensor,
        mask: AttentionMask | None,
        keys: int,
        positions: Int[Tensor, "#N T"] | None,
    ) -> tuple[AttentionMask | None, Rotation | None]:
        """The mask with the position scheme's scores, or the rotation that it asks for."""
        if self.relative is None:
            return mask, None
        rotation, scores = self.relative(x.size(1), keys, positions, x)
        if scores is not None:
            assert mask is not None, "a position scheme's scores are added to a mask"
            mask = mask.plus(scores)
        return mask, rotation
