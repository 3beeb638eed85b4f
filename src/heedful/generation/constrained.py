"""Beam search for outputs that must contain phrases, at any position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.back_pointers import Extensions
from heedful.generation.beam import Beams, BeamSearch, Choice
from heedful.generation.hypotheses import Hypothesis, LengthScore, Normalization
from heedful.generation.request import SearchRequest, Starts
from heedful.generation.state import NextLogProbs, State
from heedful.generation.topk import top_k

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
        start, state, options: as of `beam_search`.

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
    score = LengthScore(normalization, length_penalty)
    arguments = next_log_probs, state, request, "optimal", score, beam_size, num_return
    search = BeamSearch(*arguments)
    if phrases:
        ids = [tuple(map(int, phrase)) for phrase in phrases]
        search = ConstrainedBeamSearch(*arguments, phrases=ids)
    with torch.no_grad():
        return search.run()


@dataclass
class ConstrainedBeamSearch(BeamSearch):
    """A beam search with the stop rule `optimal`, in which only hypotheses with all phrases end.

    `Beams.extra` is a state for each of `F` phrases, see `PhraseStates`.
    """

    phrases: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.request.start.device
        self._states = PhraseStates(self.phrases, self.request.eos_ids, device)
        self._quota = self.width // (sum(map(len, self.phrases)) + 1)  # of each bank
        # Of each beam, so that at least `width` do not end; one row may have all of them.
        self._num_likely = self.width * (1 + len(self._eos))

    def init(self) -> Beams:
        """The beams of `BeamSearch.init`, without any token of a phrase."""
        beams = super().init()
        return replace(beams, extra=self._states.start.expand(*beams.parent.shape, -1))

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """Divide the beam among the candidates by the number of tokens of phrases that they have.

        The candidates of each row are its most probable tokens, then all tokens of the phrases;
        those that do not count have a key of -inf. If all hypotheses contain all phrases, as those
        that extend them will, the choice is that of `BeamSearch`.
        """
        if self.choice_flags == [False]:
            choice = super().choose(beams, rows, exact)
            return choice._replace(
                extra=beams.extra, flags=torch.cat([choice.flags, torch.zeros_like(choice.flags)])
            )
        phrases, states = self._states, beams.extra
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_likely, exact=exact)
        num_best = tokens.shape[1]
        tokens = torch.cat([tokens, phrases.alphabet.expand(len(tokens), -1)], dim=1)
        of_phrases = rows.index_select(2, phrases.alphabet).flatten(0, 1)
        candidates = self._candidates(
            beams.log_prob, tokens, torch.cat([values, of_phrases], dim=1)
        )
        letter = phrases.letters(candidates.token, rows.shape[2])
        by_row = letter.view(*beams.log_prob.shape, -1)
        is_next, num_met = phrases.extensions(states)
        is_excluded = self._is_improbable(candidates.log_prob, num_best)
        is_excluded |= is_next.gather(2, by_row[..., :num_best])  # EOS, or a duplicate
        is_excluded = torch.cat([is_excluded, ~is_next[..., : len(phrases.alphabet)]], dim=2)
        key = candidates.log_prob.masked_fill(is_excluded.flatten(1), -torch.inf)
        indices = self._allocate(key, num_met.gather(2, by_row).flatten(1))
        best = self._take_open(candidates, key.gather(1, indices), indices)
        parent = best.parent[..., None].expand(-1, -1, states.shape[2])
        letter = phrases.letters(best.token, rows.shape[2])
        after = phrases.after[states.gather(1, parent), letter[..., None]]
        log_prob = beams.log_prob.masked_fill(phrases.are_incomplete(states), -torch.inf)
        endings = self._endings(candidates, candidates.log_prob, rows, log_prob)
        flags = torch.stack([tied, phrases.are_incomplete(after).any()])
        return Choice(best, after, endings, values.amax(), flags)

    def at_limit(self, choice: Choice) -> Extensions:
        """The open hypotheses with all phrases."""
        is_incomplete = self._states.are_incomplete(choice.extra)
        log_prob = choice.open.log_prob.masked_fill(is_incomplete, -torch.inf)
        return choice.open._replace(log_prob=log_prob)

    def _is_improbable(
        self, log_prob: Float[Tensor, "R X"], num_best: int
    ) -> Bool[Tensor, "R w best"]:
        """True for those of the first `num_best` candidates of each row that are neither the most
        probable of the row nor among the `_num_likely` most probable of the beam."""
        by_row = log_prob.view(len(log_prob), self.width, -1)[..., :num_best]
        count = min(self._num_likely, self.width * num_best)
        least = by_row.flatten(1).topk(count, dim=1).values[:, -1:, None]
        return by_row < torch.minimum(by_row.amax(dim=2, keepdim=True), least)

    def _allocate(
        self, key: Float[Tensor, "R X"], num_met: Int[Tensor, "R X"]
    ) -> Int[Tensor, "R w"]:
        """Indices of the candidates that stay open: the best of each bank, an equal number of
        each, then the best of the others; those with the most tokens of phrases first."""
        key, order = key.sort(dim=1, descending=True, stable=True)
        bank = num_met.gather(1, order).masked_fill_(key == -torch.inf, -1)
        bank, by_bank = bank.sort(dim=1, descending=True, stable=True)
        order = order.gather(1, by_bank)
        if self._quota:
            # A candidate exceeds the quota if the one `quota` before it is of the same bank.
            is_within = torch.ones_like(bank, dtype=torch.bool)
            is_within[:, self._quota :] = bank[:, self._quota :] != bank[:, : -self._quota]
            is_within &= bank >= 0
            order = order.gather(
                1, is_within.byte().sort(dim=1, descending=True, stable=True).indices
            )
        return order[:, : self.width]


class PhraseStates:
    """The progress of outputs in `F` phrases: one automaton for each phrase, as tensors.

    Phrase `f` has the states from `start[f]` to `end[f]`, `S` in all phrases. An output is in state
    `start[f] + n` if it ends in the first `n` tokens of the phrase and no more, and in `end[f]` if
    it contains the phrase (Knuth, Morris and Pratt 1977). Letters are the indices of tokens in
    `alphabet`, the `A` different tokens of the phrases; letter `A` is any EOS, letter `A + 1` any
    other token.
    """

    start: Int[Tensor, "F"]
    end: Int[Tensor, "F"]
    alphabet: Int[Tensor, "A"]
    after: Int[Tensor, "S letters"]  # the state after one more token

    def __init__(
        self, phrases: Sequence[tuple[int, ...]], eos_ids: Sequence[int], device: torch.device
    ) -> None:
        alphabet = sorted({token for phrase in phrases for token in phrase})
        start: list[int] = []
        after: list[list[int]] = []
        numbers: list[list[list[int]]] = []
        for phrase in phrases:
            start.append(len(after))
            for progress in range(len(phrase) + 1):
                next_tokens = () if progress == len(phrase) else (phrase[0], phrase[progress])
                moves = [_progress(phrase, progress, token) for token in [*alphabet, -1, -1]]
                after.append([start[-1] + number for number in moves])
                is_next = [token in next_tokens for token in alphabet]
                partial = [number * (number < len(phrase)) for number in moves]
                complete = [number * (number == len(phrase)) for number in moves]
                numbers.append([[*is_next, True, False], partial, complete])
        self.start = torch.tensor(start, device=device)
        self.end = torch.tensor([*start[1:], len(after)], device=device) - 1
        self.alphabet = torch.tensor(alphabet, device=device)
        self.after = torch.tensor(after, device=device)
        # For each state and letter: it is a next token or an EOS; the tokens of the phrase in the
        # output after it, if the phrase is incomplete then; the same if it is complete.
        self._numbers = torch.tensor(numbers, device=device)
        self._eos_ids = torch.tensor(eos_ids, device=device)
        self._letters: Tensor | None = None

    def letters(self, tokens: Int[Tensor, "*n"], vocab_size: int) -> Int[Tensor, "*n"]:
        """The letter of each token."""
        if self._letters is None:
            size = len(self.alphabet)
            self._letters = torch.full((vocab_size,), size + 1, device=tokens.device)
            self._letters[self.alphabet] = torch.arange(size, device=tokens.device)
            self._letters[self._eos_ids] = size
        return self._letters[tokens]

    def extensions(
        self, states: Int[Tensor, "R w F"]
    ) -> tuple[Bool[Tensor, "R w letters"], Int[Tensor, "R w letters"]]:
        """For each output and next letter: the letter is an EOS, or begins or extends an incomplete
        phrase; and the number of tokens of phrases after it: those of complete phrases, and of the
        incomplete phrase with the most."""
        numbers = self._numbers[states]
        is_next, most = numbers[..., :2, :].amax(dim=2).unbind(dim=2)
        return is_next > 0, numbers[..., 2, :].sum(dim=2) + most

    def are_incomplete(self, states: Int[Tensor, "R w F"]) -> Bool[Tensor, "R w"]:
        """True for outputs that lack a phrase."""
        return (states != self.end).any(dim=2)


def _progress(phrase: tuple[int, ...], progress: int, token: int) -> int:
    """The progress in a phrase after one more token (Knuth, Morris and Pratt 1977)."""
    if progress >= len(phrase):
        return len(phrase)
    ids = (*phrase[:progress], token)
    return next(n for n in range(len(ids), -1, -1) if ids[len(ids) - n :] == phrase[:n])
