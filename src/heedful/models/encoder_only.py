"""The encoder-only family: one stack, in which every token sees all others, reads a text."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.models.padding import Rows
from heedful.models.stack import Stack
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.masks import PaddingSide


class EncoderOnly(nn.Module):
    """An encoder, and what its head makes of the states.

    With a `MaskedTokenHead` `net(ids)` gives logits (B, T, V) of the token that stands at each
    position, with a `ClassificationHead` logits (B, C) of the text's class, without one the states
    (B, T, D) themselves.
    """

    def __init__(
        self,
        embedding: TokenEmbedding,
        encoder: Stack,
        head: MaskedTokenHead | ClassificationHead | None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        *,
        types: Int[Tensor, "B T"] | None = None,
        padding_side: PaddingSide = "right",
    ) -> Float[Tensor, "B *out"]:
        """What the head says.

        Args:
            lengths: real tokens in each row (default: all).
            types: which of two texts each token is of (default: the first).
            padding_side: where rows are padded.
        """
        rows = Rows.of(ids, lengths, padding_side)
        states = self._states(ids, rows, types)
        if isinstance(self.head, ClassificationHead):
            return self.head(rows.first(states))
        return states if self.head is None else self.head(states)

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        *,
        types: Int[Tensor, "B T"] | None = None,
        padding_side: PaddingSide = "right",
    ) -> Float[Tensor, "B T D"]:
        """The encoder's states, whatever the head."""
        return self._states(ids, Rows.of(ids, lengths, padding_side), types)

    def _states(
        self, ids: Int[Tensor, "B T"], rows: Rows, types: Int[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T D"]:
        x = self.embedding(ids, positions=rows.positions, types=types)
        return self.encoder(x, rows.attention(causal=False), positions=rows.positions)
