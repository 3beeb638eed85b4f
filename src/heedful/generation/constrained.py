"""Beam search for outputs that hold some phrases, wherever they stand."""

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
    """For each start up to `num_return` outputs that hold every phrase, best first.

    Dynamic beam allocation (Post and Vilar 2018, sec. 3), which divides one beam among the banks of
    grid beam search (Hokamp and Liu 2017): hypotheses with equally many tokens of the phrases form
    a bank, and each step tries, beside the likeliest tokens, those that the phrases want next.

    Nothing ends before it holds all. The search ends when nothing open can beat what it found, as
    under `optimal`; with a beam as large as the space the result is the true optimum. Where nothing
    with all phrases is found, the best prefix with the most of their tokens is returned, not
    finished.

    Args:
        phrases: ids of each; they may overlap in an output, and may be equal.
        start, state, options: as of `beam_search`.

    Raises:
        UserError: as `beam_search`; phrases that are empty or longer than an output may be.
    """
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    request = SearchRequest.from_options(start, **options)
    shortest_limit = min(request.max_new_tokens, default=math.inf)
    for phrase in phrases:
        if not phrase or len(phrase) >= shortest_limit:
            raise UserError(
                f"a required phrase has {len(phrase)} tokens, but an output may have "
                f"{shortest_limit} with its end; leave it out, or allow more"
            )
        if set(phrase) & set(request.eos_ids):
            raise UserError("a required phrase holds an end of text, after which nothing comes")
    score = LengthScore(normalization, length_penalty)
    arguments = next_log_probs, state, request, "optimal", score, beam_size, num_return
    wanted = [tuple(map(int, phrase)) for phrase in phrases]
    search = BeamSearch(*arguments)
    if wanted:
        search = ConstrainedBeamSearch(*arguments, phrases=wanted)
    with torch.no_grad():
        return search.run()


