"""From token ids to vectors."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.parts.dropout import Dropout


class TokenEmbedding(nn.Module):
    """dropout(norm(scale · E[ids] + positions + types)) (Vaswani et al. 2017, sec. 3.4).

    Args:
        tokens: the (V, D) embedding; the same object may serve other embeddings and the output.
        positions: a module of `parts/positions.py`.
        scale: √D in the paper, whose embeddings are drawn with standard deviation 1/√D, so that
            they enter at the size of the position table; 1 in most later models.
        norm: over the sum, as in BERT and BART; default: none.
        types: (N, D), BERT's embedding of which of two texts a token is of; default: none.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        types: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = scale
        self.types = types
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = Dropout(dropout)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        start: int = 0,
        positions: Int[Tensor, "#B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """`start`: position of the first column; `positions`: explicit ones (left padding).

        `types`: which of two texts each token is of; default: the first.
        """
        x = self.tokens(ids) * self.scale + self.positions(ids.size(1), start, positions)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        return self.dropout(self.norm(x))
