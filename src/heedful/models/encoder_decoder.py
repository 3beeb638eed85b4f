"""The encoder-decoder family: one stack reads the source, another writes the target."""

from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.models.stack import Stack
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputHead
from heedful.parts.tokens import PaddingSide, Span, Tokens, check_lengths


class Memory(NamedTuple):
    """An encoded batch of sources: states, and what of them is real."""

    states: Float[Tensor, "B S D"]
    source: Span


class EncoderDecoder(nn.Module):
    """A sequence-to-sequence Transformer.

    `net(src, tgt)` gives next-token logits at every target position. States of padding are zero
    wherever attention writes them, and no gradient comes from them.
    """

    def __init__(
        self,
        src_embedding: TokenEmbedding,
        encoder: Stack,
        tgt_embedding: TokenEmbedding,
        decoder: Stack,
        head: OutputHead,
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
        check_lengths(src_lengths, src.size(1))
        check_lengths(tgt_lengths, tgt.size(1))
        source = Tokens.from_ids(src, src_lengths, padding_side)
        return self.head(self.states(source, Tokens.from_ids(tgt, tgt_lengths, padding_side)))

    def states(self, source: Tokens, target: Tokens) -> Float[Tensor, "B T D"]:
        """What the head turns into logits."""
        return self.decode(target, memory=self.encode(source))

    def encode(self, source: Tokens) -> Memory:
        """The encoder's states and which of them are real."""
        states = self.encoder(self.src_embedding(source), source)
        return Memory(states, source.span)

    def decode(
        self, target: Tokens, cache: Cache | None = None, *, memory: Memory | None = None
    ) -> Float[Tensor, "N T D"]:
        """States of whole targets given their sources' `memory`, or of new tokens with a cache.

        With a cache the tokens are those after what it holds, and are written to it; `target` has
        one row a source, or one for each of its beams (`Cache.begin`).
        """
        assert (cache is None) is not (memory is None), "give a cache, or the sources' memory"
        x = self.tgt_embedding(target)
        if memory is None:
            return self.decoder(x, target, cache=cache)
        states, source = memory
        return self.decoder(x, target, causal=True, memory=states, source=source)

    def start(self, source: Tokens, *, capacity: int, beams: int = 1) -> Cache:
        """Read the sources and make the cache of targets of up to `capacity` tokens, all beams
        together."""
        states, span = self.encode(source)
        attentions: Any = [block.cross_attention.sublayer for block in self.decoder.blocks]  # type: ignore[union-attr]
        projected = [attention.project_memory(states) for attention in attentions]
        cache = Cache.empty(self.decoder.cache_layers, states.size(0), capacity, beams, states)
        return replace(cache, cross=projected, source_real=span.real)
