"""Beam search for outputs that hold some phrases, wherever they stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.hypotheses import Hypothesis, LengthScore, Normalization
from heedful.generation.request import Search, Starts, read_request
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
    for phrase in phrases:
        if not phrase or len(phrase) >= min(request.longest, default=1):
            raise UserError(
                f"a required phrase has {len(phrase)} tokens, but an output may have "
                f"{min(request.longest)} with its end; leave it out, or allow more"
            )
        if set(phrase) & set(request.eos_ids):
            raise UserError("a required phrase holds an end of text, after which nothing comes")
    score = LengthScore(normalization, length_penalty)
    search = _Constrained(next_log_probs, state, request, phrases, beam_size, num_return, score)
    with torch.no_grad():
        return search.run()


@dataclass
class _Constrained(Search):
    phrases: Phrases
    width: int
    num_return: int
    score: LengthScore

    def run(self) -> list[list[Hypothesis]]:
        """Go on until every sentence is done."""
        sentences = list(range(self.request.batch))
        beams = [_Beam([_Prefix()], []) for _ in sentences]
        tokens, length = self.request.start, 0
        while True:
            _, ruled = self.step(tokens, length, sentences)
            length += 1
            for sentence, (beam, rows) in enumerate(
                zip(beams, ruled.view(len(beams), -1, ruled.size(1)), strict=True)
            ):
                if beam.open:
                    self._advance(beam, rows, length, self.request.longest[sentence])
            if not any(beam.open for beam in beams):
                return [beam.kept[: self.num_return] for beam in beams]
            size = tokens.size(0) // len(beams)
            parents = torch.tensor([self._rows(beam) for beam in beams], device=tokens.device)
            first = torch.arange(0, tokens.size(0), size, device=tokens.device)[:, None]
            last = [[p.ids[-1] for p in self._filled(beam)] for beam in beams]
            new = torch.tensor(last, device=tokens.device).flatten()[:, None]
            tokens = torch.cat([tokens[(parents + first).flatten()], new], dim=1)
            if self.state is not None and self.width > 1:
                self.state.follow(parents)

    def _filled(self, beam: _Beam) -> list[_Prefix]:
        """As many as the beam is wide: the first again where there are too few."""
        found = beam.open or [_Prefix((self.request.eos_ids[0],))]
        return found + found[:1] * (self.width - len(found))

    def _rows(self, beam: _Beam) -> list[int]:
        return [prefix.row for prefix in self._filled(beam)]

    def _advance(self, beam: _Beam, rows: Float[Tensor, "W V"], length: int, longest: int) -> None:
        """One token more: endings are kept, the others share the beam."""
        open_, banks = [], {}  # type: ignore[var-annotated]
        for prefix, part in self._candidates(beam.open, rows[: len(beam.open)]):
            met, is_whole = self._met(prefix.ids)
            ends = prefix.ids[-1] in self.request.eos_ids
            if is_whole and (ends or length == longest):
                beam.kept.append(self.score.hypothesis([*prefix.ids], [*part], ends))
            elif not ends:
                banks.setdefault(met, []).append(prefix)
        beam.kept.sort(key=lambda found: -found.score)
        del beam.kept[max(self.num_return, 1) :]
        open_ = self._shared(banks)
        if not beam.kept and (length == longest or not open_):
            best = open_[0] if open_ else max(beam.open, key=lambda each: each.total)
            beam.kept.append(self.score.hypothesis([*best.ids], [*best.parts], False))
        beam.open = [] if length == longest or self._is_done(beam, open_, longest) else open_

    def _candidates(
        self, prefixes: list[_Prefix], rows: Float[Tensor, "W V"]
    ) -> list[tuple[_Prefix, tuple[float, ...]]]:
        """The likeliest prefixes of one token more, the likeliest of each row, and what the phrases
        want next, the best first."""
        totals = torch.tensor([p.total for p in prefixes], dtype=sum_dtype(rows.device))
        sums = totals.to(rows.device)[:, None] + rows
        flat = top_k(sums.flatten()[None], min(2 * self.width, sums.numel()))[1][0].tolist()
        places = {divmod(place, rows.size(1)) for place in flat}
        places |= set(enumerate(sums.argmax(1).tolist()))
        places |= {(n, t) for n, p in enumerate(prefixes) for t in self._wanted(p.ids)}
        ordered = sorted(places)
        values = rows[[n for n, _ in ordered], [t for _, t in ordered]].tolist()
        found = []
        for (row, token), value in zip(ordered, values, strict=True):
            if value == -torch.inf:
                continue
            old = prefixes[row]
            parts = (*old.parts, value)
            found.append((_Prefix((*old.ids, token), parts, old.total + value, row), parts))
        return sorted(found, key=lambda each: -each[0].total)

    def _shared(self, banks: dict[int, list[_Prefix]]) -> list[_Prefix]:
        """An equal part of the beam for each number of met tokens; what is left over goes to those
        with the most. Those come first."""
        total = sum(map(len, self.phrases))
        quota = self.width // (total + 1)
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

    def _met(self, ids: tuple[int, ...]) -> tuple[int, bool]:
        """How many tokens of the phrases are there, and whether all are."""
        unmet = [phrase for phrase in self.phrases if not _holds(ids, tuple(phrase))]
        begun = max((_begun(ids, tuple(phrase)) for phrase in unmet), default=0)
        missing = sum(map(len, unmet))
        return sum(map(len, self.phrases)) - missing + begun, not unmet

    def _wanted(self, ids: tuple[int, ...]) -> set[int]:
        """Tokens that begin a phrase which is not there, or go on with it."""
        unmet = [tuple(phrase) for phrase in self.phrases if not _holds(ids, tuple(phrase))]
        return {phrase[place] for phrase in unmet for place in (0, _begun(ids, phrase))}


def _holds(ids: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    size = len(phrase)
    return any(ids[place : place + size] == phrase for place in range(len(ids) - size + 1))


def _begun(ids: tuple[int, ...], phrase: tuple[int, ...]) -> int:
    """Tokens at the end that the phrase begins with, as many as there are."""
    sizes = range(min(len(ids), len(phrase) - 1), 0, -1)
    return next((size for size in sizes if ids[-size:] == phrase[:size]), 0)
