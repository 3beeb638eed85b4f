"""Beam search for outputs that must contain phrases, at any position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.beam import Beams, BeamSearch, StepChoice
from heedful.generation.hypotheses import Extensions, top_k
from heedful.generation.outputs import Failure, Hypothesis, LengthScore
from heedful.generation.request import NextLogProbs, SearchRequest, Starts, State
from heedful.options import Normalization

Phrases = Sequence[Sequence[int]]


def constrained_beam_search(
    next_log_probs: NextLogProbs,
    start: Starts,
    phrases: Phrases,
    *,
    beam_size: int,
    length_penalty: float = 1.0,
    normalization: Normalization | str = "average",
    num_return: int = 1,
    state: State | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """For each start up to `num_return` outputs that contain every phrase, best first.

    Dynamic beam allocation (Post and Vilar 2018, sec. 3) divides one beam among the banks of grid
    beam search (Hokamp and Liu 2017): hypotheses with equally many tokens of the phrases form a
    bank. In each step the candidates are the most probable tokens, and those that begin or extend
    a phrase.

    No hypothesis ends before it contains all phrases. The stop rule is `optimal`: with a beam as
    large as the space the result is the optimum. If no hypothesis with all phrases is found, the
    best prefix with the most of their tokens is returned, not finished.

    Args:
        phrases: ids of each phrase; phrases may overlap in an output, and may be equal.
        beam_size: hypotheses of a beam; at least one for each bank, see `least_beam_size`.
        state: as in `beam_search`; it needs room for as many beams as are searched.
        start, options: as in `beam_search`.

    Raises:
        UserError: as `beam_search`; a phrase that is empty, contains an EOS, or does not fit.
    """
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    request = SearchRequest.from_options(start, **options)
    limit = min(request.max_new_tokens, default=math.inf)
    for phrase in phrases:
        if not phrase or len(phrase) >= limit:
            raise UserError(
                f"a required phrase has {len(phrase)} tokens, but an output has at most {limit} "
                "with its EOS; leave the phrase out, or increase max_new_tokens"
            )
        if set(phrase) & set(request.eos_ids):
            raise UserError("a required phrase contains an EOS id, after which no token can follow")
    if phrases:
        largest = max(int(token) for phrase in phrases for token in phrase)
        request = replace(request, largest_id=max(largest, request.largest_id))
        beam_size = max(beam_size, least_beam_size(phrases))
    score = LengthScore(normalization, length_penalty)
    arguments = next_log_probs, state, request, "optimal", score, beam_size, num_return
    search = BeamSearch(*arguments)
    if phrases:
        ids = [tuple(map(int, phrase)) for phrase in phrases]
        search = ConstrainedBeamSearch(*arguments, phrases=ids)
    with torch.no_grad():
        return search.run()


def least_beam_size(phrases: Phrases) -> int:
    """The number of banks: a smaller beam could not hold a hypothesis of each.

    In such a beam, hypotheses that begin a phrase would push out the better ones that begin it
    later. So one with these many is searched in its place.
    """
    return sum(map(len, phrases)) + 1


class _Candidate(NamedTuple):
    """A hypothesis extended by one token; in order of their fields the best ones are first.

    Attributes:
        negative_met: minus the tokens of phrases in it, see `PhraseProgress.moves`.
        negative_log_prob: minus the log-probability of all its tokens.
        order: of the hypotheses; it decides between equal ones.
        parent, token, token_log_prob: as in `Extensions`.
        progress: in each phrase.
    """

    negative_met: int
    negative_log_prob: float
    order: int
    parent: int
    token: float
    token_log_prob: float
    progress: tuple[int, ...]


@dataclass
class ConstrainedBeamSearch(BeamSearch):
    """A beam search with the stop rule `optimal`, in which only hypotheses with all phrases end.

    `Beams.extra` is the progress of each hypothesis in each of `F` phrases, see `PhraseProgress`.
    A step has few candidates, which the host reads and divides: as tensors this would take about 60
    operations on a few numbers each.
    """

    phrases: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._progress = PhraseProgress(self.phrases, self.request.eos_ids)
        device = self.request.start.device
        self._alphabet = torch.tensor(self._progress.alphabet, device=device)
        self._lengths = torch.tensor([*map(len, self.phrases)], device=device)
        self._quota = self.width // least_beam_size(self.phrases)  # of each bank
        # At least `width` of these tokens are not EOS, even if all extend one hypothesis.
        self._num_likely = self.width * (1 + len(self._eos))
        self._complete_from = math.inf  # new tokens from which on all hypotheses have all phrases

    def init(self) -> Beams:
        """The beams of `BeamSearch.init`, without any token of a phrase."""
        beams = super().init()
        return replace(beams, extra=beams.parent.new_zeros(*beams.parent.shape, len(self.phrases)))

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> StepChoice:
        """Divide the beam among the candidates by the number of tokens of phrases that they have.

        The candidates of each row are its most probable tokens, and the tokens that begin or extend
        a phrase. If all hypotheses contain all phrases, as those that extend them will, the choice
        is that of `BeamSearch`.
        """
        if beams.length >= self._complete_from:
            return super().choose(beams, rows, exact)._replace(extra=beams.extra)
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_likely, exact=exact)
        of_phrases = rows.index_select(2, self._alphabet).flatten(0, 1)
        columns = values, tokens, of_phrases, beams.log_prob.view(-1, 1), beams.extra.flatten(0, 1)
        table = torch.cat(columns, dim=1).tolist()
        by_beam = [table[first : first + self.width] for first in range(0, len(table), self.width)]
        beams_of_texts = [self._divide(hypotheses, tokens.shape[1]) for hypotheses in by_beam]
        if all(self._progress.is_complete(c.progress) for beam in beams_of_texts for c in beam):
            self._complete_from = beams.length + 1

        def tensor(name: str, like: Tensor) -> Tensor:
            values = [[getattr(candidate, name) for candidate in beam] for beam in beams_of_texts]
            return torch.tensor(values, dtype=like.dtype, device=like.device)

        best = Extensions(
            tensor("parent", beams.parent),
            tensor("token", tokens),
            tensor("token_log_prob", beams.log_prob),
            tensor("negative_log_prob", beams.log_prob).neg_(),
        )
        endings = self._all_endings(rows, self._with_all_phrases(beams.log_prob, beams.extra))
        return StepChoice(best, tensor("progress", beams.extra), endings, values.amax(), tied)

    def at_limit(self, choice: StepChoice) -> Extensions:
        """The open hypotheses with all phrases."""
        log_prob = self._with_all_phrases(choice.open.log_prob, choice.extra)
        return choice.open._replace(log_prob=log_prob)

    def failure_of(self, ids: list[int]) -> Failure:
        """A prefix with all phrases was at a dead end."""
        progress = (0,) * len(self.phrases)
        for token in ids:
            moves = self._progress.moves(progress)
            _, progress = moves.after.get(token, moves.after_other)
        return "dead_end" if self._progress.is_complete(progress) else "without_phrase"

    def _with_all_phrases(
        self, log_prob: Float[Tensor, "R w"], progress: Int[Tensor, "R w F"]
    ) -> Float[Tensor, "R w"]:
        """The log-probabilities, with -inf for hypotheses that lack a phrase."""
        is_incomplete = (progress != self._lengths).any(dim=2)
        return log_prob.masked_fill(is_incomplete, -torch.inf)

    def _divide(self, hypotheses: list[list[float]], num_best: int) -> list[_Candidate]:
        """The `width` candidates of a beam that continue: an equal number of the best of each bank,
        then the best of the others; those with the most tokens of phrases first.

        If there are fewer, the first one is repeated with a log-probability of -inf.

        Args:
            hypotheses: for each, the log-probabilities of its `num_best` most probable tokens,
                these tokens, the log-probabilities of the tokens of `alphabet`, its cumulative
                log-probability, and its progress.
        """
        candidates = sorted(self._candidates_of(hypotheses, num_best))
        selected: list[_Candidate] = []
        others: list[_Candidate] = []
        for index, candidate in enumerate(candidates):
            # Sorted by bank: above the quota if the one `quota` indices before is of the same bank.
            earlier = index - self._quota
            exceeds = earlier >= 0 and candidates[earlier].negative_met == candidate.negative_met
            (others if exceeds else selected).append(candidate)
        selected = (selected + others)[: self.width]
        if len(selected) == self.width:
            return selected
        if not selected:
            progress, token = self._progress_of(hypotheses[0]), hypotheses[0][num_best]
            selected = [_Candidate(0, math.inf, 0, 0, token, -math.inf, progress)]
        missing = selected[0]._replace(negative_log_prob=math.inf)
        return selected + [missing] * (self.width - len(selected))

    def _candidates_of(self, hypotheses: list[list[float]], num_best: int) -> list[_Candidate]:
        """The candidates of a beam, see `_divide`.

        They are tokens that begin or extend a phrase, and of the others, EOS left out, the most
        probable one of each hypothesis and those among the `_num_likely` most probable of the beam.
        """
        log_probs = [row[-len(self.phrases) - 1] for row in hypotheses]
        totals = [
            [log_prob + value for value in row[:num_best]]
            for row, log_prob in zip(hypotheses, log_probs, strict=True)
        ]
        likely = sorted(chain.from_iterable(totals))
        least = likely[-min(self._num_likely, len(likely))]
        candidates: list[_Candidate] = []
        for parent, (row, log_prob) in enumerate(zip(hypotheses, log_probs, strict=True)):
            if log_prob == -math.inf:
                continue
            moves = self._progress.moves(self._progress_of(row))
            limit = min(least, max(totals[parent]))
            pairs = [
                (row[num_best + n], row[n])
                for n, total in enumerate(totals[parent])
                if total >= limit
            ]
            extensions = [pair for pair in pairs if pair[0] not in moves.excluded]
            first = 2 * num_best
            extensions += [(token, row[first + column]) for token, column in moves.next_tokens]
            for token, value in extensions:
                if value > -math.inf:
                    num_met, progress = moves.after.get(token, moves.after_other)
                    total = -(log_prob + value)
                    candidates.append(
                        _Candidate(-num_met, total, len(candidates), parent, token, value, progress)
                    )
        return candidates

    def _progress_of(self, hypothesis: list[float]) -> tuple[int, ...]:
        return tuple(map(int, hypothesis[-len(self.phrases) :]))


class Moves(NamedTuple):
    """The extensions of outputs with a certain progress by one token.

    Attributes:
        next_tokens: tokens that begin or extend an incomplete phrase, with their index in the
            alphabet.
        excluded: these and all EOS.
        after: for each token of the alphabet, the number of tokens of phrases in the output after
            it (those of complete phrases, and of the incomplete phrase with the most), and the
            progress after it.
        after_other: the same for any other token.
    """

    next_tokens: list[tuple[int, int]]
    excluded: frozenset[int]
    after: dict[float, tuple[int, tuple[int, ...]]]
    after_other: tuple[int, tuple[int, ...]]


class PhraseProgress:
    """The progress of outputs in `F` phrases, a number for each phrase.

    It is `n` if the output ends in the first `n` tokens of the phrase and no more, and the length
    of the phrase if the output contains it (Knuth, Morris and Pratt 1977).

    Attributes:
        alphabet: the different tokens of the phrases.
    """

    def __init__(self, phrases: Sequence[tuple[int, ...]], eos_ids: Sequence[int]) -> None:
        self.alphabet = sorted({token for phrase in phrases for token in phrase})
        self._phrases = phrases
        self._eos_ids = eos_ids
        self._moves: dict[tuple[int, ...], Moves] = {}

    def moves(self, progress: tuple[int, ...]) -> Moves:
        """The extensions of outputs with this progress."""
        if progress not in self._moves:
            pairs = [*zip(self._phrases, progress, strict=True)]
            incomplete = [(phrase, n) for phrase, n in pairs if n < len(phrase)]
            tokens = {token for phrase, n in incomplete for token in (phrase[0], phrase[n])}
            self._moves[progress] = Moves(
                [(token, column) for column, token in enumerate(self.alphabet) if token in tokens],
                frozenset(tokens) | frozenset(self._eos_ids),
                {token: self._after(progress, token) for token in self.alphabet},
                self._after(progress, -1),
            )
        return self._moves[progress]

    def _after(self, progress: tuple[int, ...], token: int) -> tuple[int, tuple[int, ...]]:
        """An entry of `Moves.after`."""
        pairs = [*zip(self._phrases, progress, strict=True)]
        after = tuple(_next_progress(phrase, number, token) for phrase, number in pairs)
        pairs = [*zip(self._phrases, after, strict=True)]
        complete = sum(number for phrase, number in pairs if number == len(phrase))
        partial = max((number for phrase, number in pairs if number < len(phrase)), default=0)
        return complete + partial, after

    def is_complete(self, progress: tuple[int, ...]) -> bool:
        """True if the output contains all phrases."""
        return all(number == len(p) for p, number in zip(self._phrases, progress, strict=True))


def _next_progress(phrase: tuple[int, ...], progress: int, token: int) -> int:
    """The progress in a phrase after one more token (Knuth, Morris and Pratt 1977)."""
    if progress >= len(phrase):
        return len(phrase)
    ids = (*phrase[:progress], token)
    return next(n for n in range(len(ids), -1, -1) if ids[len(ids) - n :] == phrase[:n])
