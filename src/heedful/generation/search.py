"""Beam and greedy search over any function that gives next-token log-probabilities."""

import math
from typing import Any, get_args

import torch

from heedful.errors import UserError
from heedful.generation.beam import BeamSearch, Penalties, Stop
from heedful.generation.diverse import DiverseBeamSearch
from heedful.generation.hypotheses import Hypothesis, LengthScore, Normalization
from heedful.generation.request import SearchRequest, Starts
from heedful.generation.sampling import sample
from heedful.generation.state import NextLogProbs, State


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
    **options: Any,
) -> list[list[Hypothesis]]:
    """For each start up to `num_return` hypotheses, best first, and at least one.

    The space searched is every sequence of tokens of probability above zero that either ends in an
    EOS with `min_new_tokens` to `max_new_tokens` tokens, or has `max_new_tokens` tokens and no EOS
    (marked as not finished). All compete by score: `LengthScore`, over the new tokens including
    EOS. Only where none of them is found is the best open prefix returned, not finished.

    Stop rules. `optimal`: each ending of each hypothesis in the beam counts when it is found, also
    one too unlikely to stay in the beam; a sentence is done when nothing open can beat the
    `num_return` best under the same formula. With a beam as large as the space the result is the
    true optimum. `beam_full` is fairseq's: an ending counts when it ranks in the beam, and a
    sentence is done after `beam_size` of them, so the order of finding matters. `heuristic` is
    the default of transformers' `generate(num_beams=...)`: endings count as in `beam_full`, the
    `beam_size` best are kept, and a sentence is done when the best open hypothesis at its present
    length does not beat the worst of them. (`beam_full` without a forced EOS is close to its
    `early_stopping=True`, which differs in the last step: where that finds more than there is room
    for, or is at the length limit, it keeps the best of all.)

    With `num_groups` above 1 the beam is divided into that many equal groups, which are searched
    side by side and kept apart by `diversity_penalty` (Vijayakumar et al. 2018, "Diverse Beam
    Search"); the stop rule holds for each group and its part of the beam, and the results of all
    groups are merged by score.

    A sentence's result does not depend on its batch. Of equal candidates the lower beam, then the
    lower token id comes first.

    Args:
        next_log_probs: called first with one row a sentence, then with `beam_size` rows for each
            sentence (`beam_size / num_groups` for each group), those of one sentence adjacent, in
            the order of `start`. Rows that a sentence cannot fill repeat its first row; sentences
            that are done leave, in large batches some at a time. With a state it may look at
            `prefixes[:, -1:]` alone (all of `start` at the first call).
        start, options: `eos_id`, `max_new_tokens` and more, see `SearchRequest.from_options`.
            Log-probabilities and scores are those after `forced_prefix` and the rules, which must
            not raise one above 0.
        length_penalty: the exponent of the length; see `LengthScore`.
        force_eos: as of `SearchRequest.from_options`; by default so in `beam_full` alone.
        num_groups: a divisor of `beam_size`.
        diversity_penalty: nats that a token costs for each hypothesis of an earlier group that
            takes it in the same step; 0 or more, without effect in a single group.
        penalties: called after each step; they count where an output ends and choose among outputs,
            not among prefixes. Default: none.
        state: given to `next_log_probs`; told between two calls how rows moved.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.
    """
    if beam_size < 1:
        raise UserError(f"beam_size must be at least 1, not {beam_size}")
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    if num_groups < 1 or beam_size % num_groups:
        raise UserError(f"num_groups must divide beam_size = {beam_size}, not {num_groups}")
    if not 0 <= diversity_penalty < math.inf:
        raise UserError(f"diversity_penalty must be a number from 0, not {diversity_penalty}")
    if stop not in get_args(Stop):
        raise UserError(f"stop must be one of {', '.join(get_args(Stop))}, not {stop!r}")
    forced = stop == "beam_full" if force_eos is None else force_eos
    request = SearchRequest.from_options(start, force_eos=forced, **options)
    width = beam_size // num_groups
    capacity = min(num_return, width) if stop == "optimal" else width
    score = LengthScore(normalization, length_penalty)
    arguments = next_log_probs, state, request, stop, score, width, capacity, penalties
    search = (
        BeamSearch(*arguments)
        if num_groups == 1
        else DiverseBeamSearch(*arguments, num_groups, diversity_penalty)
    )
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
    """For each start one hypothesis: the most likely next token each time, until EOS or the limit.

    It takes what a beam of 1 takes under `beam_full` without a forced EOS. (A beam of 1 under
    `optimal` goes on past an EOS that is likeliest, because a longer hypothesis may score better.)
    Log-probabilities are the model's, before any rule; the penalty and the normalisation change
    the reported score alone. Options: `state`, and those of `SearchRequest.from_options`.
    """
    score = LengthScore(normalization, length_penalty)
    found = sample(next_log_probs, start, seeds=None, score=score, **options)
    return [[hypothesis] for hypothesis in found]
