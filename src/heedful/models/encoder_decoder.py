"""The encoder-decoder family: an encoder of the source and a causal decoder of the target."""

from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputHead
from heedful.parts.tokens import PaddingSide, Tokens, check_batch, check_ids


class Memory(NamedTuple):
    """An encoded batch of sources: the encoder's states, and their tokens."""

    states: Float[Tensor, "B S D"]
    source: Tokens


class EncoderDecoder(nn.Module):
    """A sequence-to-sequence Transformer; `net(src, tgt)` returns next-token logits of the target.

    Args:
        src_embedding, tgt_embedding: token ids to states.
        encoder: blocks without cross-attention.
        decoder: causal blocks with cross-attention.
        head: states of the decoder to logits.
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
        """Next-token logits (B, T, V) at each target position.

        Args:
            src: source ids (B, S).
            tgt: target ids (B, T), starting with BOS.
            src_lengths, tgt_lengths: (B,), real tokens of each row; default: all.
            padding_side: side of the padding of both.

        Raises:
            UserError: ids, lengths or the width of a batch are out of range.
        """
        check_batch("src", src, src_lengths, padding_side)
        check_batch("tgt", tgt, tgt_lengths, padding_side)
        if src.size(0) != tgt.size(0):
            raise UserError(f"src has {src.size(0)} rows, but tgt {tgt.size(0)}")
        source = Tokens.from_ids(src, src_lengths, padding_side)
        target = Tokens.from_ids(tgt, tgt_lengths, padding_side)
        try:
            return self.head(self.states(source, target))
        except IndexError:
            check_ids(src, self.src_embedding.tokens.num_embeddings)
            check_ids(tgt, self.tgt_embedding.tokens.num_embeddings)
            raise

    def states(self, source: Tokens, target: Tokens) -> Float[Tensor, "B T D"]:
        """States of the decoder, before the head."""
        return self.decode(target, memory=self.encode(source))

    def encode(self, source: Tokens) -> Memory:
        """Run the encoder."""
        states = self.encoder(self.src_embedding(source), source)
        return Memory(states, source)

    def decode(
        self, target: Tokens, cache: Cache | None = None, *, memory: Memory | None = None
    ) -> Float[Tensor, "N T D"]:
        """States of the decoder, of whole targets or, with a cache, of new tokens.

        Args:
            target: with a cache, the tokens after those in it, one row per source or one per beam
                (`Cache.begin`).
            cache: from `start`; keys and values of `target` are written to it.
            memory: the encoded sources, without a cache.
        """
        assert (cache is None) is not (memory is None), "give either a cache or the memory"
        x = self.tgt_embedding(target)
        if memory is None:
            return self.decoder(x, target, cache=cache)
        states, source = memory
        return self.decoder(x, target, causal=True, memory=states, source=source)

    def start(self, source: Tokens, *, capacity: int, branches: int = 1) -> Cache:
        """Encode the sources, and return an empty cache for their targets.

        Args:
            capacity: slots for target tokens of each source, which its branches share.
            branches: rows of each source.
        """
        states, _ = self.encode(source)
        attentions: Any = [block.cross_attention.sublayer for block in self.decoder.blocks]  # type: ignore[union-attr]
        projected = [attention.project_memory(states) for attention in attentions]
        cache = Cache.empty(self.decoder.cache_layers, states.size(0), capacity, branches, states)
        return replace(cache, cross=projected, source_real=source.real)
