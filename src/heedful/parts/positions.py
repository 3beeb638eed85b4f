"""Position schemes that are added to the embeddings. Each is a small value that builds its module.

Every module gives (1 or B, T, D), what is to be added at each position, and refuses positions past
the longest sequence that it was built for.
"""

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

    def forward(
        self, length: int, start: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "#B T D"]:
        """Rows start … start + length - 1, or those of explicit `positions` (left padding)."""
        check_positions(length, start, positions, self.weight.size(0) - self.offset)
        start += self.offset
        if positions is None:
            return self.weight[start : start + length].unsqueeze(0)
        return self.weight[positions + self.offset]


class _Nowhere(nn.Module):
    """No position information; only the length is checked."""

    nothing: Tensor

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        # A buffer, so that what is added is on the device and of the type of the model.
        self.register_buffer("nothing", torch.zeros(1, 1, 1), persistent=False)

    def forward(
        self, length: int, start: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "#B #T #D"]:
        check_positions(length, start, positions, self.max_length)
        return self.nothing


class _Fixed(PositionTable):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        # Not saved: it follows from its shape. A buffer, so that it moves with the model.
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
        return _Fixed(table)


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
    """None: order is known only through the causal mask."""

    def build(self, max_length: int, width: int) -> nn.Module:
        """A module that adds nothing."""
        return _Nowhere(max_length)


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


def check_positions(
    length: int, start: int, positions: Int[Tensor, "#B T"] | None, max_length: int
) -> None:
    """Refuse a position that the model has none for.

    A row may be wider than the longest text where padding or other texts stand before a token:
    then its own position counts. It is looked at only there, as it may be on an accelerator.
    """
    if start + length <= max_length:
        return
    if positions is not None and positions.numel():
        check_length(int(positions.max()) + 1, max_length)
    else:
        check_length(start + length, max_length)


def check_length(length: int, max_length: int) -> None:
    """Refuse a sequence that the model has no positions for, naming both lengths."""
    if length > max_length:
        raise UserError(
            f"a sequence of {length} tokens is longer than the model allows "
            f"(max_length {max_length}); shorten or truncate it"
        )
