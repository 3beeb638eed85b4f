"""Embeddings: token ids to hidden states."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError, describe
from heedful.parts.residual import Dropout
from heedful.parts.tokens import Tokens


class TokenEmbedding(nn.Module):
    """dropout(norm(scale · E[ids] + positions + types)) (Vaswani et al. 2017, sec. 3.4).

    Args:
        tokens: the (V, D) embedding; the same object may serve other embeddings and the output.
        positions: a module of `parts/positions.py`; default: none (rotary or relative positions).
        max_length: most tokens of a sequence; default: no limit.
        scale: factor of the token embeddings: √D in the paper, whose embeddings are initialized
            with standard deviation 1/√D, so that they are as large as the position table.
        round_scale: round the factor to the type of the embeddings, as Gemma's code does.
        dropout: on the result, in training only.
        norm: over the sum, as in BERT and BART; default: none.
        types: (N, D), the token type embedding of BERT; default: none.

    >>> embedding = TokenEmbedding(nn.Embedding(100, 16), SinusoidalTable(512, 16))
    >>> embedding(Tokens.from_ids(torch.tensor([[5, 6, 7]]))).shape
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module | None = None,
        *,
        max_length: int = 2**31 - 1,
        scale: float = 1.0,
        round_scale: bool = False,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        types: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(tokens, nn.Module):
            raise UserError(f"tokens must be an nn.Embedding, not {describe(tokens)}")
        self.tokens = tokens
        self.positions = positions
        self.max_length = max_length
        self.scale, self.round_scale = scale, round_scale
        self.types = types
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = Dropout(dropout)

    def forward(
        self, tokens: Tokens, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Embeddings (B, T, D) of tokens.

        Args:
            types: token type of each token (BERT: 0 in the first sentence, 1 in the second);
                default: 0.

        Raises:
            UserError: a sequence is longer than `max_length`. Rows may be wider, with padding or
                several segments; only then are the positions read.
        """
        if tokens.ids.size(1) > self.max_length and tokens.longest() > self.max_length:
            raise UserError(
                f"a sequence of {tokens.longest()} tokens is longer than the model allows "
                f"(max_length {self.max_length}); shorten or truncate it"
            )
        x = self.tokens(tokens.ids)
        if self.scale != 1.0:
            x = x * (x.new_full((), self.scale) if self.round_scale else self.scale)
        if self.positions is not None:
            x = x + self.positions(tokens.positions)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        return self.dropout(self.norm(x))
