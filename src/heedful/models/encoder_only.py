"""The encoder-only family: one stack, in which every token sees all others, reads a text."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.models.stack import Stack
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.tokens import PaddingSide, Tokens, check_lengths


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
        """Logits, or states without a head.

        Args:
            lengths: real tokens in each row (default: all).
            types: which of two texts each token is of (default: the first).
            padding_side: where rows are padded.
        """
        check_lengths(lengths, ids.size(1))
        tokens = Tokens.from_ids(ids, lengths, padding_side)
        states = self.encode(tokens, types)
        if isinstance(self.head, ClassificationHead):
            first = 0 if tokens.real is None else tokens.real.int().argmax(1)
            return self.head(states[torch.arange(states.size(0), device=states.device), first])
        return states if self.head is None else self.head(states)

    def encode(
        self, tokens: Tokens, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """The encoder's states, whatever the head."""
        return self.encoder(self.embedding(tokens, types), tokens)
