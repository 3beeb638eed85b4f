"""Position schemes that are added to the embeddings: each a small value that builds its module."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.errors import UserError


class PositionTable(nn.Module):
    """A table with one row a position; `weight` is (max_length + offset, D)."""

    weight: Tensor
    offset = 0

    def forward(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T D"]:
        """The rows of the positions."""
        rows = positions + self.offset
        if positions.size(1) > self.weight.size(0) - self.offset:  # the padding's may lie beyond
            rows = rows.clamp(max=self.weight.size(0) - 1)
        return nn.functional.embedding(rows, self.weight)


class SinusoidalTable(PositionTable):
    """Not saved: it follows from its shape. A buffer, so that it moves with the model."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", table, persistent=False)


class LearnedTable(PositionTable):
    """A trained row a position; the first `offset` rows are not used."""

    def __init__(self, max_length: int, width: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(max_length + offset, width))


@dataclass(frozen=True)
class Sinusoidal:
    """Sines at even, cosines at odd dimensions (Vaswani et al. 2017, sec. 3.5).

    `halves` puts all sines first and then all cosines: Marian's order, and that of the authors'
    own code. No model that learns its embeddings can tell the two apart; its weights can.
    """

    base: float = 10000.0
    halves: bool = False

    def build(self, max_length: int, width: int) -> nn.Module:
        """A module that gives rows of `sinusoidal_table`."""
        table = sinusoidal_table(max_length, width, self.base)
        if self.halves:
            table = torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)
        return SinusoidalTable(table)


@dataclass(frozen=True)
class Learned:
    """One trained vector a position (Gehring et al. 2017).

    `offset` rows stand before that of the first position: BART and RoBERTa keep two, which their
    padding's id once needed, and their files have them.
    """

    offset: int = 0

    def build(self, max_length: int, width: int) -> nn.Module:
        """A module with a trained (max_length + offset, width) table."""
        return LearnedTable(max_length, width, self.offset)


@dataclass(frozen=True)
class NoPositions:
    """None: order is known inside attention alone."""

    def build(self, max_length: int, width: int) -> None:
        """Nothing is added."""


Positions = Sinusoidal | Learned | NoPositions


def sinusoidal_table(
    max_length: int, width: int, base: float = 10000.0
) -> Float[Tensor, "{max_length} {width}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos of the same, in fp32.

    An odd width has one sine more than cosines. Angles are formed in fp64: in fp32 the error of
    `pos * frequency` alone is 1e-3 at position 10,000.
    """
    even = torch.arange(0, width, 2, dtype=torch.float64)
    frequencies = torch.exp(even * (-math.log(base) / width))
    angles = torch.arange(max_length, dtype=torch.float64)[:, None] * frequencies
    table = torch.empty(max_length, width)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles[:, : width // 2].cos()
    return table


def check_length(length: int, max_length: int) -> None:
    """Refuse a sequence that the model has no positions for, naming both lengths."""
    if length > max_length:
        raise UserError(
            f"a sequence of {length} tokens is longer than the model allows "
            f"(max_length {max_length}); shorten or truncate it"
        )
