"""The encoder-decoder family: one stack reads the source, another writes the target."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.attention import Attention
from heedful.parts.cache import Cache
from heedful.parts.embeddings import OutputProjection, TokenEmbedding
from heedful.parts.masks import (
    AttentionMask,
    PaddingSide,
    causal_mask,
    combine,
    padding_mask,
    token_positions,
)


class Memory(NamedTuple):
    """An encoded batch of sources: states, and which of them are real (None: all)."""

    states: Float[Tensor, "B S D"]
    mask: Tensor | None


class EncoderDecoder(nn.Module):
    """A sequence-to-sequence Transformer.

    `net(src, tgt)` gives next-token logits at every target position. Padding is told by lengths;
    without them all tokens are real. States of padding are zero wherever attention writes them,
    and no gradient comes from them.
    """

    def __init__(
        self,
        src_embedding: TokenEmbedding,
        encoder: Stack,
        tgt_embedding: TokenEmbedding,
        decoder: Stack,
        head: OutputProjection,
    ) -> None:
        super().__init__()
        self.src_embedding = src_embedding
        self.encoder = encoder
        self.tgt_embedding = tgt_embedding
        self.decoder = decoder
        self.head = head

    def forward(
        self,
        src: Int[Tensor, "B S"],
        tgt: Int[Tensor, "B T"],
        src_lengths: Int[Tensor, "B"] | None = None,
        tgt_lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each target position.

        Args:
            src: source ids; src_lengths: real tokens in each row (default: all).
            tgt: target ids up to each position, BOS first; tgt_lengths likewise.
            padding_side: where both are padded.
        """
        states = self.hidden(src, tgt, src_lengths, tgt_lengths, padding_side=padding_side)
        return self.head(states)

    def hidden(
        self,
        src: Int[Tensor, "B S"],
        tgt: Int[Tensor, "B T"],
        src_lengths: Int[Tensor, "B"] | None = None,
        tgt_lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
    ) -> Float[Tensor, "B T D"]:
        """What the head turns into logits: losses that never form all logits start here."""
        memory = self.encode(src, src_lengths, padding_side=padding_side)
        real, positions = _padding(tgt, tgt_lengths, padding_side)
        own = combine(
            causal_mask(tgt.size(1), tgt.size(1), tgt.device)[None, None],
            None if real is None else real[:, None, None, :] & real[:, None, :, None],
        )
        across = combine(
            None if memory.mask is None else memory.mask[:, None, None, :],
            None if real is None else real[:, None, :, None],
        )
        x = self.tgt_embedding(tgt, positions=positions)
        own_mask, across_mask = AttentionMask.of(own), AttentionMask.of(across)
        return self.decoder(x, own_mask, memory.states, across_mask)

    def encode(
        self,
        src: Int[Tensor, "B S"],
        src_lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
    ) -> Memory:
        """The encoder's states and which of them are real."""
        real, positions = _padding(src, src_lengths, padding_side)
        mask = None if real is None else real[:, None, None, :] & real[:, None, :, None]
        x = self.src_embedding(src, positions=positions)
        return Memory(self.encoder(x, AttentionMask.of(mask)), real)

    def start(
        self,
        src: Int[Tensor, "B S"],
        src_lengths: Int[Tensor, "B"] | None = None,
        *,
        capacity: int,
        padding_side: PaddingSide = "right",
    ) -> Cache:
        """Read the sources and make the cache of a decoding of up to `capacity` tokens."""
        memory = self.encode(src, src_lengths, padding_side=padding_side)
        cross = []
        for block in self.decoder.blocks:
            attention = block.cross_attention.sublayer  # type: ignore[union-attr]
            assert isinstance(attention, Attention)
            cross.append(attention.project_memory(memory.states))
        mask = src.new_ones(src.shape, dtype=bool) if memory.mask is None else memory.mask  # type: ignore[call-overload]
        return Cache(cross, mask[:, None, None, :], rows=src.size(0), capacity=capacity)

    def step(self, tgt: Int[Tensor, "N T"], cache: Cache) -> Float[Tensor, "N T V"]:
        """Logits after each of T new tokens; those before are in the cache, which grows by T."""
        if tgt.size(0) != cache.rows:
            raise UserError(f"a step of {tgt.size(0)} rows for a cache of {cache.rows}")
        length = tgt.size(1)
        x = self.tgt_embedding(tgt, cache.filled)
        mask = None
        if length > 1:  # a single query is the last, and sees all
            mask = causal_mask(length, cache.filled + length, tgt.device)[None, None]
        return self.head(self.decoder.step(x, cache, AttentionMask.of(mask)))


def _padding(
    ids: Int[Tensor, "B T"], lengths: Int[Tensor, "B"] | None, side: PaddingSide
) -> tuple[Tensor | None, Tensor | None]:
    """Which tokens are real, and their positions; None and None where nothing needs saying."""
    size = ids.size(1)
    if lengths is None:
        if size:
            return None, None
        lengths = ids.new_zeros(ids.size(0))  # an empty source: all there is to say is "nothing"
    if int(lengths.max()) > size or int(lengths.min()) < 0:
        raise UserError(
            f"lengths must be from 0 to {size}, the width of the batch, "
            f"not {int(lengths.min())} to {int(lengths.max())}"
        )
    return padding_mask(lengths, size, side), token_positions(lengths, size, side)
