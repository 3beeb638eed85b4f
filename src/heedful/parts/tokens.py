"""Tokens of a batch: their ids, positions, padding and segments."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.errors import UserError

PaddingSide = Literal["right", "left"]


class Span(NamedTuple):
    """Tokens as attention sees them: without their ids; the fields are those of `Tokens`."""

    positions: Int[Tensor, "#B T"]
    real: Bool[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    is_aligned: bool = False
    longest_text: int | None = None

    def part(self, places: range) -> "Span":
        """Only the tokens at these places."""
        columns = slice(places.start, places.stop)
        tensors = (self.positions, self.real, self.segments)
        return Span(*(None if t is None else t[:, columns] for t in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tokens:
    """Token ids and the position of each: for padded, packed and new tokens alike.

    Attributes:
        ids: (B, T).
        positions: (B, T), or (1, T) where all rows count alike: the place of each token in its own
            text, from 0. That of padding is any position which the model has.
        real: (B, T), False at padding; None: all are real.
        segments: (B, T), which text of a packed row a token is of: attention stays inside it
            (Krell et al. 2021); None: one text a row.
        is_aligned: the position of each token is its column, so that padding stands on the right.
        longest_text: most tokens of a text of packed rows, or more, known to the host: no query
            sees a key that is farther away. None: it is not known.
    """

    ids: Int[Tensor, "B T"]
    positions: Int[Tensor, "#B T"]
    real: Bool[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    is_aligned: bool = False
    longest_text: int | None = None

    @classmethod
    def from_ids(
        cls,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        padding_side: PaddingSide = "right",
        segments: Int[Tensor, "B T"] | None = None,
        longest_text: int | None = None,
    ) -> "Tokens":
        """From padded ids; `lengths` counts the real tokens of each row (default: all are).

        Positions begin at 0 with each segment. Nothing here waits for the device: lengths are
        checked where they come from a caller (`check_lengths`).
        """
        size = ids.size(1)
        columns = torch.arange(size, device=ids.device)
        if lengths is None and not size:
            lengths = ids.new_zeros(ids.size(0))
        if lengths is None:
            if segments is None:
                return cls(ids, columns[None], is_aligned=True)
            positions = _restarting(segments, None)
            return cls(ids, positions, None, segments, longest_text=longest_text)
        real = padding_mask(lengths, size, padding_side)
        if segments is not None:
            positions = _restarting(segments, real)
            return cls(ids, positions, real, segments, longest_text=longest_text)
        if padding_side == "right":
            return cls(ids, columns[None], real, is_aligned=True)
        return cls(ids, (columns - (size - lengths)[:, None]).clamp(min=0), real)

    @property
    def span(self) -> Span:
        """The tokens without their ids."""
        return Span(self.positions, self.real, self.segments, self.is_aligned, self.longest_text)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Real tokens of each row."""
        if self.real is None:
            return torch.full(self.ids.shape[:1], self.ids.size(1), device=self.ids.device)
        return self.real.sum(1)

    def to(self, device: torch.device | str) -> "Tokens":
        """The same on another device."""
        names = ("ids", "positions", "real", "segments")
        given = {name: getattr(self, name) for name in names}
        moved: Any = {n: None if t is None else t.to(device) for n, t in given.items()}
        return replace(self, **moved)

    def longest(self) -> int:
        """Tokens of the longest text, on the host."""
        positions = self.positions
        if self.real is not None:
            positions = torch.where(self.real, positions, -1)
        return int(positions.max()) + 1 if positions.numel() else 0


def check_lengths(lengths: Int[Tensor, "B"] | None, size: int) -> None:
    """Raise UserError for lengths that rows of `size` columns cannot have.

    For the entry points of nets. Lengths on an accelerator, and those of a traced net, are not
    looked at: the host would wait for them.
    """
    if lengths is None or lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if lengths.numel() and (int(lengths.max()) > size or int(lengths.min()) < 0):
        raise UserError(
            f"lengths must be from 0 to {size}, the width of the batch, "
            f"not {int(lengths.min())} to {int(lengths.max())}"
        )


def padding_mask(
    lengths: Int[Tensor, "B"], size: int, side: PaddingSide = "right"
) -> Bool[Tensor, "B {size}"]:
    """True at the real tokens of rows that were padded to `size`."""
    columns = torch.arange(size, device=lengths.device)
    if side == "left":
        columns = columns.flip(0)
    return columns < lengths[:, None]


def _restarting(
    segments: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None
) -> Int[Tensor, "B T"]:
    """Positions that begin at 0 with every text of a packed row, whatever stands in its padding."""
    columns = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if real is not None:
        begins[:, 1:] |= real[:, 1:] != real[:, :-1]
    return columns - torch.where(begins, columns, 0).cummax(dim=1).values


torch.export.register_dataclass(Tokens)  # so that an exported net takes them
