"""The decoder-only family: one stack, in which no token sees those after it, predicts the next."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.padding import Rows
from heedful.models.stack import Stack
from heedful.parts.cache import Cache
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import OutputProjection
from heedful.parts.masks import PaddingSide


class DecoderOnly(nn.Module):
    """A language model. `net(ids)` gives the logits of the token after each position."""

    def __init__(self, embedding: TokenEmbedding, decoder: Stack, head: OutputProjection) -> None:
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
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each position.

        Args:
            lengths: real tokens in each row (default: all).
            padding_side: where rows are padded.
            documents: which text of a packed row each token is of: attention stays inside it and
                positions begin anew with it. Default: one text a row.
        """
        return self.head(self.hidden(ids, lengths, padding_side=padding_side, documents=documents))

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        *,
        padding_side: PaddingSide = "right",
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the head turns into logits: losses that never form all logits start here."""
        rows = Rows.of(ids, lengths, padding_side, documents)
        x = self.embedding(ids, positions=rows.positions)
        return self.decoder(x, rows.attention(causal=True), positions=rows.positions)

    def start(self, rows: int, *, capacity: int, starts: Int[Tensor, "N"] | None = None) -> Cache:
        """An empty cache for texts of up to `capacity` tokens.

        `starts`: how many tokens of each row will be padding on its left; default: none.
        """
        like = self.embedding.tokens.weight
        shape = self.decoder.cache_shape
        return Cache(shape, rows=rows, capacity=capacity, like=like, starts=starts)

    def step(self, ids: Int[Tensor, "N T"], cache: Cache) -> Float[Tensor, "N T V"]:
        """Logits after each of T new tokens; those before are in the cache, which grows by T."""
        return self.head(self.extend(ids, cache))

    def extend(self, ids: Int[Tensor, "N T"], cache: Cache) -> Float[Tensor, "N T D"]:
        """What `step` turns into logits."""
        if ids.size(0) != cache.rows:
            raise UserError(f"a step of {ids.size(0)} rows for a cache of {cache.rows}")
        positions = cache.positions(ids.size(1))
        x = self.embedding(ids, cache.filled, positions)
        return self.decoder.step(x, cache, positions)
