"""Beam search on tensors of fixed shape; `heedful.generation.search.beam_search` documents it.

Each of `B` sentences has one beam of `w` hypotheses (one for each group in `DiverseBeamSearch` of
`heedful.generation.search`): `R` beams in all, whose `w` rows are adjacent. A hypothesis is open
until it ends, and a beam is open until its stop rule holds. The host reads from the device once a
step, or twice in a search for phrases (`heedful.generation.constrained`). Sentences without an open
beam leave the batch some at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from heedful.generation.hypotheses import BackPointers, BestFinished, Extensions, sum_dtype, top_k
from heedful.generation.outputs import Failure, Hypothesis, LengthScore
from heedful.generation.search_base import Search

Stop = Literal["optimal", "beam_full", "heuristic"]
Penalties = Callable[[], Float[Tensor, "N"]]
"""For each row of the last step, a number of at most 0 added to the scores of its endings."""
Observer = Callable[["Beams", Float[Tensor, "N V"], "StepChoice", "Beams"], None]
"""Called after each step: beams before it, log-probabilities, choice, beams after it."""


@dataclass(frozen=True)
class Beams:
    """The open hypotheses of each beam after `length` steps, and the best finished ones.

    Attributes:
        tokens: before the first step one row for each sentence, then `w` rows for each beam.
        log_prob: of the new tokens. A beam with fewer than `w` hypotheses repeats its first one,
            with a log-probability of -inf.
        extra: data of each hypothesis that a kind of search adds to these.
        parent: index of the hypothesis of the step before that each one extends.
        is_open: the beam is not done.
        best_open: reference (see `hypotheses.py`) to the first hypothesis of the last step in which
            the beam was open.
    """

    tokens: Int[Tensor, "N all"]
    log_prob: Float[Tensor, "R w"]
    extra: Shaped[Tensor, "R w ..."]
    parent: Int[Tensor, "R w"]
    is_open: Bool[Tensor, "R"]
    best_open: Int[Tensor, "R"]
    finished: BestFinished
    length: int = 0

    def select(self, beams: Int[Tensor, "M"]) -> "Beams":
        """These beams; after the first step."""
        return Beams(
            self.tokens.unflatten(0, self.parent.shape)[beams].flatten(0, 1),
            self.log_prob[beams],
            self.extra[beams],
            self.parent[beams],
            self.is_open[beams],
            self.best_open[beams],
            self.finished.select(beams),
            self.length,
        )


class StepChoice(NamedTuple):
    """The result of `BeamSearch.choose`: the hypotheses that stay open, and those that end.

    Attributes:
        open: the hypotheses that stay open, with `Beams.extra` of each.
        endings: hypotheses that end with the token; -inf is no ending.
        largest: the largest log-probability of a token.
        tied: True if a row has a tie that only an exact choice resolves.
    """

    open: Extensions
    extra: Shaped[Tensor, "R w ..."]
    endings: Extensions
    largest: Float[Tensor, ""]
    tied: Bool[Tensor, ""]


@dataclass
class BeamSearch(Search):
    """Beam search with `width` hypotheses for each beam, which keeps `capacity` finished ones.

    By the rule optimal a beam is done when none of the `capacity` finished ones can be beaten; the
    capacity is then the number of results.

    `choose`, `at_limit`, `failure_of` and `merge` are what other kinds of search override.
    """

    stop: Stop | str
    score: LengthScore
    width: int
    capacity: int
    penalties: Penalties | None = None
    num_groups: int = 1  # beams of each sentence
    observe: Observer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        device = self.request.start.device
        self._eos = torch.tensor(sorted(self.request.eos_ids), device=device)
        self._parents: dict[int, Tensor] = {}  # by the number of candidates of each row
        self._eos_candidates: tuple[Tensor, Tensor] | None = None  # parents and tokens (R, w * EOS)
        self._all_open = True  # before the present step
        self._first_rows = torch.zeros(0, 1, dtype=torch.long, device=device)  # of each beam
        self._num_best = self.width + len(self._eos)  # of each row, so that `width` do not end
        num_endings = self.width * (len(self._eos) if self.stop == "optimal" else 1)
        self._num_entries = self.width + num_endings

    def run(self) -> list[list[Hypothesis]]:
        """Decode until every sentence is done: the hypotheses of each, best first."""
        beams, history = self.init(), BackPointers(self._num_entries)
        results: dict[int, list[Hypothesis]] = {}  # by the index of the sentence
        is_open = [True] * len(beams.is_open)
        while self.sentences:
            beams, choice, is_open = self._step(beams, is_open)
            history.append(choice.open, choice.endings)
            sentences, firsts = self.sentences, range(0, len(is_open), self.num_groups)
            has_open = [any(is_open[first : first + self.num_groups]) for first in firsts]
            keep = self.drop_done(has_open)
            if keep is not None:
                left = [index for index, flag in enumerate(has_open) if not flag]
                done = torch.tensor(self._beams_of(left), device=beams.is_open.device)
                numbers = self._beams_of([sentences[index] for index in left])
                hypotheses = self._results(beams.select(done), history.select(done), numbers)
                for position, index in enumerate(left):
                    groups = hypotheses[position * self.num_groups :][: self.num_groups]
                    results[sentences[index]] = self.merge(groups)
                    if self.request.on_done is not None:
                        self.request.on_done(sentences[index], results[sentences[index]])
                remaining = self._beams_of(keep)
                indices = torch.tensor(remaining, dtype=torch.long, device=done.device)
                beams, history = beams.select(indices), history.select(indices)
                is_open = [is_open[beam] for beam in remaining]
            self._reorder_state(beams)
        return [results[sentence] for sentence in range(self.request.batch)]

    def merge(self, groups: list[list[Hypothesis]]) -> list[Hypothesis]:
        """The hypotheses of a sentence from those of its beams, best first."""
        [hypotheses] = groups
        return hypotheses

    def failure_of(self, ids: list[int]) -> Failure:
        """The failure of the best open prefix of a beam without results."""
        return "dead_end"

    def init(self) -> Beams:
        """Beams with one empty hypothesis each, and no other."""
        start = self.request.start
        size = (len(start) * self.num_groups, self.width)
        log_prob = torch.full(size, -torch.inf, dtype=sum_dtype(start.device), device=start.device)
        log_prob[:, 0] = 0
        parent = torch.zeros(size, dtype=torch.long, device=start.device)
        score = log_prob.new_full((size[0], self.capacity), -torch.inf)
        finished = BestFinished(score, torch.zeros_like(score, dtype=torch.long))
        is_open = torch.ones_like(parent[:, 0], dtype=torch.bool)
        best_open = torch.full_like(parent[:, 0], -self._num_entries)  # the empty hypothesis
        return Beams(start, log_prob, log_prob, parent, is_open, best_open, finished)

    # --- one step -------------------------------------------------------------------------------

    def _step(self, beams: Beams, is_open: list[bool]) -> tuple[Beams, StepChoice, list[bool]]:
        """The beams with one token more, and a flag for each: True if it is open.

        Ties are rare: only in a step with one is the choice repeated, exactly.
        """
        open_rows, self._all_open = None, all(is_open)
        if beams.length and not self._all_open:
            open_rows = [flag for flag in is_open for _ in range(self.width)]
        model_log_probs, log_probs = self.next_step(beams.tokens, beams.length, open_rows)
        for exact in (False, True):
            choice = self.choose(beams, self._by_beam(beams, log_probs), exact)
            after = self.advance(beams, choice)
            largest = choice.largest
            of_model = model_log_probs.amax() if self.rules.checks_model else largest
            numbers = torch.stack([of_model, largest]), choice.tied[None], after.is_open
            largest_of_model, largest_under_rules, tied, *flags = torch.cat(numbers).tolist()
            if self.stop == "optimal":
                self.rules.check_rankable(largest_of_model, largest_under_rules, after.length)
            else:
                self.rules.check_not_nan(largest_of_model, largest_under_rules, after.length)
            if not tied:
                break
        if self.observe is not None:
            self.observe(beams, log_probs, choice, after)
        return after, choice, [flag > 0 for flag in flags]

    def choose(self, beams: Beams, rows: Float[Tensor, "R w V"], exact: bool) -> StepChoice:
        """The best extensions of each beam, given the log-probabilities of all next tokens.

        Args:
            exact: of equal tokens the one of the lowest id is chosen; otherwise ties are reported.
        """
        return self._choose_best(rows, beams.log_prob, exact)

    def _choose_best(
        self, rows: Float[Tensor, "R w V"], log_prob: Float[Tensor, "R w"], exact: bool
    ) -> StepChoice:
        """The extensions of highest log-probability."""
        values, tokens, tied = top_k(rows.flatten(0, 1), self._num_best, exact=exact)
        candidates = self._candidates(log_prob, tokens, values)
        best, key = self._best_open(candidates, candidates.log_prob)
        endings = self._endings(candidates, candidates.log_prob, rows, log_prob)
        return StepChoice(best, key, endings, values.amax(), tied)

    def advance(self, beams: Beams, choice: StepChoice) -> Beams:
        """The beams with the chosen tokens; endings are kept, and beams that are done close."""
        length, extended = beams.length + 1, choice.open
        limits = self._per_beam(self.request.max_new_tokens)
        finished = self._add_finished(beams, choice.endings, self.width)
        is_open = beams.is_open & (extended.log_prob[:, 0] > -torch.inf)
        best_open = beams.best_open.masked_fill(is_open, beams.length * self._num_entries)
        if length in limits:
            is_last = torch.tensor([limit == length for limit in limits], device=is_open.device)
            cut = self.at_limit(choice)
            cut = cut._replace(log_prob=cut.log_prob.masked_fill(~is_last[:, None], -torch.inf))
            finished = self._add_finished(replace(beams, finished=finished), cut, 0)
            is_open = is_open & ~is_last
        is_open = is_open & self._can_improve(finished, extended.log_prob, length, limits)
        tokens = self._all_rows(beams, beams.tokens)
        if len(self._first_rows) != len(is_open):
            self._first_rows = torch.arange(0, len(tokens), self.width, device=tokens.device)[
                :, None
            ]
        rows = (extended.parent + self._first_rows).flatten()
        tokens = torch.cat([tokens.index_select(0, rows), extended.token.view(-1, 1)], dim=1)
        log_prob, parent = extended.log_prob, extended.parent
        return Beams(tokens, log_prob, choice.extra, parent, is_open, best_open, finished, length)

    def at_limit(self, choice: StepChoice) -> Extensions:
        """The open hypotheses that may be results when they have reached the length limit."""
        return choice.open

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
        token_log_probs: Float[Tensor, "N k"],
    ) -> Extensions:
        """Every hypothesis extended by each of the `k` tokens of its row."""
        num_beams, width = log_prob.shape
        by_row = token_log_probs.to(log_prob.dtype).view(num_beams, width, -1)
        total = (by_row + log_prob[..., None]).flatten(1)
        token = tokens.reshape(num_beams, -1)
        parent = self._parents_of(tokens.shape[1]).expand(num_beams, -1)
        return Extensions(parent, token, by_row.flatten(1), total)

    def _parents_of(self, count: int) -> Int[Tensor, "X"]:
        """The row of each candidate of a beam with `count` candidates for each row."""
        if count not in self._parents:
            rows = torch.arange(self.width, device=self._eos.device)
            self._parents[count] = rows.repeat_interleave(count)
        return self._parents[count]

    def _best_open(
        self, candidates: Extensions, keys: Float[Tensor, "R X"]
    ) -> tuple[Extensions, Float[Tensor, "R w"]]:
        """The `width` candidates of the highest keys among those that do not end, and the keys."""
        keys = keys.masked_fill(self._is_eos(candidates.token), -torch.inf)
        key, indices = keys.sort(dim=1, descending=True, stable=True)
        key, indices = key[:, : self.width], indices[:, : self.width]
        is_missing = key == -torch.inf  # there the first one again, with a log-probability of -inf
        best = candidates.take(torch.where(is_missing, indices[:, :1], indices))
        best = best._replace(log_prob=best.log_prob.masked_fill(is_missing, -torch.inf))
        return best, key

    def _endings(
        self,
        candidates: Extensions,
        keys: Float[Tensor, "R X"],
        rows: Float[Tensor, "R w V"],
        log_prob: Float[Tensor, "R w"],
    ) -> Extensions:
        """Hypotheses that end in this step; others have a log-probability of -inf.

        With the stop rule `optimal` each hypothesis ends with each EOS; with the others, those of
        the `width` candidates of the highest keys end whose token is an EOS.
        """
        if self.stop == "optimal":
            return self._all_endings(rows, log_prob)
        best = keys.sort(dim=1, descending=True, stable=True).indices[:, : self.width]
        endings = candidates.take(best)
        is_eos = self._is_eos(endings.token)
        return endings._replace(log_prob=endings.log_prob.masked_fill(~is_eos, -torch.inf))

    def _all_endings(
        self, rows: Float[Tensor, "R w V"], log_prob: Float[Tensor, "R w"]
    ) -> Extensions:
        """Each hypothesis extended by each EOS."""
        if self._eos_candidates is None or len(self._eos_candidates[0]) != len(rows):
            parent, token = self._parents_of(len(self._eos)), self._eos.repeat(self.width)
            self._eos_candidates = parent.expand(len(rows), -1), token.expand(len(rows), -1)
        values = rows.index_select(2, self._eos).to(log_prob.dtype)
        total = (values + log_prob[..., None]).flatten(1)
        return Extensions(*self._eos_candidates, values.flatten(1), total)

    def _is_eos(self, tokens: Int[Tensor, "R X"]) -> Bool[Tensor, "R X"]:
        return tokens == self._eos if len(self._eos) == 1 else torch.isin(tokens, self._eos)

    def _add_finished(self, beams: Beams, endings: Extensions, first_entry: int) -> BestFinished:
        """The best finished hypotheses with these endings of beams that are open.

        Args:
            first_entry: index of the first ending among the entries of the step.
        """
        length = beams.length + 1
        scores = self.score(endings.log_prob, length)
        if self.penalties is not None:
            penalties = self._by_beam(beams, self.penalties().to(scores.dtype))
            scores = scores + penalties.gather(1, endings.parent)
        if not self._all_open:
            scores = scores.masked_fill(~beams.is_open[:, None], -torch.inf)
        first_ref = beams.length * self._num_entries + first_entry
        return beams.finished.add(scores, first_ref, keep_earlier=self.stop == "beam_full")

    def _can_improve(
        self,
        finished: BestFinished,
        log_prob: Float[Tensor, "R w"],
        length: int,
        limits: list[int],
    ) -> Bool[Tensor, "R"]:
        """Beams that are not done by the stop rule.

        For `optimal` this compares with an upper bound of the scores that open hypotheses can
        reach: no further token raises a log-probability, and for a fixed one the score is monotone
        in the length, so that the bound is the score at the shortest or at the longest length.
        Penalties, which only lower a score, are left out of it.
        """
        worst = finished.score[:, -1]  # -inf while there are free entries
        if self.stop == "beam_full":
            return worst == -torch.inf
        best_open = log_prob.amax(dim=1)
        if self.stop == "heuristic":
            return self.score(best_open, length) > worst
        minima = self._per_beam(self.request.min_new_tokens)
        shortest = [max(minimum, length + 1) for minimum in minima]
        at_shortest = best_open / self._divisors(shortest, best_open)
        return torch.maximum(at_shortest, best_open / self._divisors(limits, best_open)) > worst

    def _per_beam(self, numbers: list[int]) -> list[int]:
        """A number of each sentence of the request, for each beam of the batch."""
        return [numbers[sentence] for sentence in self.sentences for _ in range(self.num_groups)]

    def _divisors(self, lengths: list[int], like: Tensor) -> float | Float[Tensor, "R"]:
        """The score's divisor for each beam, or one number if all are equal."""
        numbers = [self.score.divisor(length) for length in lengths]
        return numbers[0] if len(set(numbers)) == 1 else like.new_tensor(numbers)

    def _reorder_state(self, beams: Beams) -> None:
        """Reorder the rows of the state as the last step reordered the hypotheses."""
        if self.state is None or not self.sentences or self.width * self.num_groups == 1:
            return
        parents = beams.parent
        if self.num_groups > 1:
            first = torch.arange(self.num_groups, device=parents.device) * self.width
            parents = parents.view(len(self.sentences), self.num_groups, self.width)
            parents = (parents + first[:, None]).flatten(1)
        self.state.reorder(parents if beams.length > 1 else torch.zeros_like(parents))

    # --- the result -----------------------------------------------------------------------------

    def _beams_of(self, sentences: list[int]) -> list[int]:
        """The indices of the beams of these sentences."""
        size = self.num_groups
        return [beam for s in sentences for beam in range(s * size, (s + 1) * size)]

    def _results(
        self, beams: Beams, history: BackPointers, numbers: list[int]
    ) -> list[list[Hypothesis]]:
        """The finished hypotheses of each beam, best first; without any, its best open prefix.

        Args:
            numbers: the index of each beam in the request.
        """
        scores, refs = beams.finished.score.tolist(), beams.finished.ref.tolist()
        ranked: list[list[tuple[float, int]]] = []
        for beam, best_open in enumerate(beams.best_open.tolist()):
            pairs = [p for p in zip(scores[beam], refs[beam], strict=True) if p[0] > -torch.inf]
            ranked.append(sorted(pairs, key=lambda pair: -pair[0]) or [(-torch.inf, best_open)])
        paths = history.paths([[ref for _, ref in pairs] for pairs in ranked])
        results = []
        for pairs, beam_paths, number in zip(ranked, paths, numbers, strict=True):
            last_step = self.request.max_new_tokens[number // self.num_groups] - 1
            hypotheses = []
            for (score, ref), path in zip(pairs, beam_paths, strict=True):
                step, entry = divmod(ref, self._num_entries)
                is_forced = self.request.force_eos and step == last_step
                failure = self.failure_of(path[0]) if score == -torch.inf else None
                finished = entry >= self.width and not is_forced
                hypothesis = self.score.hypothesis(*path, finished, failure)
                if self.penalties is not None and score > -torch.inf:
                    hypothesis = replace(hypothesis, score=score)
                hypotheses.append(hypothesis)
            results.append(hypotheses)
        return results
