"""When a beam search counts a hypothesis as found, which ones it keeps, and when it stops."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.scoring import Hypothesis, LengthScore

Stop = Literal["optimal", "beam_full", "heuristic"]


def stop_rule(
    name: Stop | str, num_return: int, beam_size: int, num_eos: int, score: LengthScore
) -> "StopRule":
    """The rule of a name; raises UserError for another one."""
    if name == "optimal":
        return Optimal(min(num_return, beam_size), beam_size, num_eos, score)
    if name == "beam_full":
        return BeamFull(beam_size, num_eos)
    if name == "heuristic":
        return Heuristic(beam_size, num_eos, score)
    raise UserError(f"stop must be one of {', '.join(get_args(Stop))}, not {name!r}")


@dataclass(frozen=True)
class Optimal:
    """Every ending of every row counts; done when no open hypothesis can beat the kept ones.

    "Can" is meant under the same formula as the scores, for either sign of the length penalty.
    `capacity` hypotheses of a sentence are kept. Shapes: `n` open sentences with `X` hypotheses
    each that one step offers.
    """

    capacity: int
    beam_size: int
    num_eos: int
    score: LengthScore

    @property
    def depth(self) -> int:
        """How many candidates of each row, best first, a step must look at."""
        return self.beam_size + self.num_eos  # an EOS may be one of them, and does not go on

    def ending_counts(self, rank: Int[Tensor, "n X"]) -> Bool[Tensor, "n X"]:
        """Which endings count, by their rank (from 0) among all candidates of the sentence."""
        return torch.ones_like(rank, dtype=torch.bool)

    def keep(self, kept: list[Hypothesis], found: list[Hypothesis]) -> list[Hypothesis]:
        """What is kept of both, best first; `found` come from one step, best first."""
        return _best(kept + found)[: self.capacity]

    def done(
        self,
        worst_kept: Float[Tensor, "n"],
        best_open: Float[Tensor, "n"],
        length: int,
        shortest: Int[Tensor, "n"],
        longest: Int[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        """Which sentences are done.

        `worst_kept` is -inf where fewer than `capacity` are kept; `best_open` is the best
        log-probability of an open hypothesis, `length` its length now; the other lengths are the
        final ones still possible.
        """
        return self.score.upper_bound(best_open, shortest, longest) <= worst_kept


@dataclass(frozen=True)
class BeamFull:
    """fairseq's rule (Ott et al. 2019; `SequenceGenerator`).

    An ending counts only when it ranks among the `capacity` = beam size best candidates of its
    sentence; what is found first is kept, and the sentence is done when that many are. The
    methods answer the same questions as those of `Optimal`.
    """

    capacity: int
    num_eos: int

    @property
    def depth(self) -> int:
        # A row's part in the 2 * beam size candidates that fairseq takes: behind its best
        # beam size + 1, one of which may be EOS, nothing can rank or go on. With a beam of 1
        # an EOS at the top ends the sentence, so nothing needs to go on beside it.
        return self.capacity + self.num_eos if self.capacity > 1 else 1

    def ending_counts(self, rank: Int[Tensor, "n X"]) -> Bool[Tensor, "n X"]:
        return rank < self.capacity

    def keep(self, kept: list[Hypothesis], found: list[Hypothesis]) -> list[Hypothesis]:
        return _best(kept + found[: self.capacity - len(kept)])

    def done(
        self,
        worst_kept: Float[Tensor, "n"],
        best_open: Float[Tensor, "n"],
        length: int,
        shortest: Int[Tensor, "n"],
        longest: Int[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        return worst_kept > -torch.inf


@dataclass(frozen=True)
class Heuristic:
    """The rule of transformers' `generate` with `num_beams` above 1 and `early_stopping=False`.

    An ending counts only when it ranks among the `capacity` = beam size best candidates of its
    sentence; the best by score are kept. The sentence is done when that many are and the best open
    hypothesis, scored as if it ended at its present length, does not beat the worst of them. For a
    penalty above 0 a longer one might have. (At the length limit only what ranks counts in
    transformers, cut off or not; that needs no rule, as the rest is no better than what ranks.)
    """

    capacity: int
    num_eos: int
    score: LengthScore

    @property
    def depth(self) -> int:
        return self.capacity + self.num_eos

    def ending_counts(self, rank: Int[Tensor, "n X"]) -> Bool[Tensor, "n X"]:
        return rank < self.capacity

    def keep(self, kept: list[Hypothesis], found: list[Hypothesis]) -> list[Hypothesis]:
        return _best(kept + found)[: self.capacity]

    def done(
        self,
        worst_kept: Float[Tensor, "n"],
        best_open: Float[Tensor, "n"],
        length: int,
        shortest: Int[Tensor, "n"],
        longest: Int[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        return self.score(best_open, length) <= worst_kept


StopRule = Optimal | BeamFull | Heuristic


def _best(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
