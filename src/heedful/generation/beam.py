"""Beam search on tensors of fixed shape: `init`, `advance` and `result`, plain or in groups.

Of `B` sentences each has `G` groups (one in a plain search) of `w` hypotheses, its rows adjacent.
The host looks once a step, and sentences that are done leave when enough of them are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.generation.decoding import Search
from heedful.generation.hypotheses import Hypothesis, LengthScore
from heedful.generation.state import sum_dtype
from heedful.generation.topk import top_k

Stop = Literal["optimal", "beam_full", "heuristic"]
Penalties = Callable[[], Float[Tensor, "N"]]
"""Of each row of the last step what is added to the score of what ends after it; 0 at most."""


@dataclass(frozen=True)
class Beams:
    """What each sentence has open, and the best that it found.

    `key` is what a hypothesis is ranked by: its log-probability, less what it was charged for
    likeness. A row that repeats the first of its group, for want of another, has both at -inf.
    `kept_ref` says where a kept hypothesis was found: step times the places of a step, plus place.
    """

    sentences: list[int]
    tokens: Int[Tensor, "N all"]
    log_prob: Float[Tensor, "B G w"]
    key: Float[Tensor, "B G w"]
    is_open: Bool[Tensor, "B G"]
    kept_score: Float[Tensor, "B G K"]
    kept_ref: Int[Tensor, "B G K"]
    length: int = 0

    def select(self, places: Int[Tensor, "M"]) -> "Beams":
        """Only these sentences."""
        rows = self.tokens.view(len(self.sentences), -1, self.tokens.shape[1])
        names = ("log_prob", "key", "is_open", "kept_score", "kept_ref")
        return replace(
            self,
            sentences=[self.sentences[place] for place in places.tolist()],
            tokens=rows[places].flatten(0, 1),
            **{name: getattr(self, name)[places] for name in names},
        )


class Choice(NamedTuple):
    """Tokens that some rows of a group go on, or end, with; `row` counts within the group."""

    row: Int[Tensor, "... X"]
    token: Int[Tensor, "... X"]
    part: Float[Tensor, "... X"]
    log_prob: Float[Tensor, "... X"]
    key: Float[Tensor, "... X"]


@dataclass(frozen=True)
class Step:
    """What one step chose, for the result: how its sentences went on, and what endings it met.

    `onward.row` counts within the sentence.
    """

    sentences: list[int]
    onward: Choice
    endings: Choice

    @cached_property
    def on_host(self) -> dict[int, tuple[Any, Any]]:
        """Of each sentence what goes on, and the endings: rows, tokens and log-probabilities."""
        onward, endings = (
            zip(*(of.tolist() for of in choice[:3]), strict=True)
            for choice in (self.onward, self.endings)
        )
        return dict(zip(self.sentences, zip(onward, endings, strict=True), strict=True))


@dataclass
class BeamSearch(Search):
    """One beam search by one of the stop rules that `beam_search` describes.

    Each group has `width` hypotheses, and keeps the `capacity` best of those that it finds, under
    `beam_full` the first.
    """

    stop: Stop | str
    score: LengthScore
    capacity: int
    width: int
    num_groups: int = 1
    diversity_penalty: float = 0.0
    penalties: Penalties | None = None

    def run(self) -> list[list[list[Hypothesis]]]:
        """Go on until every sentence is done: what each group of each kept, best first."""
        beams = self.init()
        results: dict[int, list[list[Hypothesis]]] = {}
        steps: list[Step] = []
        closed_at: dict[tuple[int, int], int] = {}
        is_open = [[True] * self.num_groups for _ in beams.sentences]
        while beams.sentences:
            rows = [flag for groups in is_open for flag in groups for _ in range(self.width)]
            known = None if all(rows) or not beams.length else rows
            given, ruled = self.next_step(beams.tokens, beams.length, known)
            after, step, seen = self.advance(beams, given, ruled)
            largest_given, largest, tied, *flags = seen.tolist()
            self.step.check_rankable(largest_given, largest, after.length)
            if tied:
                after, step, seen = self.advance(beams, given, ruled, exact=True)
                flags = seen.tolist()[3:]
            steps.append(step)
            size = self.num_groups
            is_open = [[f > 0 for f in flags[at : at + size]] for at in range(0, len(flags), size)]
            for sentence, groups in zip(after.sentences, is_open, strict=True):
                for group in (group for group, open_ in enumerate(groups) if not open_):
                    closed_at.setdefault((sentence, group), after.length)
            parents = step.onward.row
            keep = self.drop_done([any(groups) for groups in is_open])
            if keep is not None:
                left = [place for place, groups in enumerate(is_open) if not any(groups)]
                done = after.select(torch.tensor(left, device=after.tokens.device))
                results |= self.result(done, steps, closed_at)
                places = torch.tensor(keep, dtype=torch.long, device=after.tokens.device)
                after, parents = after.select(places), parents[places]
                is_open = [is_open[place] for place in keep]
            if self.state is not None and after.sentences and self.width * size > 1:
                self.state.follow(parents.flatten(1))
            beams = after
        return [results[sentence] for sentence in range(self.request.batch)]

    def init(self) -> Beams:
        """One hypothesis without new tokens in each group."""
        start = self.request.start
        size = (len(start), self.num_groups)
        zero = torch.zeros(*size, 1, dtype=sum_dtype(start.device), device=start.device)
        kept = zero.new_full((*size, self.capacity), -torch.inf)
        is_open = torch.ones(size, dtype=torch.bool, device=start.device)
        sentences = list(range(len(start)))
        return Beams(sentences, start, zero, zero, is_open, kept, torch.zeros_like(kept).long())

    def advance(
        self,
        beams: Beams,
        given: Float[Tensor, "N V"],
        log_probs: Float[Tensor, "N V"],
        exact: bool = False,
    ) -> tuple[Beams, Step, Float[Tensor, "flags"]]:
        """One token more: the beams after it, what was chosen, and what the host must look at.

        That is the largest value given, the largest under the rules, whether a row had a tie that
        only an `exact` choice puts in order, and which groups are open.
        """
        length = beams.length + 1
        onward, endings, largest, tied = self._choose_all(beams, log_probs, exact)
        after = self._keep(beams, endings, length, 0)
        longest = [self.request.longest[sentence] for sentence in beams.sentences]
        is_open = beams.is_open & (onward.log_prob[..., 0] > -torch.inf)
        if length in longest:
            at_limit = torch.tensor([[limit == length] for limit in longest], device=given.device)
            found = torch.where(at_limit[..., None], onward.log_prob, -torch.inf)
            at_end = onward._replace(log_prob=found)
            after = self._keep(after, at_end, length, self._num_endings)
            is_open = is_open & ~at_limit
        is_open = is_open & ~self._done(after, onward.log_prob, length, longest)
        batch, rows = len(beams.sentences), len(beams.tokens)
        if self.num_groups > 1 and beams.length:
            first = torch.arange(0, rows // batch, self.width, device=given.device)
            onward = onward._replace(row=onward.row + first[:, None])
        first = torch.arange(0, rows, rows // batch, device=given.device)
        parents = (onward.row + first[:, None, None]).flatten()
        tokens = torch.cat([beams.tokens[parents], onward.token.reshape(-1, 1)], dim=1)
        after = replace(
            after, tokens=tokens, log_prob=onward.log_prob, key=onward.key, is_open=is_open,
            length=length,
        )  # fmt: skip
        largest_given = given.amax() if self.step.checks_given else largest
        looked = torch.stack([largest_given.to(largest.dtype), largest, tied.to(largest.dtype)])
        seen = torch.cat([looked, is_open.flatten().to(looked.dtype)])
        return after, Step(beams.sentences, onward, endings), seen

    def result(
        self, done: Beams, steps: list[Step], closed_at: dict[tuple[int, int], int]
    ) -> dict[int, list[list[Hypothesis]]]:
        """What each group of some sentences kept, best first; else its best open prefix."""
        results = {}
        kept = zip(done.kept_score.tolist(), done.kept_ref.tolist(), strict=True)
        for sentence, groups in zip(done.sentences, kept, strict=True):
            results[sentence] = [
                self._hypotheses(
                    steps, sentence, group, closed_at[sentence, group], zip(*found, strict=True)
                )
                for group, found in enumerate(zip(*groups, strict=True))
            ]
        return results

    # --- one step -------------------------------------------------------------------------------

    def _choose_all(
        self, beams: Beams, log_probs: Float[Tensor, "N V"], exact: bool
    ) -> tuple[Choice, Choice, Tensor, Tensor]:
        """What every group goes on and ends with; the largest value, and whether there was a tie.

        Groups choose one after the other (Vijayakumar et al. 2018, "Diverse Beam Search", algorithm
        1 with Hamming diversity): a token costs a later group `diversity_penalty` nats for every
        hypothesis of an earlier one that takes it. As in the authors' code the charge stays with a
        hypothesis and ranks it within its group, while log-probabilities and scores are the
        model's own, so that groups compare. Endings charge nobody.
        """
        batch, _, width = beams.log_prob.shape
        rows = log_probs.view(batch, -1, width, log_probs.shape[1])
        charge = None
        taken = torch.zeros_like(rows[:, 0, 0]) if self.num_groups > 1 else None
        chosen = []
        for group in range(self.num_groups):
            of_group = rows[:, group if beams.length else 0]
            sums = beams.log_prob[:, group], beams.key[:, group]
            chosen.append(self._choose(of_group, *sums, charge, exact))
            if taken is not None:
                went = chosen[-1][0]
                real = (went.key > -torch.inf) & beams.is_open[:, group, None]
                taken = taken.scatter_add(1, went.token, real.to(taken.dtype))
                charge = self.diversity_penalty * taken
        onward, endings, largest, tied = zip(*chosen, strict=True)
        onward, endings = (
            Choice(*(torch.stack(of, dim=1) for of in zip(*choices, strict=True)))
            for choices in (onward, endings)
        )
        return onward, endings, torch.stack(largest).amax(), torch.stack(tied).any()

    def _choose(
        self,
        rows: Float[Tensor, "B w V"],
        log_prob: Float[Tensor, "B w"],
        key: Float[Tensor, "B w"],
        charge: Float[Tensor, "B V"] | None,
        exact: bool,
    ) -> tuple[Choice, Choice, Tensor, Tensor]:
        """What one group goes on and ends with. Without a charge the keys are log-probabilities."""
        batch, width, _ = rows.shape
        flat = rows.flatten(0, 1)
        keys = flat if charge is None else (rows - charge[:, None]).flatten(0, 1)
        num_ends = len(self.request.eos_ids)
        values, tokens, tied = top_k(keys, self.width + num_ends, exact=exact)
        largest = values.amax().to(log_prob.dtype)
        depth = tokens.shape[1]
        ranks = values.to(log_prob.dtype).view(batch, width, depth)
        parts = ranks
        if charge is not None:
            parts = flat.gather(1, tokens).to(log_prob.dtype).view(batch, width, depth)
        sums = (parts + log_prob[..., None]).flatten(1)
        ranks = sums if charge is None else (ranks + key[..., None]).flatten(1)
        parts, tokens = parts.flatten(1), tokens.view(batch, width * depth)
        ends = self._ends(tokens.device)
        is_end = tokens == ends if num_ends == 1 else torch.isin(tokens, ends)

        def choice(places: Tensor, total: Tensor, keys: Tensor) -> Choice:
            rows, parts_there = places // depth, parts.gather(1, places)
            return Choice(rows, tokens.gather(1, places), parts_there, total, keys)

        best = ranks.masked_fill(is_end, -torch.inf).sort(dim=1, descending=True, stable=True)
        size = self.width
        keys, places = best.values[:, :size], best.indices[:, :size]
        if (missing := size - places.shape[1]) > 0:
            keys = torch.cat([keys, keys.new_full((batch, missing), -torch.inf)], dim=1)
            places = torch.cat([places, places[:, :1].expand(batch, missing)], dim=1)
        empty = keys == -torch.inf
        places = torch.where(empty, places[:, :1], places)
        total = keys
        if charge is not None:
            total = sums.gather(1, places).masked_fill(empty, -torch.inf)
        onward = choice(places, total, keys)
        if self.stop == "optimal":
            part = rows.index_select(2, ends).to(log_prob.dtype)
            total = (part + log_prob[..., None]).flatten(1)
            place = torch.arange(width * num_ends, device=ends.device).expand(batch, -1)
            row, token = place // num_ends, ends.repeat(width).expand(batch, -1)
            return onward, Choice(row, token, part.flatten(1), total, total), largest, tied
        places = ranks.sort(dim=1, descending=True, stable=True).indices[:, :size]
        total = sums.gather(1, places).masked_fill(~is_end.gather(1, places), -torch.inf)
        return onward, choice(places, total, total), largest, tied

    def _keep(self, beams: Beams, found: Choice, length: int, place: int) -> Beams:
        """With what ends here, where that is possible and its group open, kept."""
        scores = self.score(found.log_prob, length)
        if self.penalties is not None:
            batch, groups, width = beams.log_prob.shape
            of_rows = self.penalties().to(scores.dtype).view(batch, -1, width)
            scores = scores + of_rows.expand(-1, groups, -1).gather(2, found.row)
        scores = torch.where(beams.is_open[..., None], scores, -torch.inf)
        first = (length - 1) * (self._num_endings + self.width) + place
        refs = torch.arange(first, first + scores.shape[2], device=scores.device)
        scores = torch.cat([beams.kept_score, scores], dim=2)
        refs = torch.cat([beams.kept_ref, refs.expand(*scores.shape[:2], -1)], dim=2)
        ranks = scores
        if self.stop == "beam_full":
            kept = beams.kept_score
            earlier = torch.where(kept > -torch.inf, torch.inf, kept)
            ranks = torch.cat([earlier, scores[..., kept.shape[2] :]], dim=2)
        order = ranks.sort(dim=2, descending=True, stable=True).indices
        order = order[..., : self.capacity]
        return replace(beams, kept_score=scores.gather(2, order), kept_ref=refs.gather(2, order))

    def _done(
        self, beams: Beams, onward: Float[Tensor, "B G w"], length: int, longest: list[int]
    ) -> Bool[Tensor, "B G"]:
        """Which groups are done, by what they have kept and the log-probabilities still open.

        No further token raises a log-probability, and for a fixed one the score is monotone in the
        length, so the best score still possible lies at the shortest or the longest length; what
        penalties take of it is not known yet.
        """
        worst = beams.kept_score[..., -1]  # -inf where there is room
        if self.stop == "beam_full":
            return worst > -torch.inf
        best_open = onward.amax(dim=2) if self.num_groups > 1 else onward[..., 0]
        if self.stop == "heuristic":
            return self.score(best_open, length) <= worst
        shortest = [max(self.request.shortest[s], length + 1) for s in beams.sentences]
        at_shortest = best_open / self._divisors(shortest, best_open)
        return torch.maximum(at_shortest, best_open / self._divisors(longest, best_open)) <= worst

    def _divisors(self, lengths: list[int], like: Tensor) -> float | Float[Tensor, "B 1"]:
        """The score's divisor for each sentence, or the one of all."""
        numbers = [self.score.divisor(length) for length in lengths]
        if len(set(numbers)) == 1:
            return numbers[0]
        return like.new_tensor(numbers)[:, None]

    @property
    def _num_endings(self) -> int:
        """The places of a step for endings; behind them stand those of what goes on."""
        return self.width * len(self.request.eos_ids)

    def _ends(self, device: torch.device) -> Int[Tensor, "E"]:
        if "ends" not in self.step.memory:
            self.step.memory["ends"] = torch.tensor(sorted(self.request.eos_ids), device=device)
        return self.step.memory["ends"]

    # --- the result -----------------------------------------------------------------------------

    def _hypotheses(
        self,
        steps: list[Step],
        sentence: int,
        group: int,
        closed_at: int,
        kept: Iterable[tuple[float, int]],
    ) -> list[Hypothesis]:
        places = self._num_endings + self.width
        found = sorted((one for one in kept if one[0] > -torch.inf), key=lambda one: -one[0])
        best_open = (closed_at - 2) * places + self._num_endings
        hypotheses = []
        for score, ref in found or [(-torch.inf, best_open)]:
            number, place = divmod(ref, places)
            of_ending = place < self._num_endings
            forced = self.request.force_eos and self.request.longest[sentence] == number + 1
            place -= 0 if of_ending else self._num_endings
            path = self._path(steps[: number + 1], sentence, group, of_ending, place)
            made = self.score.hypothesis(*path, of_ending and not forced)
            is_penalised = self.penalties is not None and score > -torch.inf
            hypotheses.append(replace(made, score=score) if is_penalised else made)
        return hypotheses

    def _path(
        self, steps: list[Step], sentence: int, group: int, of_ending: bool, place: int
    ) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the hypothesis at a place of the last of the steps."""
        ids: list[int] = []
        parts: list[float] = []
        for step in reversed(steps):
            chosen = step.on_host[sentence][of_ending]
            row, token, part = (of[group][place] for of in chosen)
            ids.append(token)
            parts.append(part)
            of_ending, place = False, row % self.width
        return ids[::-1], parts[::-1]
