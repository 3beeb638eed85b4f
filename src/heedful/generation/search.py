"""Beam search, diverse beam search and greedy search over any next-token function."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.beam import Beams, BeamSearch, Observer, Penalties, StepChoice, Stop
from heedful.generation.hypotheses import Extensions, top_k
from heedful.generation.outputs import Hypothesis, LengthScore
from heedful.generation.request import NextLogProbs, SearchRequest, Starts, State
from heedful.generation.sampling import sample
from heedful.options import Normalization


def beam_search(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    beam_size: int,
    length_penalty: float = 1.0,
    normalization: Normalization | str = "average",
    stop: Stop | str = "optimal",
    num_return: int = 1,
    force_eos: bool | None = None,
    num_groups: int = 1,
    diversity_penalty: float = 0.5,
    penalties: Penalties | None = None,
    state: State | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """For each start up to `num_return` hypotheses, best first, and at least one.

    The search space is every sequence of tokens of probability above zero that either ends in an
    EOS after `min_new_tokens` to `max_new_tokens` tokens, or has `max_new_tokens` tokens without an
    EOS (then the hypothesis is not finished). All compete by score: `LengthScore` of the new
    tokens, EOS included. If none is found, the best open prefix is returned, not finished.

    Stop rules:

    * `optimal`: each hypothesis in the beam ends with each EOS, also if that is too improbable to
      stay in the beam. A sentence is done when no open hypothesis can have a better score than the
      `num_return` best. With a beam as large as the space the result is the optimum.
    * `beam_full`, as in fairseq: a hypothesis ends if its EOS ranks in the beam, and a sentence is
      done after `beam_size` of them, so the order in which they are found matters.
    * `heuristic`, the default of `generate(num_beams=...)` in transformers: hypotheses end as in
      `beam_full`, the `beam_size` best are kept, and a sentence is done when the best open
      hypothesis, scored at its present length, is not better than the worst of them.

    (`beam_full` without a forced EOS is close to `early_stopping=True` of transformers, which in
    its last step keeps the best of all hypotheses if it finds more than fit, or at the limit.)

    With `num_groups` above 1 the beam is divided into that many groups of equal size, which differ
    by `diversity_penalty` (Vijayakumar et al. 2018, "Diverse Beam Search"). The stop rule applies
    to each group and its part of the beam, and the results of all groups are merged by score.

    The result of a sentence does not depend on its batch. Of equal candidates that of the lower
    row comes first, then that of the lower token id.

    Args:
        next_log_probs: called first with one row for each sentence, then with `beam_size` rows for
            each sentence (`beam_size / num_groups` for each group), those of one sentence adjacent,
            in the order of `start`. A sentence with fewer hypotheses repeats its first row.
            Sentences that are done leave the batch, in large batches several at a time. A function
            with a state needs to read `prefixes[:, -1:]` only (at the first call, all of `start`).
        start, options: `eos_id`, `max_new_tokens` and more, see `SearchRequest.from_options`.
            Log-probabilities and scores are those after `forced_prefix` and the rules, which must
            not raise one above 0 with the stop rule `optimal`.
        length_penalty: the exponent of the length; see `LengthScore`.
        force_eos: see `SearchRequest.from_options`; None: True for `beam_full` only.
        num_groups: a divisor of `beam_size`.
        diversity_penalty: nats that a token costs for each hypothesis of an earlier group that
            chooses it in the same step; 0 or more, without effect in a single group.
        penalties: called after each step; added to the scores of hypotheses that end in it, but not
            to those of prefixes. None: no penalties.
        state: passed to `next_log_probs`, and reordered and selected between two calls.
        observe: called after each step (`heedful.generation.beam.Observer`); None: nothing is.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.

    >>> import torch
    >>> def next_log_probs(prefixes):  # of 3 tokens, of which 2 is the end
    ...     return torch.tensor([[0.6, 0.1, 0.3]]).log().expand(len(prefixes), -1)
    >>> hypotheses = beam_search(
    ...     next_log_probs, [[0]], beam_size=4, eos_id=2, max_new_tokens=3, length_penalty=0.0
    ... )
    >>> hypotheses[0][0].ids
    [2]
    """
    if beam_size < 1:
        raise UserError(f"beam_size must be at least 1, not {beam_size}")
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    if num_groups < 1 or beam_size % num_groups:
        raise UserError(f"num_groups must divide beam_size = {beam_size}, not {num_groups}")
    if not 0 <= diversity_penalty < math.inf:
        raise UserError(
            f"diversity_penalty must be a finite number of 0 or more, not {diversity_penalty}"
        )
    if stop not in get_args(Stop):
        raise UserError(f"stop_rule must be one of {', '.join(get_args(Stop))}, not {stop!r}")
    if force_eos is None:
        force_eos = stop == "beam_full"
    if (on_done := options.get("on_done")) is not None:
        options["on_done"] = lambda sentence, kept: on_done(sentence, kept[:num_return])
    request = SearchRequest.from_options(start, force_eos=force_eos, **options)
    width = beam_size // num_groups
    capacity = min(num_return, width) if stop == "optimal" else width
    score = LengthScore(normalization, length_penalty)
    arguments = next_log_probs, state, request, stop, score, width, capacity, penalties
    search = (
        BeamSearch(*arguments)
        if num_groups == 1
        else DiverseBeamSearch(*arguments, num_groups, diversity_penalty)
    )
    search.observe = observe
    with torch.no_grad():
        return [hypotheses[:num_return] for hypotheses in search.run()]


def greedy_search(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    length_penalty: float = 1.0,
    normalization: Normalization | str = "average",
    **options: Any,
) -> list[list[Hypothesis]]:
    """For each start one hypothesis: the most probable next token, until EOS or the length limit.

    The tokens are those of a beam of 1 with `beam_full` and without a forced EOS. (A beam of 1 with
    `optimal` continues after an EOS that is the most probable token, because a longer hypothesis
    can have a better score.) Log-probabilities are the model's, before any rule; the penalty and
    the normalization change only the score.

    Args:
        options: `state`, and those of `SearchRequest.from_options`.

    >>> import torch
    >>> def next_log_probs(prefixes):  # of 3 tokens, of which 2 is the end
    ...     return torch.tensor([[0.6, 0.1, 0.3]]).log().expand(len(prefixes), -1)
    >>> greedy_search(next_log_probs, [[0]], eos_id=2, max_new_tokens=3)[0][0].ids
    [0, 0, 0]
    """
    score = LengthScore(normalization, length_penalty)
    hypotheses = sample(next_log_probs, start, seeds=None, score=score, **options)
    return [[hypothesis] for hypothesis in hypotheses]


@dataclass
class DiverseBeamSearch(BeamSearch):
    """A beam search with `num_groups` beams for each sentence (Vijayakumar et al. 2018, algorithm 1
    with Hamming diversity).

    The groups choose one after the other. In each step a token costs a later group
    `diversity_penalty` nats for every hypothesis of an earlier group that it extends. As in the
    authors' code the penalties of a hypothesis add up, and rank it within its group, while
    log-probabilities and scores are the model's, so that groups can be compared. A hypothesis that
    ends costs later groups nothing.

    `Beams.extra` is the log-probability of each hypothesis minus its penalties.
    """

    diversity_penalty: float = 0.0

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> StepChoice:
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
        return StepChoice(
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
    ) -> StepChoice:
        """The best extensions of one group, ranked by `key` minus the penalty of the token."""
        penalized = (rows - penalty[:, None]).flatten(0, 1)
        values, tokens, tied = top_k(penalized, self._num_best, exact=exact)
        candidates = self._candidates(log_prob, tokens, rows.flatten(0, 1).gather(1, tokens))
        by_row = values.to(key.dtype).unflatten(0, key.shape)
        keys = (by_row + key[..., None]).flatten(1)
        best, key = self._best_open(candidates, keys)
        endings = self._endings(candidates, keys, rows, log_prob)
        return StepChoice(best, key, endings, values.amax(), tied)

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