@dataclass
class ConstrainedBeamSearch(BeamSearch):
    """A beam search by the stop rule `optimal` in which no hypothesis ends before it holds all
    phrases.

    The memory of a hypothesis is a state for each of `F` phrases, see `PhraseStates`.
    """

    phrases: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.request.start.device
        self._states = PhraseStates(self.phrases, self.request.eos_ids, device)
        self._quota = self.width // (sum(map(len, self.phrases)) + 1)  # of each bank

    def init(self) -> Beams:
        """The beams of `BeamSearch.init` without any token of a phrase."""
        beams = super().init()
        return replace(beams, memory=self._states.start.expand(*beams.parent.shape, -1))

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """Divide the beam among the candidates by how many tokens of the phrases they have."""
        states, memory = self._states, beams.memory
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_best, exact=exact)
        num_best = tokens.shape[1]
        # The likeliest tokens of each row, then all tokens of the phrases.
        tokens = torch.cat([tokens, states.alphabet.expand(len(tokens), -1)], dim=1)
        parts = torch.cat([values, rows.index_select(2, states.alphabet).flatten(0, 1)], dim=1)
        candidates = self._candidates(beams.log_prob, tokens, parts)
        letter = states.letters(candidates.token, rows.shape[2])
        by_row = letter.view(*beams.log_prob.shape, -1)
        is_next, num_met = states.extensions(memory)
        is_excluded = self._is_unlikely(candidates.log_prob, num_best)
        is_excluded |= is_next.gather(2, by_row[..., :num_best])  # which are candidates already
        is_excluded = torch.cat([is_excluded, ~is_next[..., : len(states.alphabet)]], dim=2)
        key = candidates.log_prob.masked_fill(is_excluded.flatten(1), -torch.inf)
        places = self._allocate(key, num_met.gather(2, by_row).flatten(1))
        is_open = self._opened(candidates, key.gather(1, places), places)
        parent = is_open.parent[..., None].expand(-1, -1, memory.shape[2])
        after = states.after[memory.gather(1, parent), letter.gather(1, places)[..., None]]
        log_prob = beams.log_prob.masked_fill(states.are_incomplete(memory), -torch.inf)
        ends = self._ends(candidates, candidates.log_prob, rows, log_prob)
        return Choice(is_open, after, ends, values.amax(), tied)

    def cut_off(self, choice: Choice) -> Extensions:
        """Open hypotheses with all phrases."""
        is_incomplete = self._states.are_incomplete(choice.memory)
        log_prob = choice.is_open.log_prob.masked_fill(is_incomplete, -torch.inf)
        return choice.is_open._replace(log_prob=log_prob)

    def _is_unlikely(
        self, log_prob: Float[Tensor, "R X"], num_best: int
    ) -> Bool[Tensor, "R w best"]:
        """Which of the first `num_best` candidates of each row are neither among the likeliest of
        the beam (enough that `width` do not end) nor the likeliest of their row."""
        by_row = log_prob.view(len(log_prob), self.width, -1)[..., :num_best]
        count = min(self.width * (1 + len(self._eos)), self.width * num_best)
        least = by_row.flatten(1).topk(count, dim=1).values[:, -1:, None]
        return by_row < torch.minimum(by_row.amax(dim=2, keepdim=True), least)

    def _allocate(
        self, log_prob: Float[Tensor, "R X"], num_met: Int[Tensor, "R X"]
    ) -> Int[Tensor, "R w"]:
        """Places of the candidates that stay open: an equal part of the beam for each number of
        met tokens; the remainder goes to those with the most. Those come first."""
        log_prob, order = log_prob.sort(dim=1, descending=True, stable=True)
        bank = num_met.gather(1, order).masked_fill_(log_prob == -torch.inf, -1)
        bank, of_order = bank.sort(dim=1, descending=True, stable=True)
        order = order.gather(1, of_order)
        if self._quota:
            # A candidate is among the first of its bank unless the one `quota` before is in it.
            is_first = torch.ones_like(bank, dtype=torch.bool)
            is_first[:, self._quota :] = bank[:, self._quota :] != bank[:, : -self._quota]
            is_first &= bank >= 0
            chosen = is_first.byte().sort(dim=1, descending=True, stable=True).indices
            order = order.gather(1, chosen)
        return order[:, : self.width]


class PhraseStates:
    """How many tokens of each phrase an output has, as states of one automaton for each phrase.

    Phrase `f` has the states from `start[f]` to `end[f]`: state `start[f] + n` for outputs that end
    in the first `n` tokens of the phrase and no more, `end[f]` for outputs that hold the phrase
    (Knuth, Morris and Pratt 1977). There are `S` states in all. Letters are the indices of tokens
    in `alphabet`, the `A` tokens of the phrases; letter `A` is an EOS, `A + 1` any other token.
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
        # By state and letter: is it a next token or an EOS; tokens met of an incomplete phrase; of
        # a complete one.
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
        """Each output with one more letter: whether the letter is an EOS, or begins or extends an
        incomplete phrase; and how many tokens of phrases are met after it (all of complete phrases,
        the most of an incomplete one)."""
        numbers = self._numbers[states]
        is_next, most = numbers[..., :2, :].amax(dim=2).unbind(dim=2)
        return is_next > 0, numbers[..., 2, :].sum(dim=2) + most

    def are_incomplete(self, states: Int[Tensor, "R w F"]) -> Bool[Tensor, "R w"]:
        """Which outputs lack a phrase."""
        return (states != self.end).any(dim=2)


def _progress(phrase: tuple[int, ...], progress: int, token: int) -> int:
    """The progress in a phrase after one more token (Knuth, Morris and Pratt 1977)."""
    if progress >= len(phrase):
        return len(phrase)
    ids = (*phrase[:progress], token)
    return next(n for n in range(len(ids), -1, -1) if ids[len(ids) - n :] == phrase[:n])
