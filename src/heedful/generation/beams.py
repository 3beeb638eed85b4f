"""The loop of a batched beam search: all open sentences a step at a time, until all are done."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.generation.constraints import Constraints
from heedful.generation.logits import Context, Rule, apply_rules
from heedful.generation.next_token import NextLogProbs, State, ask, check, moves, sum_dtype
from heedful.generation.scoring import Hypothesis, LengthScore
from heedful.generation.stopping import StopRule
from heedful.generation.topk import top_k


@dataclass(frozen=True)
class Beams:
    """The open hypotheses of `n` open searches: `W` rows each, adjacent, best first.

    A search is a sentence, or in a diverse search one of its groups. `key` is what a hypothesis
    is ranked by: its `log_prob`, less what it was charged for likeness. A row that repeats the
    first of its search, for want of another, has both at -inf.
    """

    search: Int[Tensor, "n"]
    tokens: Int[Tensor, "N all"]
    token_log_probs: Float[Tensor, "N t"]
    log_prob: Float[Tensor, "n W"]
    key: Float[Tensor, "n W"]

    @property
    def length(self) -> int:
        return self.token_log_probs.shape[1]

    @property
    def generated(self) -> Int[Tensor, "N t"]:
        return self.tokens[:, self.tokens.shape[1] - self.length :]

    @property
    def rows(self) -> Int[Tensor, "n W"]:
        """The rows of each search."""
        return torch.arange(len(self.tokens), device=self.tokens.device).view(self.log_prob.shape)


@dataclass(frozen=True)
class Next:
    """One more token for rows of `Beams`: the row, the token, its log-probability, the sums.

    `counts` marks those that count as found where they end here.
    """

    row: Int[Tensor, "n X"]
    token: Int[Tensor, "n X"]
    token_log_prob: Float[Tensor, "n X"]
    log_prob: Float[Tensor, "n X"]
    key: Float[Tensor, "n X"]
    counts: Bool[Tensor, "n X"]


@dataclass(frozen=True)
class Search:
    """Everything that one beam search needs to know.

    Each sentence is searched `num_groups` times side by side, each time with a beam of
    `beam_size`: search `i` belongs to sentence `i // num_groups`.
    """

    next_log_probs: NextLogProbs
    state: State | None
    constraints: Constraints
    score: LengthScore
    rule: StopRule
    beam_size: int
    rules: Sequence[Rule] = ()
    prompts: list[list[int]] = field(default_factory=list)
    num_groups: int = 1
    memory: dict[str, Tensor] = field(default_factory=dict)

    def run(self, start: Int[Tensor, "B t0"]) -> list[list[Hypothesis]]:
        """Go on until every search is done: what the stop rule kept of each."""
        start = start.repeat_interleave(self.num_groups, dim=0)
        batch, device = len(start), start.device
        dtype = sum_dtype(device)  # so that sums do not depend on the order of small terms
        kept: list[list[Hypothesis]] = [[] for _ in range(batch)]
        zero = torch.zeros(batch, 1, dtype=dtype, device=device)
        beams = Beams(torch.arange(batch, device=device), start, zero[:, :0], zero, zero)
        while len(beams.search):
            endings, going_on = self.step(beams)
            length = beams.length + 1
            sentence = beams.search // self.num_groups
            longest = self.constraints.max_lengths[sentence]
            at_limit = longest == length
            eos_forced = at_limit if self.constraints.force_eos else torch.zeros_like(at_limit)
            self._keep(kept, beams, endings, endings.counts, ~eos_forced)
            if at_limit.any():
                cut_off = going_on.counts & at_limit[:, None]
                self._keep(kept, beams, going_on, cut_off, torch.zeros_like(at_limit))
            open_ = (going_on.log_prob[:, 0] > -torch.inf) & ~at_limit
            self._keep_dead_ends(kept, beams, open_)
            shortest = self.constraints.min_lengths[sentence].clamp(min=length + 1)
            worst = self._worst_kept(kept, beams.search, dtype)
            best_open = going_on.log_prob.amax(dim=1)
            open_ &= ~self.rule.done(worst, best_open, length, shortest, longest)
            beams = self._advance(beams, going_on, open_)
        return kept

    def step(self, beams: Beams) -> tuple[Next, Next]:
        """Every ending, and the `beam_size` best that go on, of each search."""
        log_probs = self.log_probs(beams)
        return self.choose(beams, log_probs, log_probs)

    def log_probs(self, beams: Beams) -> Float[Tensor, "N V"]:
        """The log-probabilities under all rules after each row."""
        known = (*self.constraints.eos_ids, self.constraints.largest_forced)
        copies = self._copies(beams)
        given = ask(self.next_log_probs, beams.tokens[::copies], self.state, known)
        given = given.repeat_interleave(copies, dim=0) if copies > 1 else given
        sentence = (beams.search // self.num_groups).repeat_interleave(beams.log_prob.shape[1])
        if not self.rules:
            return self.constraints(given, beams.generated, sentence)
        check(given.amax(dim=1), beams.length + 1)
        # First, so that a rule which keeps only few tokens keeps some that may come.
        log_probs = self.constraints.forbid_early_end(given, beams.length, sentence)
        context = Context(self.prompts, beams.generated, sentence, self.memory)
        log_probs = apply_rules(self.rules, log_probs, context)
        return self.constraints(log_probs, beams.generated, sentence, unruled=given)

    def choose(
        self, beams: Beams, log_probs: Float[Tensor, "N V"], keys: Float[Tensor, "N V"]
    ) -> tuple[Next, Next]:
        """What `step` gives, of the log-probabilities and of what ranks them."""
        n, width = beams.log_prob.shape
        dtype = beams.log_prob.dtype
        values, tokens = top_k(keys, self.rule.depth)
        if self.rules:
            advice = "a beam search cannot rank values above 0, so take no negative penalty"
            check(values[:, 0], beams.length + 1, "a rule", advice)
        else:
            check(values[:, 0], beams.length + 1)
        depth = values.shape[1]

        def of_candidates(rows: Tensor) -> Tensor:
            return rows.to(dtype).view(n, width * depth)

        parts = of_candidates(log_probs.gather(1, tokens))
        key = of_candidates(values) + beams.key.repeat_interleave(depth, dim=1)
        sums = parts + beams.log_prob.repeat_interleave(depth, dim=1)
        tokens = tokens.view(n, width * depth)
        eos_ids = torch.tensor(sorted(self.constraints.eos_ids), device=tokens.device)
        is_eos = tokens[:, :, None] == eos_ids
        order = key.sort(dim=1, descending=True, stable=True).indices
        rank = order.argsort(dim=1)

        endings = self._endings(beams, log_probs, keys, eos_ids, rank, is_eos)
        ends = is_eos.any(dim=2)
        order = order.gather(1, ends.gather(1, order).long().sort(dim=1, stable=True).indices)
        order = order[:, : self.beam_size]
        if order.shape[1] < self.beam_size:
            missing = self.beam_size - order.shape[1]
            order = torch.cat([order, order[:, :1].expand(n, missing)], dim=1)
        empty = key.masked_fill(ends, -torch.inf).gather(1, order) == -torch.inf
        empty[:, width * depth :] = True
        order = torch.where(empty, order[:, :1], order)
        going_on = Next(
            beams.rows.repeat_interleave(depth, dim=1).gather(1, order),
            tokens.gather(1, order),
            parts.gather(1, order),
            sums.gather(1, order).masked_fill(empty, -torch.inf),
            key.gather(1, order).masked_fill(empty, -torch.inf),
            ~empty,
        )
        return endings, going_on

    def _endings(
        self,
        beams: Beams,
        log_probs: Float[Tensor, "N V"],
        keys: Float[Tensor, "N V"],
        eos_ids: Int[Tensor, "E"],
        rank: Int[Tensor, "n C"],
        is_eos: Bool[Tensor, "n C E"],
    ) -> Next:
        """Each row with each EOS. `rank` and `is_eos` are of the candidates of each search."""
        n, width = beams.log_prob.shape
        num_candidates, num_eos = is_eos.shape[1:]

        def of_eos(rows: Tensor) -> Tensor:
            return rows[:, eos_ids].to(beams.log_prob.dtype).view(n, width * num_eos)

        def each(of_rows: Tensor) -> Tensor:
            return of_rows.repeat_interleave(num_eos, dim=1)

        # An ending that is no candidate ranks behind them all.
        ranks = torch.where(is_eos, rank[:, :, None], num_candidates)
        ranks = ranks.unflatten(1, (width, -1)).amin(dim=2).flatten(1)
        log_prob = each(beams.log_prob) + of_eos(log_probs)
        return Next(
            each(beams.rows),
            eos_ids.repeat(n, width),
            of_eos(log_probs),
            log_prob,
            each(beams.key) + of_eos(keys),
            self.rule.ending_counts(ranks) & (log_prob > -torch.inf),
        )

    def _copies(self, beams: Beams) -> int:
        """How many rows are the same, adjacent and asked for as one: all groups at the start."""
        return self.num_groups if beams.length == 0 else 1

    def _keep(
        self,
        kept: list[list[Hypothesis]],
        beams: Beams,
        found: Next,
        counts: Bool[Tensor, "n X"],
        finished: Bool[Tensor, "n"],
    ) -> None:
        """Offer what counts as found to its search, where it can be among the kept at all."""
        scores = self.score(found.log_prob, beams.length + 1)
        worst = self._worst_kept(kept, beams.search, scores.dtype)
        hits = counts & (scores > worst[:, None])
        places, columns = hits.nonzero(as_tuple=True)
        if not len(places):
            return
        at = (places, columns)
        rows = found.row[at]
        ids = torch.cat([beams.generated[rows], found.token[at][:, None]], dim=1)
        parts = torch.cat([beams.token_log_probs[rows], found.token_log_prob[at][:, None]], dim=1)
        by_search: dict[int, list[Hypothesis]] = {}
        for search, *fields in zip(
            beams.search[places].tolist(),
            ids.tolist(),
            scores[at].tolist(),
            finished[places].tolist(),
            found.log_prob[at].tolist(),
            parts.tolist(),
            strict=True,
        ):
            by_search.setdefault(search, []).append(Hypothesis(*fields))
        for search, hypotheses in by_search.items():
            hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
            kept[search] = self.rule.keep(kept[search], hypotheses)

    def _keep_dead_ends(self, kept: list[list[Hypothesis]], beams: Beams, open_: Tensor) -> None:
        """The best open prefix of each search that ends now with nothing else to show."""
        scores = self.score(beams.log_prob, beams.length)
        width = beams.log_prob.shape[1]
        for place, search in enumerate(beams.search.tolist()):
            if not open_[place] and not kept[search]:
                row = place * width
                kept[search] = [
                    Hypothesis(
                        ids=beams.generated[row].tolist(),
                        score=scores[place, 0].item(),
                        finished=False,
                        log_prob=beams.log_prob[place, 0].item(),
                        token_log_probs=beams.token_log_probs[row].tolist(),
                    )
                ]

    def _worst_kept(
        self, kept: list[list[Hypothesis]], search: Int[Tensor, "n"], dtype: torch.dtype
    ) -> Float[Tensor, "n"]:
        """The score of each search's worst kept hypothesis; -inf where there is room left."""
        of_search = [kept[index] for index in search.tolist()]
        full = self.rule.capacity
        worst = [some[-1].score if len(some) == full else -torch.inf for some in of_search]
        return torch.tensor(worst, dtype=dtype, device=search.device)

    def _advance(self, beams: Beams, going_on: Next, open_: Tensor) -> Beams:
        """The next beams, of the searches that are still open; the state follows."""
        rows = going_on.row[open_].flatten()
        if self.state is not None and len(rows):
            copies = self._copies(beams)
            if moves(rows // copies, len(beams.tokens) // copies):
                self.state.reorder(rows // copies)
        token, part = going_on.token[open_], going_on.token_log_prob[open_]
        return Beams(
            beams.search[open_],
            torch.cat([beams.tokens[rows], token.view(-1, 1)], dim=1),
            torch.cat([beams.token_log_probs[rows], part.view(-1, 1)], dim=1),
            going_on.log_prob[open_],
            going_on.key[open_],
        )
