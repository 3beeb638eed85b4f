"""Beam search for outputs that hold some phrases, wherever they stand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.decoding import Search
from heedful.generation.hypotheses import Hypothesis, LengthScore, Normalization
from heedful.generation.request import Starts, read_request
from heedful.generation.state import NextLogProbs, State, sum_dtype
from heedful.generation.topk import top_k

Phrases = Sequence[Sequence[int]]


class _Prefix(NamedTuple):
    """New tokens with their log-probabilities, and the row that they go on from."""

    ids: tuple[int, ...] = ()
    parts: tuple[float, ...] = ()
    total: float = 0.0
    row: int = 0


@dataclass
class _Beam:
    """What a sentence has open, and the best that it found."""

    open: list[_Prefix]
    kept: list[Hypothesis]


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

    Dynamic beam allocation (Post and Vilar 2018, sec. 3): the beam is divided among those that
    have equally many tokens of the phrases, and each step tries, beside the likeliest tokens, those
    that the phrases want next. Nothing ends before it holds all. The search ends when nothing open
    can beat what it found, as under `optimal`; with a beam as large as the space the result is the
    true optimum. Where nothing with all phrases is found, the best prefix with the most of their
    tokens is returned, not finished.

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
    wanted = [tuple(phrase) for phrase in phrases]
    search = _Constrained(next_log_probs, state, request, wanted, beam_size, num_return, score)
    with torch.no_grad():
        return search.run()


@dataclass
class _Constrained(Search):
    phrases: list[tuple[int, ...]]
    width: int
    num_return: int
    score: LengthScore

    def run(self) -> list[list[Hypothesis]]:
        """Decode until every sentence is done; sentences that are done leave the batch."""
        beams = [_Beam([_Prefix()], []) for _ in self.sentences]
        tokens, length = self.request.start, 0
        while self.sentences:
            given, ruled = self.next_step(tokens, length)
            length += 1
            self.step.check_rankable(given.max().item(), ruled.max().item(), length)
            by_sentence = ruled.view(len(self.sentences), -1, ruled.size(1))
            for sentence, rows in zip(self.sentences, by_sentence, strict=True):
                self._advance(beams[sentence], rows, length, self.request.longest[sentence])
            tokens = tokens.unflatten(0, (len(self.sentences), -1))
            keep = self.drop_done([bool(beams[s].open) for s in self.sentences], at_once=True)
            tokens = tokens if keep is None else tokens[keep]
            if self.sentences:
                open_ = [self._filled(beams[sentence].open) for sentence in self.sentences]
                tokens = self._extended(tokens, open_)
        return [beam.kept[: self.num_return] for beam in beams]

    def _extended(
        self, tokens: Int[Tensor, "B W all"], prefixes: list[list[_Prefix]]
    ) -> Int[Tensor, "N more"]:
        """The rows of the next step; the state follows."""
        moves = [[(prefix.row, prefix.ids[-1]) for prefix in beam] for beam in prefixes]
        parents, new = torch.tensor(moves, device=tokens.device).unbind(2)
        if self.state is not None and self.width > 1:
            self.state.follow(parents)
        tokens = tokens.take_along_dim(parents[..., None], 1)
        return torch.cat([tokens, new[..., None]], dim=2).flatten(0, 1)

    def _filled(self, open_: list[_Prefix]) -> list[_Prefix]:
        """`width` prefixes: the first one repeated where there are too few."""
        return open_ + open_[:1] * (self.width - len(open_))

    def _advance(self, beam: _Beam, rows: Float[Tensor, "W V"], length: int, longest: int) -> None:
        """Extend by one token: complete endings are kept, the other prefixes share the beam."""
        banks: dict[int, list[_Prefix]] = {}  # by the number of phrase tokens in the prefix
        for prefix in self._candidates(beam.open, rows[: len(beam.open)]):
            unmet = self._unmet(prefix.ids)
            ends = prefix.ids[-1] in self.request.eos_ids
            if not unmet and (ends or length == longest):
                forced = self.request.force_eos and length == longest
                finished = ends and not forced
                beam.kept.append(self.score.hypothesis([*prefix.ids], [*prefix.parts], finished))
            elif not ends:
                begun = max((count for _, count in unmet), default=0)
                met = self._total - sum(len(phrase) for phrase, _ in unmet) + begun
                banks.setdefault(met, []).append(prefix)
        beam.kept.sort(key=lambda found: -found.score)
        del beam.kept[max(self.num_return, 1) :]
        open_ = self._shared(banks)
        if not beam.kept and (length == longest or not open_):
            best = (open_ or beam.open)[0]
            beam.kept.append(self.score.hypothesis([*best.ids], [*best.parts], False))
        beam.open = [] if length == longest or self._is_done(beam, open_, longest) else open_

    def _candidates(self, prefixes: list[_Prefix], rows: Float[Tensor, "W V"]) -> list[_Prefix]:
        """The likeliest prefixes of one token more, the likeliest of each row, and what the phrases
        want next, the best first."""
        totals = torch.tensor([p.total for p in prefixes], dtype=sum_dtype(rows.device))
        sums = totals.to(rows.device)[:, None] + rows
        count = self.width * (1 + len(self.request.eos_ids))  # so that `width` do not end
        flat = top_k(sums.flatten()[None], min(count, sums.numel()))[1][0].tolist()
        places = {divmod(place, rows.size(1)) for place in flat}
        places |= set(enumerate(sums.argmax(1).tolist()))
        for row, prefix in enumerate(prefixes):
            for phrase, begun in self._unmet(prefix.ids):
                places |= {(row, phrase[0]), (row, phrase[begun])}
        ordered = sorted(places)
        values = rows[[n for n, _ in ordered], [t for _, t in ordered]].tolist()
        found = []
        for (row, token), value in zip(ordered, values, strict=True):
            if value != -torch.inf:
                ids, parts, total, _ = prefixes[row]
                found.append(_Prefix((*ids, token), (*parts, value), total + value, row))
        return sorted(found, key=lambda each: -each.total)

    def _shared(self, banks: dict[int, list[_Prefix]]) -> list[_Prefix]:
        """An equal part of the beam for each number of met tokens; what is left over goes to those
        with the most. Those come first."""
        quota = self.width // (self._total + 1)
        order = sorted(banks, reverse=True)
        chosen = [prefix for met in order for prefix in banks[met][:quota]]
        rest = [prefix for met in order for prefix in banks[met][quota:]]
        return chosen + rest[: self.width - len(chosen)]

    def _is_done(self, beam: _Beam, open_: list[_Prefix], longest: int) -> bool:
        """Whether nothing open can beat what is kept."""
        if len(beam.kept) < self.num_return or not open_:
            return not open_
        lengths = (len(open_[0].ids) + 1, longest)
        most = max(self.score.divisor(length) for length in lengths)
        return max(prefix.total for prefix in open_) / most <= beam.kept[-1].score

    @property
    def _total(self) -> int:
        """Tokens of all phrases."""
        return sum(map(len, self.phrases))

    def _unmet(self, ids: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """Phrases that are not there, and how many tokens at the end each begins with."""
        found = []
        for phrase in self.phrases:
            size = len(phrase)
            if not any(ids[at : at + size] == phrase for at in range(len(ids) - size + 1)):
                sizes = range(min(len(ids), size - 1), 0, -1)
                begun = next((n for n in sizes if ids[-n:] == phrase[:n]), 0)
                found.append((phrase, begun))
        return found
