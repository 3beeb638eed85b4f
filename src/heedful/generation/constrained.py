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
from heedful.generation.request import Starts, read_request
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
    **asked: Any,
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
        start, state, asked: as of `beam_search`.

    Raises:
        UserError: as `beam_search`; phrases that are empty or longer than an output may be.
    """
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    request = read_request(start, **asked)
    shortest_limit = min(request.longest, default=math.inf)
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
    """A beam search by the stop rule `optimal` in which nothing ends before it holds all phrases.

    The memory of a hypothesis is its progress (F) in each of `F` phrases: the most first tokens of
    the phrase that it ends in, or all of them once it has held the phrase.
    """

    phrases: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.request.start.device
        alphabet = sorted({token for phrase in self.phrases for token in phrase})
        lengths = [len(phrase) for phrase in self.phrases]
        filled = [phrase + phrase[:1] * (max(lengths) + 1 - len(phrase)) for phrase in self.phrases]
        moves = [
            [[_progress(phrase, at, token) for token in [*alphabet, -1]] for at in range(len(row))]
            for phrase, row in zip(self.phrases, filled, strict=True)
        ]
        self._alphabet = torch.tensor(alphabet, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._followers = torch.tensor(filled, device=device)  # by phrase and progress
        self._moves = torch.tensor(moves, device=device)  # by phrase, progress and letter
        self._phrase = torch.arange(len(lengths), device=device)

    def init(self) -> Beams:
        """As `BeamSearch.init`, without progress."""
        beams = super().init()
        progress = beams.parent[..., None].expand(-1, -1, len(self.phrases))
        return replace(beams, memory=torch.zeros_like(progress))

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """Divide the beam among the candidates by how many tokens of the phrases they have."""
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_best, exact=exact)
        likeliest = self._likeliest(self._candidates(beams.log_prob, tokens, values))
        wanted = self._wanted(beams, rows, likeliest)
        candidates = Extensions(*(torch.cat(p, dim=1) for p in zip(likeliest, wanted, strict=True)))
        parents = beams.memory.take_along_dim(candidates.parent[..., None], dim=1)
        progress = self._moved(parents, candidates.token)
        key = candidates.log_prob.masked_fill(self._is_end(candidates.token), -torch.inf)
        places = self._shared(key, progress)
        is_open = self._opened(candidates, key.gather(1, places), places)
        ends = self._ends(candidates, candidates.log_prob, rows, beams.log_prob)
        lacks = ~self._is_complete(beams.memory).gather(1, ends.parent)
        return Choice(
            is_open,
            progress.take_along_dim(places[..., None], dim=1),
            ends._replace(log_prob=ends.log_prob.masked_fill(lacks, -torch.inf)),
            values.amax().to(key.dtype),
            tied,
        )

    def cut_off(self, choice: Choice) -> Extensions:
        """Open hypotheses with all phrases."""
        lacks = ~self._is_complete(choice.memory)
        log_prob = choice.is_open.log_prob.masked_fill(lacks, -torch.inf)
        return choice.is_open._replace(log_prob=log_prob)

    def _likeliest(self, candidates: Extensions) -> Extensions:
        """The likeliest of all, so many that `width` do not end, and of each row; others have
        -inf."""
        log_prob = candidates.log_prob
        by_row = log_prob.unflatten(1, (self.width, -1))
        count = self.width * (1 + len(self._eos))
        best = log_prob.sort(dim=1, descending=True, stable=True).indices[:, :count]
        is_best = torch.zeros_like(log_prob, dtype=torch.bool).scatter(1, best, True)
        of_row = by_row.argmax(dim=2, keepdim=True)
        is_best = is_best.view_as(by_row).scatter(2, of_row, True).flatten(1)
        return candidates._replace(log_prob=log_prob.masked_fill(~is_best, -torch.inf))

    def _wanted(self, beams: Beams, rows: Float[Tensor, "R w V"], known: Extensions) -> Extensions:
        """Each hypothesis with the next and with the first token of each phrase that it lacks;
        -inf where the token is wanted twice or known already."""
        lacks = beams.memory < self._lengths
        first = self._followers[:, 0].expand_as(beams.memory)
        tokens = torch.cat([self._followers[self._phrase, beams.memory], first], dim=2)
        is_known = (known.log_prob > -torch.inf).unflatten(1, (self.width, -1))
        taken = known.token.view_as(is_known).masked_fill(~is_known, -1)
        is_known = (tokens[..., None] == taken[:, :, None]).any(3)
        open_tokens = tokens.masked_fill(~torch.cat([lacks, lacks], dim=2), -2)
        is_known |= (open_tokens[..., None] == open_tokens[:, :, None]).tril(-1).any(3)
        is_known |= open_tokens < 0
        parts = rows.gather(2, tokens).masked_fill(is_known, -torch.inf)
        return self._candidates(beams.log_prob, tokens.flatten(0, 1), parts.flatten(0, 1))

    def _shared(
        self, log_prob: Float[Tensor, "R X"], progress: Int[Tensor, "R X F"]
    ) -> Int[Tensor, "R w"]:
        """Places of the candidates that stay open: an equal part of the beam for each number of
        met tokens; what is left over goes to those with the most. Those come first."""
        lacks = progress < self._lengths
        met = (self._lengths * ~lacks).sum(dim=2) + (progress * lacks).amax(dim=2)
        bank = met.masked_fill(log_prob == -torch.inf, -1)
        order = log_prob.sort(dim=1, descending=True, stable=True).indices
        bank, of_order = bank.gather(1, order).sort(dim=1, descending=True, stable=True)
        order = order.gather(1, of_order)
        place = torch.arange(bank.shape[1], device=bank.device).expand_as(bank)
        is_new = bank != bank.roll(1, dims=1)
        begin = (place * is_new).cummax(dim=1).values
        quota = self.width // (sum(map(len, self.phrases)) + 1)
        is_first = (place - begin < quota) & (bank >= 0)
        chosen = is_first.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        return order.gather(1, chosen[:, : self.width])

    def _moved(
        self, progress: Int[Tensor, "R X F"], token: Int[Tensor, "R X"]
    ) -> Int[Tensor, "R X F"]:
        """The progress after one more token."""
        size = len(self._alphabet)
        letter = torch.searchsorted(self._alphabet, token).clamp(max=size - 1)
        letter = letter.masked_fill(self._alphabet[letter] != token, size)
        return self._moves[self._phrase, progress, letter[..., None]]

    def _is_complete(self, progress: Int[Tensor, "R X F"]) -> Bool[Tensor, "R X"]:
        return (progress == self._lengths).all(dim=2)


def _progress(phrase: tuple[int, ...], progress: int, token: int) -> int:
    """The progress in a phrase after one more token (Knuth, Morris and Pratt 1977)."""
    if progress >= len(phrase):
        return len(phrase)
    ids = (*phrase[:progress], token)
    return next(n for n in range(len(ids), -1, -1) if ids[len(ids) - n :] == phrase[:n])
