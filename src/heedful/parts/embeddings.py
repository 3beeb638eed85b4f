"""From token ids to vectors and, with the same matrix where tied, back to logits."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.parts.dropout import Dropout


class TokenEmbedding(nn.Module):
    """dropout(scale · E[ids] + positions) (Vaswani et al. 2017, sec. 3.4, with scale √D).

    Args:
        tokens: the (V, D) embedding; the same object may serve other embeddings and the output.
        positions: a module of `parts/positions.py`.
        scale: √D in the paper, whose embeddings are drawn with standard deviation 1/√D, so that
            they enter at the size of the position table; 1 in most later models.
    """

    def __init__(
        self, tokens: nn.Embedding, positions: nn.Module, *, scale: float, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = scale
        self.dropout = Dropout(dropout)

    def forward(
        self, ids: Int[Tensor, "B T"], start: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """`start`: position of the first column; `positions`: explicit ones (left padding)."""
        x = self.tokens(ids) * self.scale + self.positions(ids.size(1), start, positions)
        return self.dropout(x)


class OutputProjection(nn.Module):
    """Logits x Wᵀ. `weight` (V, D) may be an embedding's (Press and Wolf 2017)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return nn.functional.linear(x, self.weight)
