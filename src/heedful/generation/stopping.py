"""When a beam search counts a hypothesis as found, which it keeps, and when a sentence is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.hypotheses import LengthScore

Stop = Literal["optimal", "beam_full", "heuristic"]
Divisor = float | Float[Tensor, "B 1"]


@dataclass(frozen=True)
class StopRule:
    """One of the rules that `beam_search` describes, by name.

    Attributes:
        capacity: how many hypotheses of a sentence (or of its group) are kept.
        every_ending: whether an ending counts however it ranks, or only among the best of its step
            that would fill the beam.
        first_come: whether what is found first is kept; else the best are.
    """

    name: Stop | str
    capacity: int
    score: LengthScore

    def __post_init__(self) -> None:
        if self.name not in get_args(Stop):
            raise UserError(f"stop must be one of {', '.join(get_args(Stop))}, not {self.name!r}")

    @property
    def every_ending(self) -> bool:
        return self.name == "optimal"

    @property
    def first_come(self) -> bool:
        return self.name == "beam_full"

    def done(
        self,
        worst_kept: Float[Tensor, "B G"],
        best_open: Float[Tensor, "B G"],
        length: int,
        final_lengths: Callable[[], tuple[Divisor, Divisor]],
    ) -> Bool[Tensor, "B G"]:
        """Which are done.

        Args:
            worst_kept: its score; -inf where fewer than `capacity` are kept.
            best_open: the best log-probability of an open hypothesis, which has `length` tokens.
            final_lengths: the score's divisors at the shortest and longest length still possible.
                No further token raises a log-probability, and for a fixed one the score is monotone
                in the length, so its maximum lies at one of the two.
        """
        if self.first_come:
            return worst_kept > -torch.inf
        if not self.every_ending:
            return self.score(best_open, length) <= worst_kept
        shortest, longest = final_lengths()
        return torch.maximum(best_open / shortest, best_open / longest) <= worst_kept
