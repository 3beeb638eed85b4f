"""Diverse beam search: groups of hypotheses, which pay for tokens that earlier groups chose.

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

    The groups choose one after the other. In each step a token costs a later group
    `diversity_penalty` nats for every hypothesis of an earlier group that it extends. As in the
    authors' code the penalties of a hypothesis add up, and rank it within its group, while
    log-probabilities and scores are the model's, so that groups can be compared. A hypothesis that
    ends costs later groups nothing.

    `Beams.extra` is the log-probability of each hypothesis minus its penalties.
    """

    diversity_penalty: float = 0.0

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """The best extensions of each beam by log-probability minus penalties."""
        rows, log_prob, key = (
            values.unflatten(0, (-1, self.num_groups))
            for values in (rows, beams.log_prob, beams.extra)
        )
        is_open = beams.is_open.unflatten(0, (-1, self.num_groups))
        counts = torch.zeros_like(rows[:, 0, 0])  # hypotheses of earlier groups, by token
        groups = [self._choose_best(rows[:, 0], log_prob[:, 0], exact)]
        for group in range(1, self.num_groups):
            earlier = groups[-1]
            is_counted = (earlier.extra > -torch.inf) & is_open[:, group - 1, None]
            counts = counts.scatter_add(1, earlier.open.token, is_counted.to(counts.dtype))
            group_values = rows[:, group], log_prob[:, group], key[:, group]
            penalty = self.diversity_penalty * counts
            groups.append(self._choose_penalized(*group_values, penalty, exact))
        return Choice(
            _interleave([choice.open for choice in groups]),
            torch.stack([choice.extra for choice in groups], dim=1).flatten(0, 1),
            _interleave([choice.endings for choice in groups]),
            torch.stack([choice.largest for choice in groups]).amax(),
            torch.stack([choice.tied for choice in groups]).any(),
        )

    def _choose_penalized(
        self,
        rows: Float[Tensor, "B w V"],
        log_prob: Float[Tensor, "B w"],
        key: Float[Tensor, "B w"],
        penalty: Float[Tensor, "B V"],
        exact: bool,
    ) -> Choice:
        """The best extensions of one group, ranked by `key` minus the penalty of the token."""
        penalized = (rows - penalty[:, None]).flatten(0, 1)
        values, tokens, tied = top_k(penalized, self._num_best, exact=exact)
        candidates = self._candidates(log_prob, tokens, rows.flatten(0, 1).gather(1, tokens))
        by_row = values.to(key.dtype).unflatten(0, key.shape)
        keys = (by_row + key[..., None]).flatten(1)
        best, key = self._best_open(candidates, keys)
        endings = self._endings(candidates, keys, rows, log_prob)
        return Choice(best, key, endings, values.amax(), tied)

    def merge(self, groups: list[list[Hypothesis]]) -> list[Hypothesis]:
        """The hypotheses of all groups, best first, without duplicates."""
        by_ids: dict[tuple[int, ...], Hypothesis] = {}
        for group in groups:
            for hypothesis in group:
                by_ids.setdefault(tuple(hypothesis.ids), hypothesis)
        return sorted(by_ids.values(), key=lambda hypothesis: -hypothesis.score)


def _interleave(groups: list[Extensions]) -> Extensions:
    """The extensions of all groups; the groups of a sentence are adjacent."""
    values = zip(*groups, strict=True)
    return Extensions(*(torch.stack(of_groups, dim=1).flatten(0, 1) for of_groups in values))
