"""Diverse beam search: groups of hypotheses that are charged for likeness to earlier groups.

Vijayakumar et al. 2018, "Diverse Beam Search", algorithm 1 with Hamming diversity.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.generation.back_pointers import Extensions
from heedful.generation.beam import Beams, BeamSearch, Choice
from heedful.generation.hypotheses import Hypothesis
from heedful.generation.topk import top_k


@dataclass
class DiverseBeamSearch(BeamSearch):
    """A beam search with `num_groups` beams for each sentence.

    They choose one after the other: a token costs a later group `diversity_penalty` nats for every
    hypothesis of an earlier one that takes it in the same step. As in the authors' code the charge
    stays with a hypothesis and ranks it within its group, while log-probabilities and scores are
    the model's own, so that groups compare. Endings charge nobody.
    """

    diversity_penalty: float = 0.0

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """As `BeamSearch.choose`, with the charges."""
        rows, log_prob, key = (
            values.unflatten(0, (-1, self.num_groups))
            for values in (rows, beams.log_prob, beams.memory)
        )
        is_open = beams.is_open.unflatten(0, (-1, self.num_groups))
        taken = torch.zeros_like(rows[:, 0, 0])  # how often earlier groups take each token
        groups = [self._choose_best(rows[:, 0], log_prob[:, 0], exact)]
        for group in range(1, self.num_groups):
            earlier = groups[-1]
            is_real = (earlier.memory > -torch.inf) & is_open[:, group - 1, None]
            taken = taken.scatter_add(1, earlier.is_open.token, is_real.to(taken.dtype))
            of_group = rows[:, group], log_prob[:, group], key[:, group]
            groups.append(self._choose_charged(*of_group, self.diversity_penalty * taken, exact))
        return Choice(
            _interleaved([choice.is_open for choice in groups]),
            torch.stack([choice.memory for choice in groups], dim=1).flatten(0, 1),
            _interleaved([choice.ends for choice in groups]),
            torch.stack([choice.largest for choice in groups]).amax(),
            torch.stack([choice.is_tied for choice in groups]).any(),
        )

    def _choose_charged(
        self,
        rows: Float[Tensor, "B w V"],
        log_prob: Float[Tensor, "B w"],
        key: Float[Tensor, "B w"],
        charge: Float[Tensor, "B V"],
        exact: bool,
    ) -> Choice:
        """The best extensions of one group, ranked with the charges."""
        charged = (rows - charge[:, None]).flatten(0, 1)
        values, tokens, tied = top_k(charged, self._num_best, exact=exact)
        candidates = self._candidates(log_prob, tokens, rows.flatten(0, 1).gather(1, tokens))
        ranks = values.to(key.dtype).unflatten(0, key.shape)
        keys = (ranks + key[..., None]).flatten(1)
        is_open, key = self._best_open(candidates, keys)
        ends = self._ends(candidates, keys, rows, log_prob)
        return Choice(is_open, key, ends, values.amax(), tied)

    def merge(self, groups: list[list[Hypothesis]]) -> list[Hypothesis]:
        """The hypotheses of all groups, best first; what two groups found counts once."""
        different: dict[tuple[int, ...], Hypothesis] = {}
        for hypothesis in (one for group in groups for one in group):
            different.setdefault(tuple(hypothesis.ids), hypothesis)
        return sorted(different.values(), key=lambda hypothesis: -hypothesis.score)


def _interleaved(groups: list[Extensions]) -> Extensions:
    """Those of all groups, the groups of a sentence adjacent."""
    return Extensions(*(torch.stack(of, dim=1).flatten(0, 1) for of in zip(*groups, strict=True)))
