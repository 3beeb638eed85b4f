"""Beam search on tensors of fixed shape, with the stop rules that `beam_search` describes.

Of `B` sentences each has one beam (in `heedful.generation.diverse` several) of `w` hypotheses: `R`
beams in all. The host looks once a step; sentences that are done leave when enough of them are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from heedful.generation.back_pointers import BackPointers, Extensions, Finished
from heedful.generation.decoding import Search
from heedful.generation.hypotheses import Hypothesis, LengthScore
from heedful.generation.state import sum_dtype
from heedful.generation.topk import top_k

Stop = Literal["optimal", "beam_full", "heuristic"]
Penalties = Callable[[], Float[Tensor, "N"]]
"""Of each row of the last step what is added to the score of what ends after it; 0 at most."""


@dataclass(frozen=True)
class Beams:
    """The open hypotheses of each beam, and the best that have finished.

    Attributes:
        tokens: one row for each sentence before the first step, then `w` for each beam.
        log_prob: -inf for a row that repeats the first one, where a beam has too few hypotheses.
        memory: what a kind of search keeps of each hypothesis; the plain one nothing of its own.
        parent: the row of the same beam in the step before that each row extends.
        best_open: reference to the first hypothesis of the last step that had one.
    """

    tokens: Int[Tensor, "N all"]
    log_prob: Float[Tensor, "R w"]
    memory: Shaped[Tensor, "R w ..."]
    parent: Int[Tensor, "R w"]
    is_open: Bool[Tensor, "R"]
    best_open: Int[Tensor, "R"]
    finished: Finished
    length: int = 0

    def select(self, beams: Int[Tensor, "M"]) -> "Beams":
        """Only these beams; after the first step."""
        return Beams(
            self.tokens.unflatten(0, self.parent.shape)[beams].flatten(0, 1),
            self.log_prob[beams],
            self.memory[beams],
            self.parent[beams],
            self.is_open[beams],
            self.best_open[beams],
            self.finished.select(beams),
            self.length,
        )


class Choice(NamedTuple):
    """One step of each beam: the hypotheses that stay open, with their memory, and those that end.

    `largest` is the largest value seen; `is_tied` says whether a row had a tie that only an exact
    choice puts in order.
    """

    is_open: Extensions
    memory: Shaped[Tensor, "R w ..."]
    ends: Extensions
    largest: Float[Tensor, ""]
    is_tied: Bool[Tensor, ""]


@dataclass
class BeamSearch(Search):
    """One beam search; each beam has `width` hypotheses and keeps `capacity` finished ones."""

    stop: Stop | str
    score: LengthScore
    width: int
    capacity: int
    penalties: Penalties | None = None
    num_groups: int = 1  # beams of a sentence

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eos = torch.tensor(sorted(self.request.eos_ids), device=self.request.start.device)
        self._parents: dict[int, Tensor] = {}  # by the number of candidates of each row
        self._first_rows: Tensor | None = None  # of the beams
        self._num_best = self.width + len(self._eos)  # of each row, so that `width` do not end
        num_ends = self.width * (len(self._eos) if self.stop == "optimal" else 1)
        self._num_places = self.width + num_ends

    def run(self) -> list[list[Hypothesis]]:
        """Decode until every sentence is done: the hypotheses of each, best first."""
        beams, history = self.init(), BackPointers(self._num_places)
        found: dict[int, list[Hypothesis]] = {}
        is_open = [True] * len(beams.is_open)
        while self.sentences:
            rows = [flag for flag in is_open for _ in range(self.width)]
            known = None if all(is_open) or not beams.length else rows
            beams, choice, is_open = self._next(beams, known)
            history.append(choice.is_open, choice.ends)
            before = self.sentences
            size = self.num_groups
            opened = [any(is_open[at : at + size]) for at in range(0, len(is_open), size)]
            keep = self.drop_done(opened)
            if keep is not None:
                left = [place for place, flag in enumerate(opened) if not flag]
                done = torch.tensor(self._numbers(left), device=beams.is_open.device)
                numbers = self._numbers([before[place] for place in left])
                results = self._results(beams.select(done), history.select(done), numbers)
                found |= dict(zip(numbers, results, strict=True))
                stay = self._numbers(keep)
                places = torch.tensor(stay, dtype=torch.long, device=done.device)
                beams, history = beams.select(places), history.select(places)
                is_open = [is_open[place] for place in stay]
            self._follow(beams)
        return [
            self.merge([found[number] for number in self._numbers([sentence])])
            for sentence in range(self.request.batch)
        ]

    def merge(self, groups: list[list[Hypothesis]]) -> list[Hypothesis]:
        """The hypotheses of a sentence from those of its beams, best first."""
        [hypotheses] = groups
        return hypotheses

    def init(self) -> Beams:
        """Beams whose first row is the start and whose other rows are empty."""
        start = self.request.start
        size = (len(start) * self.num_groups, self.width)
        log_prob = torch.full(size, -torch.inf, dtype=sum_dtype(start.device), device=start.device)
        log_prob[:, 0] = 0
        parent = torch.zeros(size, dtype=torch.long, device=start.device)
        score = log_prob.new_full((size[0], self.capacity), -torch.inf)
        finished = Finished(score, torch.zeros_like(score, dtype=torch.long))
        is_open = torch.ones_like(parent[:, 0], dtype=torch.bool)
        best_open = torch.full_like(parent[:, 0], -self._num_places)  # nothing
        return Beams(start, log_prob, log_prob, parent, is_open, best_open, finished)

    # --- one step -------------------------------------------------------------------------------

    def _next(self, beams: Beams, known: list[bool] | None) -> tuple[Beams, Choice, list[bool]]:
        """The beams with one token more, and which of them are open; the host looks once.

        Rows with a tie are rare, so the exact choice is made only where the first one met one.
        """
        given, ruled = self.next_step(beams.tokens, beams.length, known)
        for exact in (False, True):
            choice = self.choose(beams, self._by_beam(beams, ruled), exact)
            after = self.advance(beams, choice)
            largest = choice.largest
            of_given = given.amax() if self.step.checks_given else largest
            numbers = torch.stack([of_given, largest]), choice.is_tied[None], after.is_open
            first, second, tied, *is_open = torch.cat(numbers).tolist()
            self.step.check_rankable(first, second, after.length)
            if not tied:
                break
        return after, choice, [flag > 0 for flag in is_open]

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> Choice:
        """One step of each beam."""
        return self._choose_best(rows, beams.log_prob, exact)

    def _choose_best(
        self, rows: Float[Tensor, "R w V"], log_prob: Float[Tensor, "R w"], exact: bool
    ) -> Choice:
        """The extensions of highest log-probability."""
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_best, exact=exact)
        candidates = self._candidates(log_prob, tokens, values)
        is_open, key = self._best_open(candidates, candidates.log_prob)
        ends = self._ends(candidates, candidates.log_prob, rows, log_prob)
        return Choice(is_open, key, ends, values.amax(), tied)

    def advance(self, beams: Beams, choice: Choice) -> Beams:
        """The beams with the chosen tokens: what ends is kept, and beams that are done close."""
        length, extended = beams.length + 1, choice.is_open
        longest = [
            self.request.max_new_tokens[s] for s in self.sentences for _ in range(self.num_groups)
        ]
        finished = self._finished(beams, choice.ends, self.width)
        is_open = beams.is_open & (extended.log_prob[:, 0] > -torch.inf)
        best_open = beams.best_open.masked_fill(is_open, beams.length * self._num_places)
        if length in longest:
            at_limit = torch.tensor([limit == length for limit in longest], device=is_open.device)
            cut_off = self.cut_off(choice)
            log_prob = cut_off.log_prob.masked_fill(~at_limit[:, None], -torch.inf)
            cut_off = cut_off._replace(log_prob=log_prob)
            finished = self._finished(replace(beams, finished=finished), cut_off, 0)
            is_open = is_open & ~at_limit
        is_open = is_open & ~self._is_done(finished, extended.log_prob, length, longest)
        tokens = self._all_rows(beams, beams.tokens)
        if self._first_rows is None or len(self._first_rows) != len(beams.is_open):
            self._first_rows = torch.arange(0, len(tokens), self.width, device=tokens.device)[
                :, None
            ]
        rows = (extended.parent + self._first_rows).flatten()
        tokens = torch.cat([tokens.index_select(0, rows), extended.token.view(-1, 1)], dim=1)
        log_prob, parent = extended.log_prob, extended.parent
        return Beams(tokens, log_prob, choice.memory, parent, is_open, best_open, finished, length)

    def cut_off(self, choice: Choice) -> Extensions:
        """Open hypotheses that may be the result at the length limit."""
        return choice.is_open

    def _all_rows(self, beams: Beams, rows: Tensor) -> Shaped[Tensor, "N ..."]:
        """`w` rows for each beam, also in the first step, which has one row for each sentence."""
        copies = beams.log_prob.numel() // max(1, len(rows))
        return rows if copies == 1 else rows.repeat_interleave(copies, dim=0)

    def _by_beam(self, beams: Beams, rows: Tensor) -> Shaped[Tensor, "R w ..."]:
        """Rows (N, ...) as (R, w, ...)."""
        return self._all_rows(beams, rows).view(*beams.log_prob.shape, *rows.shape[1:])

    def _candidates(
        self,
        log_prob: Float[Tensor, "R w"],
        tokens: Int[Tensor, "N k"],
        parts: Float[Tensor, "N k"],
    ) -> Extensions:
        """Every hypothesis with each of the tokens of its row."""
        num_beams, width = log_prob.shape
        count = tokens.shape[1]
        if count not in self._parents:
            rows = torch.arange(width, device=tokens.device)
            self._parents[count] = rows.repeat_interleave(count)
        part = parts.to(log_prob.dtype).view(num_beams, width, -1)
        total = (part + log_prob[..., None]).flatten(1)
        token = tokens.reshape(num_beams, -1)
        parent = self._parents[count].expand(num_beams, -1)
        return Extensions(parent, token, part.flatten(1), total)

    def _best_open(
        self, candidates: Extensions, keys: Float[Tensor, "R X"]
    ) -> tuple[Extensions, Float[Tensor, "R w"]]:
        """The `width` best by key that do not end, with their keys."""
        best = keys.masked_fill(self._is_end(candidates.token), -torch.inf)
        key, places = best.sort(dim=1, descending=True, stable=True)
        key, places = key[:, : self.width], places[:, : self.width]
        return self._opened(candidates, key, places), key

    def _opened(
        self, candidates: Extensions, key: Float[Tensor, "R w"], places: Int[Tensor, "R w"]
    ) -> Extensions:
        """The candidates at some places; where the key is -inf the first one, with -inf."""
        is_empty = key == -torch.inf
        extended = candidates.take(torch.where(is_empty, places[:, :1], places))
        return extended._replace(log_prob=extended.log_prob.masked_fill(is_empty, -torch.inf))

    def _ends(
        self,
        candidates: Extensions,
        keys: Float[Tensor, "R X"],
        rows: Float[Tensor, "R w V"],
        log_prob: Float[Tensor, "R w"],
    ) -> Extensions:
        """What ends: under `optimal` each hypothesis with each EOS, else those that are among the
        `width` best candidates; others have -inf."""
        if self.stop == "optimal":
            parts = rows.index_select(2, self._eos).flatten(0, 1)
            return self._candidates(log_prob, self._eos.expand(len(parts), -1), parts)
        best = keys.sort(dim=1, descending=True, stable=True).indices[:, : self.width]
        ends = candidates.take(best)
        is_end = self._is_end(ends.token)
        return ends._replace(log_prob=ends.log_prob.masked_fill(~is_end, -torch.inf))

    def _is_end(self, tokens: Int[Tensor, "R X"]) -> Bool[Tensor, "R X"]:
        return tokens == self._eos if len(self._eos) == 1 else torch.isin(tokens, self._eos)

    def _finished(self, beams: Beams, ends: Extensions, place: int) -> Finished:
        """With hypotheses that end at the places from `place` on, where their beam is open."""
        length = beams.length + 1
        scores = self.score(ends.log_prob, length)
        if self.penalties is not None:
            of_rows = self._by_beam(beams, self.penalties().to(scores.dtype))
            scores = scores + of_rows.gather(1, ends.parent)
        scores = scores.masked_fill(~beams.is_open[:, None], -torch.inf)
        ref = beams.length * self._num_places + place
        return beams.finished.add(scores, ref, first_come=self.stop == "beam_full")

    def _is_done(
        self,
        finished: Finished,
        log_prob: Float[Tensor, "R w"],
        length: int,
        longest: list[int],
    ) -> Bool[Tensor, "R"]:
        """Which beams are done, by what has finished and the log-probabilities still open.

        No further token raises a log-probability, and for a fixed one the score is monotone in the
        length, so the best score still possible lies at the shortest or the longest length; what
        penalties take of it is not known yet.
        """
        worst = finished.score[:, -1]  # -inf where there is room
        if self.stop == "beam_full":
            return worst > -torch.inf
        best_open = log_prob.amax(dim=1)
        if self.stop == "heuristic":
            return self.score(best_open, length) <= worst
        least = [
            self.request.min_new_tokens[s] for s in self.sentences for _ in range(self.num_groups)
        ]
        shortest = [max(number, length + 1) for number in least]
        at_shortest = best_open / self._divisors(shortest, best_open)
        return torch.maximum(at_shortest, best_open / self._divisors(longest, best_open)) <= worst

    def _divisors(self, lengths: list[int], like: Tensor) -> float | Float[Tensor, "R"]:
        """The score's divisor for each beam, or the one of all."""
        numbers = [self.score.divisor(length) for length in lengths]
        return numbers[0] if len(set(numbers)) == 1 else like.new_tensor(numbers)

    def _follow(self, beams: Beams) -> None:
        """Move the rows of the state as those of the beams moved."""
        if self.state is None or not self.sentences or self.width * self.num_groups == 1:
            return
        parents = beams.parent
        if self.num_groups > 1:
            first = torch.arange(self.num_groups, device=parents.device) * self.width
            parents = parents.view(len(self.sentences), self.num_groups, self.width)
            parents = (parents + first[:, None]).flatten(1)
        self.state.reorder(parents if beams.length > 1 else torch.zeros_like(parents))

    # --- the result -----------------------------------------------------------------------------

    def _numbers(self, sentences: list[int]) -> list[int]:
        """The numbers of the beams of some sentences."""
        size = self.num_groups
        return [number for s in sentences for number in range(s * size, (s + 1) * size)]

    def _results(
        self, beams: Beams, history: BackPointers, numbers: list[int]
    ) -> list[list[Hypothesis]]:
        """The hypotheses found by some beams, best first; else the best open prefix of each."""
        on_host = history.on_host()
        scores, refs = beams.finished.score.tolist(), beams.finished.ref.tolist()
        prefixes = beams.best_open.tolist()
        results = []
        for beam, number in enumerate(numbers):
            pairs = zip(scores[beam], refs[beam], strict=True)
            found = sorted((p for p in pairs if p[0] > -torch.inf), key=lambda pair: -pair[0])
            last_step = self.request.max_new_tokens[number // self.num_groups] - 1
            hypotheses = []
            for score, ref in found or [(-torch.inf, prefixes[beam])]:
                step, place = divmod(ref, self._num_places)
                is_forced = self.request.force_eos and step == last_step
                path = history.path(on_host, beam, ref)
                made = self.score.hypothesis(*path, place >= self.width and not is_forced)
                has_penalty = self.penalties is not None and score > -torch.inf
                hypotheses.append(replace(made, score=score) if has_penalty else made)
            results.append(hypotheses)
        return results
