"""The decoder-only family: a causal stack that predicts the next token."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputHead
from heedful.parts.joined_cache import JoinedCache
from heedful.parts.tokens import PaddingSide, Tokens, check_batch, check_ids


class DecoderOnly(nn.Module):
    """A language model; `net(ids)` returns next-token logits at each position.

    Args:
        embedding: token ids to states.
        decoder: causal blocks, without cross-attention.
        head: states to logits.
    """

    def __init__(self, embedding: TokenEmbedding, decoder: Stack, head: OutputHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.decoder = decoder
        self.head = head

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Next-token logits (B, T, V).

        Args:
            ids: (B, T).
            lengths: (B,), real tokens of each row; default: all.
            padding_side: side of the padding.
            segments: (B, T), number of the segment (text) of each token in a packed row: attention
                stays within a segment, and its positions start at 0. A number that recurs later in
                the row is another segment. Default: one segment per row.

        Raises:
            UserError: ids, lengths or the width of the batch are out of range.
        """
        check_batch("ids", ids, lengths, padding_side)
        if segments is not None and segments.shape != ids.shape:
            raise UserError(f"segments must have the shape of ids, not {tuple(segments.shape)}")
        tokens = Tokens.from_ids(ids, lengths, padding_side, segments)
        try:
            return self.head(self.decoder(self.embedding(tokens), tokens, causal=True))
        except IndexError:
            check_ids(ids, self.embedding.tokens.num_embeddings)
            raise

    def decode(
        self, tokens: Tokens, cache: Cache | JoinedCache | None = None
    ) -> Float[Tensor, "N T D"]:
        """States before the head, of whole sequences or, with a cache, of new tokens.

        Args:
            tokens: with a cache, the tokens after those in it, one row per text or one per beam
                (`Cache.begin`).
            cache: keys and values of the tokens before; those of `tokens` are written to it.
        """
        return self.decoder(self.embedding(tokens), tokens, causal=True, cache=cache)

    def start(self, rows: int, *, capacity: int, branches: int = 1) -> Cache:
        """An empty cache for `rows` texts, each of up to `capacity` tokens in all branches."""
        like = self.embedding.tokens.weight
        return Cache.empty(self.decoder.cache_layers, rows, capacity, branches, like)
