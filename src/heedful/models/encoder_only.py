"""The encoder-only family: a stack in which every token attends to all tokens of its text."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.tokens import PaddingSide, Tokens, check_batch, check_ids


class EncoderOnly(nn.Module):
    """An encoder with a head.

    `net(ids)` returns logits (B, T, V) of the token at each position with a `MaskedTokenHead`,
    class logits (B, C) with a `ClassificationHead`, and states (B, T, D) without a head.

    Args:
        embedding: token ids to states.
        encoder: blocks without cross-attention.
        head: states to logits, or None.
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
        """Logits (B, T, V) or (B, C), or states (B, T, D) without a head.

        Args:
            ids: (B, T).
            lengths: (B,), real tokens of each row; default: all.
            types: (B, T), token types (BERT: 0 in the first sentence, 1 in the second); default: 0.
            padding_side: side of the padding.

        Raises:
            UserError: ids, lengths or the width of the batch are out of range.
        """
        check_batch("ids", ids, lengths, padding_side)
        if types is not None and types.shape != ids.shape:
            raise UserError(f"types must have the shape of ids, not {tuple(types.shape)}")
        tokens = Tokens.from_ids(ids, lengths, padding_side)
        try:
            states = self.encode(tokens, types)
        except IndexError:
            check_ids(ids, self.embedding.tokens.num_embeddings)
            if types is not None and self.embedding.types is not None:
                check_ids(types, self.embedding.types.num_embeddings, "token types")
            raise
        if isinstance(self.head, ClassificationHead):
            first = 0 if tokens.real is None else tokens.real.int().argmax(1)
            return self.head(states[torch.arange(states.size(0), device=states.device), first])
        return states if self.head is None else self.head(states)

    def encode(
        self, tokens: Tokens, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """States of the encoder, before any head."""
        return self.encoder(self.embedding(tokens, types), tokens)
