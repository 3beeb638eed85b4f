"""Hypotheses of a beam search as back-pointers, and the best that have finished.

A step makes `P` hypotheses of each of `R` beams from the `w` that were open: its first `w` places
hold those that stay open, the others those that end. Step times `P` plus place refers to one.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


class Extensions(NamedTuple):
    """Open hypotheses with one token more, `X` of each beam.

    Attributes:
        parent: place of the hypothesis that is extended, from 0 to w - 1.
        part: log-probability of the token; `log_prob` is the sum with that of the parent.
    """

    parent: Int[Tensor, "R X"]
    token: Int[Tensor, "R X"]
    part: Float[Tensor, "R X"]
    log_prob: Float[Tensor, "R X"]

    def take(self, places: Int[Tensor, "R Y"]) -> "Extensions":
        """Those at some places."""
        return Extensions(*(values.gather(1, places) for values in self))


@dataclass
class BackPointers:
    """Parents, tokens and log-probabilities of all steps."""

    num_places: int
    _earlier: list[Shaped[Tensor, "steps R P"]] = field(default_factory=list)
    _open: list[Extensions] = field(default_factory=list)  # of the steps since
    _ends: list[Extensions] = field(default_factory=list)

    def append(self, is_open: Extensions, ends: Extensions) -> None:
        """Add a step."""
        self._open.append(is_open)
        self._ends.append(ends)

    def select(self, beams: Int[Tensor, "M"]) -> "BackPointers":
        """Those of some beams."""
        return BackPointers(self.num_places, [values[:, beams] for values in self._joined()])

    def on_host(self) -> list[Any]:
        """Parents, tokens and log-probabilities as nested lists."""
        return [values.tolist() for values in self._joined()]

    def _joined(self) -> list[Shaped[Tensor, "steps R P"]]:
        """Parents, tokens and log-probabilities; a step costs nothing until they are needed."""
        if self._open:
            halves = ([*zip(*steps, strict=True)][:3] for steps in (self._open, self._ends))
            steps = [
                torch.cat([torch.stack(of_open), torch.stack(of_ends)], dim=2)
                for of_open, of_ends in zip(*halves, strict=True)
            ]
            if self._earlier:
                steps = [torch.cat(pair) for pair in zip(self._earlier, steps, strict=True)]
            self._earlier, self._open, self._ends = steps, [], []
        return self._earlier

    def path(self, on_host: list[Any], beam: int, ref: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a hypothesis; none for a negative reference."""
        parents, tokens, parts = on_host
        step, place = divmod(ref, self.num_places)
        ids: list[int] = []
        log_probs: list[float] = []
        while step >= 0:
            ids.append(tokens[step][beam][place])
            log_probs.append(parts[step][beam][place])
            step, place = step - 1, parents[step][beam][place]
        return ids[::-1], log_probs[::-1]


class Finished(NamedTuple):
    """The `K` best finished hypotheses of each beam, best first; score -inf: fewer were found."""

    score: Float[Tensor, "R K"]
    ref: Int[Tensor, "R K"]

    def add(self, scores: Float[Tensor, "R X"], first_ref: int, *, first_come: bool) -> "Finished":
        """With others, at the references from `first_ref` on; earlier ones win ties.

        With `first_come` they win in any case.
        """
        num_kept, num_new = self.score.shape[1], scores.shape[1]
        refs = torch.arange(first_ref, first_ref + num_new, device=scores.device)
        refs = torch.cat([self.ref, refs.expand(len(scores), -1)], dim=1)
        ranks = merged = torch.cat([self.score, scores], dim=1)
        if first_come:
            earlier = self.score.masked_fill(self.score > -torch.inf, torch.inf)
            ranks = torch.cat([earlier, scores], dim=1)
        best = ranks.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
        return Finished(merged.gather(1, best), refs.gather(1, best))

    def select(self, beams: Int[Tensor, "M"]) -> "Finished":
        """Those of some beams."""
        return Finished(self.score[beams], self.ref[beams])
