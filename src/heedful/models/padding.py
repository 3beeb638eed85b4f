"""What a batch's lengths and documents mean for masks and positions: one way for all families."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.parts.masks import (
    AttentionMask,
    MaskRule,
    PaddingSide,
    padding_mask,
    token_positions,
)


@dataclass(frozen=True)
class Rows:
    """The rows of a batch: which tokens are real, and where each stands in its own text.

    Attributes:
        real: (B, T), or None where all tokens are.
        positions: (#B, T), or None where they are 0, 1, 2, … in every row.
        documents: (B, T), which text of a packed row each token is of, or None.
    """

    size: int
    device: torch.device
    real: Bool[Tensor, "B T"] | None
    positions: Int[Tensor, "B T"] | None
    documents: Int[Tensor, "B T"] | None = None

    @classmethod
    def of(
        cls,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        side: PaddingSide = "right",
        documents: Int[Tensor, "B T"] | None = None,
    ) -> "Rows":
        """Raises UserError for lengths that the batch cannot have."""
        size = ids.size(1)
        if lengths is None and size and documents is None:
            return cls(size, ids.device, None, None)
        if lengths is None and documents is not None:
            return cls(size, ids.device, None, _restarting(documents, None), documents)
        if lengths is None:
            lengths = ids.new_zeros(ids.size(0))  # empty rows: all there is to say is "nothing"
        if ids.size(0) and (int(lengths.max()) > size or int(lengths.min()) < 0):
            raise UserError(
                f"lengths must be from 0 to {size}, the width of the batch, "
                f"not {int(lengths.min())} to {int(lengths.max())}"
            )
        real = padding_mask(lengths, size, side)
        positions = token_positions(lengths, size, side)
        if documents is not None:
            positions = _restarting(documents, real)
        return cls(size, ids.device, real, positions, documents)

    def attention(self, *, causal: bool) -> AttentionMask:
        """Who may attend to whom among the tokens of each row."""
        rule = MaskRule(
            self.size,
            self.size,
            causal=causal,
            real_queries=self.real,
            real_keys=self.real,
            query_documents=self.documents,
            key_documents=self.documents,
        )
        return AttentionMask(rule, device=self.device)

    def attention_to(self, sources: "Rows") -> AttentionMask | None:
        """Who may attend to what of its source."""
        if self.real is None and sources.real is None:
            return None
        rule = MaskRule(self.size, sources.size, real_queries=self.real, real_keys=sources.real)
        return AttentionMask(rule, device=self.device)

    def first(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """The state of each row's first real token."""
        if self.real is None:
            return states[:, 0]
        return states[torch.arange(states.size(0), device=self.device), self.real.int().argmax(1)]


def _restarting(
    documents: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None
) -> Int[Tensor, "B T"]:
    """Positions that begin at 0 with every text of a packed row, whatever stands in its padding."""
    places = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    if real is not None:
        begins[:, 1:] |= real[:, 1:] != real[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values
