"""Embeddings: token ids to hidden states, and the tables of positions that are added to them."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError, describe
from heedful.parts.helpers import check_positive
from heedful.parts.residual import Dropout
from heedful.parts.tokens import Tokens

Positions = Callable[[int, int], nn.Module]  # makes a table from max_length and D


class TokenEmbedding(nn.Module):
    """dropout(norm(scale · E[ids] + positions + types)) (Vaswani et al. 2017, sec. 3.4).

    Args:
        tokens: the (V, D) embedding; the same object may serve other embeddings and the output.
        positions: a table of this file; default: none (rotary or relative positions).
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


class PositionTable(nn.Module):
    """A table with one row per position; `weight` is (max_length + offset, D)."""

    weight: Tensor
    offset = 0

    def forward(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T D"]:
        """The rows at these positions."""
        rows = positions + self.offset
        if positions.size(1) > self.weight.size(0) - self.offset:  # of padding, maybe
            rows = rows.clamp(max=self.weight.size(0) - 1)
        return F.embedding(rows, self.weight)


class SinusoidalTable(PositionTable):
    """Sines at even, cosines at odd dimensions (Vaswani et al. 2017, sec. 3.5); not trained.

    Args:
        max_length: number of positions.
        width: D.
        halves: all sines before all cosines, as in Marian and in the authors' code. The two orders
            train equally well, but weights of one order do not fit the other.
        offset: position of the first row: fairseq and M2M100 begin after the id of padding.
        inclusive: as in `sinusoidal_table`.

    >>> SinusoidalTable(512, 16)(torch.arange(5)[None]).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        max_length: int,
        width: int,
        *,
        halves: bool = False,
        offset: int = 0,
        inclusive: bool = False,
    ) -> None:
        super().__init__()
        check_positive(max_length=max_length, width=width)
        self.offset = offset
        table = sinusoidal_table(max_length + offset, width, halves=halves, inclusive=inclusive)
        # A buffer, so that it moves with the model; not saved, since its shape determines it.
        self.register_buffer("weight", table, persistent=False)


class LearnedTable(PositionTable):
    """One trained row per position (Gehring et al. 2017); zero until initialized.

    Args:
        max_length: number of positions.
        width: D.
        offset: unused rows before that of position 0: BART and RoBERTa have two, from a design in
            which the id of padding was also a position.
    """

    def __init__(self, max_length: int, width: int, *, offset: int = 0) -> None:
        super().__init__()
        check_positive(max_length=max_length, width=width)
        self.offset = offset
        self.weight = nn.Parameter(torch.zeros(max_length + offset, width))


def sinusoidal_table(
    max_length: int,
    width: int,
    base: float = 10000.0,
    *,
    halves: bool = False,
    inclusive: bool = False,
) -> Float[Tensor, "{max_length} {width}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos of the same, in fp32.

    `halves` puts all sines before all cosines. `inclusive` makes the last frequency 1 / base, as in
    the authors' code (tensor2tensor) and in fairseq, where D/2 - 1 divides the exponents. An odd
    width has one sine more than cosines. Angles are computed in fp64: in fp32 the error of
    `pos * frequency` alone is 1e-3 at position 10,000.
    """
    even = torch.arange(0, width, 2, dtype=torch.float64)
    span = 2 * (len(even) - 1) if inclusive else width
    frequencies = torch.exp(even * (-math.log(base) / max(span, 1)))
    angles = torch.arange(max_length, dtype=torch.float64)[:, None] * frequencies
    table = torch.empty(max_length, width)
    sines, cosines = slice(0, None, 2), slice(1, None, 2)
    if halves:
        sines, cosines = slice(len(even)), slice(len(even), None)
    table[:, sines] = angles.sin()
    table[:, cosines] = angles[:, : width // 2].cos()
    return table
