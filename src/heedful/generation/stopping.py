"""When a beam search counts a hypothesis as found, which ones it keeps, and when it stops."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.generation.scoring import Hypothesis, LengthScore

Stop = Literal["optimal", "beam_full"]


@dataclass(frozen=True)
class Optimal:
    """Every ending of every row counts; done when no open hypothesis can beat the kept ones.

    "Can" is meant under the same formula as the scores, for either sign of the length penalty.
    `capacity` hypotheses of a sentence are kept. Shapes: `n` open sentences with `W` rows each and
    `C` candidates in all.
    """

    capacity: int
    beam_size: int
    score: LengthScore

    @property
    def depth(self) -> int:
        """How many candidates of each row, best first, a step must look at."""
        return self.beam_size + 1  # EOS may be one of them, and does not go on

    def counted(
        self, sums: Float[Tensor, "n C"], is_eos: Bool[Tensor, "n C"], eos: Float[Tensor, "n W"]
    ) -> Float[Tensor, "n W"]:
        """Of the log-probabilities `eos` of ending each row now those that count, -inf elsewhere.

        `sums` are the log-probabilities of the candidates, `is_eos` marks those that end.
        """
        return eos

    def keep(self, kept: list[Hypothesis], found: list[Hypothesis]) -> list[Hypothesis]:
        """What is kept of both, best first; `found` come from one step, best first."""
        both = sorted(kept + found, key=lambda hypothesis: -hypothesis.score)
        return both[: self.capacity]

    def done(
        self,
        worst_kept: Float[Tensor, "n"],
        best_open: Float[Tensor, "n"],
        shortest: Int[Tensor, "n"],
        longest: Int[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        """Which sentences are done.

        `worst_kept` is -inf where fewer than `capacity` are kept; `best_open` is the best
        log-probability of an open hypothesis; the lengths are the final ones still possible.
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

    @property
    def depth(self) -> int:
        # A row's part in the 2 * beam size candidates that fairseq takes: behind its best
        # beam size + 1, one of which may be EOS, nothing can rank or go on. With a beam of 1
        # an EOS at the top ends the sentence, so nothing needs to go on beside it.
        return self.capacity + 1 if self.capacity > 1 else 1

    def counted(
        self, sums: Float[Tensor, "n C"], is_eos: Bool[Tensor, "n C"], eos: Float[Tensor, "n W"]
    ) -> Float[Tensor, "n W"]:
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, : self.capacity]
        ranked = torch.zeros_like(is_eos).scatter_(1, best, True) & is_eos
        per_row = ranked.unflatten(1, (eos.shape[1], -1)).any(dim=2)
        return eos.masked_fill(~per_row, -torch.inf)

    def keep(self, kept: list[Hypothesis], found: list[Hypothesis]) -> list[Hypothesis]:
        both = kept + found[: self.capacity - len(kept)]
        return sorted(both, key=lambda hypothesis: -hypothesis.score)

    def done(
        self,
        worst_kept: Float[Tensor, "n"],
        best_open: Float[Tensor, "n"],
        shortest: Int[Tensor, "n"],
        longest: Int[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        return worst_kept > -torch.inf


StopRule = Optimal | BeamFull
