"""From tokens to vectors."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.dropout import Dropout
from heedful.parts.tokens import Tokens


class TokenEmbedding(nn.Module):
    """dropout(norm(scale · E[ids] + positions + types)) (Vaswani et al. 2017, sec. 3.4).

    Args:
        tokens: the (V, D) embedding; the same object may serve other embeddings and the output.
        positions: a module of `parts/positions.py`; None: positions are known inside attention.
        max_length: tokens of the longest text; a longer one is refused.
        scale: √D in the paper, whose embeddings are drawn with standard deviation 1/√D, so that
            they enter at the size of the position table; 1 in most later models.
        norm: over the sum, as in BERT and BART; default: none.
        types: (N, D), BERT's embedding of which of two texts a token is of; default: none.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module | None,
        *,
        max_length: int,
        scale: float = 1.0,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        types: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.max_length = max_length
        self.scale = scale
        self.types = types
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = Dropout(dropout)

    def forward(
        self, tokens: Tokens, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """`types`: which of two texts each token is of; default: the first.

        Raises UserError for a text that is longer than `max_length`. A row may be wider, where
        padding or other texts stand beside it; only then are the positions looked at.
        """
        if tokens.ids.size(1) > self.max_length and tokens.longest() > self.max_length:
            raise UserError(
                f"a sequence of {tokens.longest()} tokens is longer than the model allows "
                f"(max_length {self.max_length}); shorten or truncate it"
            )
        x = self.tokens(tokens.ids)
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions(tokens.positions)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        return self.dropout(self.norm(x))
