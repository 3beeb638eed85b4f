"""Position tables, whose rows are added to the embeddings."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.parts.checked import check_positive

Positions = Callable[[int, int], nn.Module]  # makes a table from max_length and D


class PositionTable(nn.Module):
    """A table with one row per position; `weight` is (max_length + offset, D)."""

    weight: Tensor
    offset = 0

    def forward(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T D"]:
        """The rows at these positions."""
        rows = positions + self.offset
        if positions.size(1) > self.weight.size(0) - self.offset:  # of padding, maybe
            rows = rows.clamp(max=self.weight.size(0) - 1)
        return nn.functional.embedding(rows, self.weight)


class SinusoidalTable(PositionTable):
    """Sines at even, cosines at odd dimensions (Vaswani et al. 2017, sec. 3.5); not trained.

    Args:
        max_length: number of positions.
        width: D.
        halves: all sines before all cosines, as in Marian and in the authors' code. The two orders
            train equally well, but weights of one order do not fit the other.

    >>> SinusoidalTable(512, 16)(torch.arange(5)[None]).shape
    torch.Size([1, 5, 16])
    """

    def __init__(self, max_length: int, width: int, *, halves: bool = False) -> None:
        super().__init__()
        check_positive(max_length=max_length, width=width)
        table = sinusoidal_table(max_length, width, halves=halves)
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
    max_length: int, width: int, base: float = 10000.0, *, halves: bool = False
) -> Float[Tensor, "{max_length} {width}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos of the same, in fp32.

    `halves` puts all sines before all cosines. An odd width has one sine more than cosines. Angles
    are computed in fp64: in fp32 the error of `pos * frequency` alone is 1e-3 at position 10,000.
    """
    even = torch.arange(0, width, 2, dtype=torch.float64)
    frequencies = torch.exp(even * (-math.log(base) / width))
    angles = torch.arange(max_length, dtype=torch.float64)[:, None] * frequencies
    table = torch.empty(max_length, width)
    sines, cosines = slice(0, None, 2), slice(1, None, 2)
    if halves:
        sines, cosines = slice(len(even)), slice(len(even), None)
    table[:, sines] = angles.sin()
    table[:, cosines] = angles[:, : width // 2].cos()
    return table
