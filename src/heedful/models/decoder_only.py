"""The decoder-only family: one stack, in which no token sees those after it, predicts the next."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.models.stack import Stack
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputHead
from heedful.parts.tokens import PaddingSide, Tokens, check_lengths


class DecoderOnly(nn.Module):
    """A language model. `net(ids)` gives the logits of the token after each position."""

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
        """Logits of the token after each position.

        Args:
            lengths: real tokens in each row (default: all).
            padding_side: where rows are padded.
            segments: which text of a packed row each token is of: attention stays inside it and
                positions begin anew with it. Default: one text a row.
        """
        check_lengths(lengths, ids.size(1))
        return self.head(self.decode(Tokens.from_ids(ids, lengths, padding_side, segments)))

    def decode(self, tokens: Tokens, cache: Cache | None = None) -> Float[Tensor, "N T D"]:
        """States, which `head` turns into logits: of whole texts, or of new tokens with a cache.

        With a cache the tokens are those after what it holds, and are written to it; `tokens` has
        one row a text, or one for each of its beams (`Cache.begin`).
        """
        return self.decoder(self.embedding(tokens), tokens, causal=True, cache=cache)

    def start(self, rows: int, *, capacity: int, beams: int = 1) -> Cache:
        """An empty cache for `rows` texts of up to `capacity` tokens, all beams together."""
        like = self.embedding.tokens.weight
        return Cache.empty(self.decoder.cache_layers, rows, capacity, beams, like)
