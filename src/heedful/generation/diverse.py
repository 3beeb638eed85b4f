"""Diverse beam search: the groups of a beam, each charged for tokens that groups before it took."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.generation.beams import Beams, Next, Search
from heedful.generation.scoring import Hypothesis


@dataclass(frozen=True)
class DiverseSearch(Search):
    """Vijayakumar et al. 2018, "Diverse Beam Search", algorithm 1 with Hamming diversity.

    In each step the groups of a sentence choose one after the other. For every hypothesis of a
    group before that takes a token, the same token costs a later group `diversity_penalty` nats.
    As in the authors' code the charges stay with a hypothesis and rank it within its group, while
    log-probabilities and scores are the model's own, so that groups compare. Endings charge
    nobody.
    """

    diversity_penalty: float = 0.0

    def step(self, beams: Beams) -> tuple[Next, Next]:
        log_probs = self.log_probs(beams)
        sentence, group = beams.search // self.num_groups, beams.search % self.num_groups
        taken = log_probs.new_zeros(int(sentence.max()) + 1, log_probs.shape[1])
        places, found = [], []
        for number in range(self.num_groups):
            of_group = (group == number).nonzero()[:, 0]
            if not len(of_group):
                continue
            rows = beams.rows[of_group]
            charge = self.diversity_penalty * taken[sentence[of_group]]
            given = log_probs[rows.flatten()]
            charged = given - charge.repeat_interleave(rows.shape[1], dim=0)
            steps = self.choose(_part(beams, of_group), given, charged)
            endings, going_on = (_in_rows(step, rows.flatten()) for step in steps)
            possible = (going_on.key > -torch.inf).to(taken.dtype)
            where = (sentence[of_group, None].expand_as(going_on.token), going_on.token)
            taken.index_put_(where, possible, accumulate=True)
            places.append(of_group)
            found.append((endings, going_on))
        back = torch.cat(places).argsort()
        all_endings, all_going_on = zip(*found, strict=True)
        return _together(all_endings, back), _together(all_going_on, back)


def merge_groups(
    kept: list[list[Hypothesis]], num_groups: int, num_return: int
) -> list[list[Hypothesis]]:
    """The best of each sentence over its groups, best first; what two groups found counts once."""
    merged = []
    for first in range(0, len(kept), num_groups):
        different: dict[tuple[int, ...], Hypothesis] = {}
        for hypothesis in (one for group in kept[first : first + num_groups] for one in group):
            different.setdefault(tuple(hypothesis.ids), hypothesis)
        best = sorted(different.values(), key=lambda hypothesis: -hypothesis.score)
        merged.append(best[:num_return])
    return merged


def _part(beams: Beams, places: Int[Tensor, "m"]) -> Beams:
    """Only the searches at some places."""
    rows = beams.rows[places].flatten()
    return Beams(
        beams.search[places],
        beams.tokens[rows],
        beams.token_log_probs[rows],
        beams.log_prob[places],
        beams.key[places],
    )


def _in_rows(step: Next, rows: Int[Tensor, "N"]) -> Next:
    """A step of a part in the rows of the whole."""
    return Next(
        rows[step.row], step.token, step.token_log_prob, step.log_prob, step.key, step.counts
    )


def _together(steps: tuple[Next, ...], order: Int[Tensor, "n"]) -> Next:
    """Steps of some searches as one, in another order."""
    columns: list[Float[Tensor, "n X"] | Int[Tensor, "n X"] | Bool[Tensor, "n X"]] = [
        torch.cat([getattr(step, column.name) for step in steps])[order] for column in fields(Next)
    ]
    return Next(*columns)
