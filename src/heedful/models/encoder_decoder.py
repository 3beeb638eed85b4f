"""The encoder-decoder family: one stack reads the source, another writes the target."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.padding import Rows
from heedful.models.stack import Stack
from heedful.parts.attention import Attention
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputProjection
from heedful.parts.masks import PaddingSide


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
        sources = Rows.of(src, src_lengths, padding_side)
        targets = Rows.of(tgt, tgt_lengths, padding_side)
        x = self.tgt_embedding(tgt, positions=targets.positions)
        return self.decoder(
            x,
            targets.attention(causal=True),
            self._encode(src, sources),
            targets.attention_to(sources),
            targets.positions,
        )

    def encode(
        self,
        src: Int[Tensor, "B S"],
        src_lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
    ) -> Memory:
        """The encoder's states and which of them are real."""
        sources = Rows.of(src, src_lengths, padding_side)
        return Memory(self._encode(src, sources), sources.real)

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
        return Cache(
            self.decoder.cache_shape,
            rows=src.size(0),
            capacity=capacity,
            like=memory.states,
            cross=cross,
            source_mask=None if memory.mask is None else memory.mask[:, None, None, :],
        )

    def step(self, tgt: Int[Tensor, "N T"], cache: Cache) -> Float[Tensor, "N T V"]:
        """Logits after each of T new tokens; those before are in the cache, which grows by T."""
        return self.head(self.extend(tgt, cache))

    def extend(self, tgt: Int[Tensor, "N T"], cache: Cache) -> Float[Tensor, "N T D"]:
        """What `step` turns into logits."""
        if tgt.size(0) != cache.rows:
            raise UserError(f"a step of {tgt.size(0)} rows for a cache of {cache.rows}")
        return self.decoder.step(self.tgt_embedding(tgt, cache.filled), cache)

    def _encode(self, src: Int[Tensor, "B S"], sources: Rows) -> Float[Tensor, "B S D"]:
        x = self.src_embedding(src, positions=sources.positions)
        return self.encoder(x, sources.attention(causal=False), positions=sources.positions)
