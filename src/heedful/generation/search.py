"""Beam and greedy search over any function that gives next-token log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.constraints import Constraints
from heedful.generation.request import PerSentence, Starts, read_request
from heedful.generation.scoring import Hypothesis, LengthScore, Normalization
from heedful.generation.stopping import BeamFull, Optimal, Stop, StopRule
from heedful.generation.topk import top_k

NextLogProbs = Callable[..., Float[Tensor, "N V"]]
"""`f(prefixes (N, t)) -> (N, V)`, or `f(prefixes, state) -> (N, V)` for a search with a state."""

ROUNDING = 1e-3  # how far above 0 a log-probability may lie by rounding in 16-bit formats


@runtime_checkable
class State(Protocol):
    """What a next-token function remembers of each row between calls, for example a cache."""

    def reorder(self, rows: Int[Tensor, "M"]) -> None:
        """Make row i the former row `rows[i]`. `M` may be larger or smaller than before."""


def beam_search(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    beam_size: int,
    eos_id: int,
    max_new_tokens: PerSentence,
    min_new_tokens: PerSentence = 0,
    length_penalty: float = 1.0,
    normalization: Normalization | str = "average",
    stop: Stop | str = "optimal",
    num_return: int = 1,
    no_repeat_ngram_size: int = 0,
    forced_prefix: Sequence[Sequence[int]] | None = None,
    force_eos: bool | None = None,
    state: State | None = None,
) -> list[list[Hypothesis]]:
    """For each start up to `num_return` hypotheses, best first, and at least one.

    The space searched is every sequence of tokens of probability above zero that either ends in
    EOS with `min_new_tokens` to `max_new_tokens` tokens, or has `max_new_tokens` tokens and no EOS
    (marked as not finished). All compete by score: `LengthScore`, over the new tokens including
    EOS. Only where none of them is found is the best open prefix returned, not finished.

    Stop rules. `optimal`: each ending of each hypothesis in the beam counts when it is found, also
    one too unlikely to stay in the beam; a sentence is done when nothing open can beat the
    `num_return` best under the same formula. With a beam as large as the space the result is the
    true optimum. `beam_full` is fairseq's: an ending counts when it ranks in the beam, and a
    sentence is done after `beam_size` of them, so the order of finding matters.

    A sentence's result does not depend on its batch. Of equal candidates the lower beam, then the
    lower token id comes first.

    Args:
        next_log_probs: called first with one row a sentence, then with `beam_size` rows for each
            sentence that is still open, those of one sentence adjacent, in the order of `start`.
            Rows that a sentence cannot fill repeat its first row. With a state it may look at
            `prefixes[:, -1:]` alone (all of `start` at the first call).
        start: `(B, t0)` ids that every hypothesis of the sentence goes on from; `t0` may be 0.
        max_new_tokens: EOS included; one number, or one for each sentence. So `min_new_tokens`.
        length_penalty: the exponent of the length; see `LengthScore`.
        no_repeat_ngram_size: no n-gram of this size twice in the new tokens; 0 for no rule. The
            start does not count.
        forced_prefix: for each sentence the first new tokens, of any length; their
            log-probabilities count. They win over the other rules. EOS may only come last.
        force_eos: at the last allowed token only EOS may follow, its log-probability counts and
            the hypothesis is marked as not finished. By default so in `beam_full` alone.
        state: reordered after each step in which rows moved, then given to `next_log_probs`.

    Raises:
        UserError: an argument out of range, or log-probabilities that are NaN, above 0 or of a
            wrong shape.
    """
    if stop not in ("optimal", "beam_full"):
        raise UserError(f"stop must be 'optimal' or 'beam_full', not {stop!r}")
    request = read_request(
        start,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        no_repeat_ngram_size=no_repeat_ngram_size,
        forced_prefix=forced_prefix,
        force_eos=stop == "beam_full" if force_eos is None else force_eos,
    )
    if beam_size < 1:
        raise UserError(f"beam_size must be at least 1, not {beam_size}")
    if not 1 <= num_return <= beam_size:
        raise UserError(f"num_return must be from 1 to beam_size = {beam_size}, not {num_return}")
    score = LengthScore(normalization, length_penalty)
    optimal, full = Optimal(num_return, beam_size, score), BeamFull(beam_size)
    rule = optimal if stop == "optimal" else full
    search = _Search(next_log_probs, state, request.constraints, score, rule, beam_size)
    with torch.no_grad():
        return [kept[:num_return] for kept in search.run(request.start)]


def greedy_search(
    next_log_probs: NextLogProbs,
    start: Starts,
    *,
    eos_id: int,
    max_new_tokens: PerSentence,
    min_new_tokens: PerSentence = 0,
    no_repeat_ngram_size: int = 0,
    forced_prefix: Sequence[Sequence[int]] | None = None,
    length_penalty: float = 1.0,
    normalization: Normalization | str = "average",
    state: State | None = None,
) -> list[list[Hypothesis]]:
    """For each start one hypothesis: the most likely next token each time, until EOS or the limit.

    This is a beam of 1 under `beam_full` without a forced EOS. (A beam of 1 under `optimal` goes on
    past an EOS that is likeliest, because a longer hypothesis may score better.) The penalty and
    the normalisation change the reported score alone. Arguments are those of `beam_search`.
    """
    return beam_search(
        next_log_probs,
        start,
        beam_size=1,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        length_penalty=length_penalty,
        normalization=normalization,
        stop="beam_full",
        no_repeat_ngram_size=no_repeat_ngram_size,
        forced_prefix=forced_prefix,
        force_eos=False,
        state=state,
    )


@dataclass(frozen=True)
class _Beams:
    """The open hypotheses of the `n` open sentences: `W` rows each, adjacent, best first.

    A row that repeats the first of its sentence, for want of another, has `log_prob` -inf.
    """

    sentence: Int[Tensor, "n"]
    tokens: Int[Tensor, "N all"]
    token_log_probs: Float[Tensor, "N t"]
    log_prob: Float[Tensor, "n W"]

    @property
    def length(self) -> int:
        return self.token_log_probs.shape[1]

    @property
    def generated(self) -> Int[Tensor, "N t"]:
        return self.tokens[:, self.tokens.shape[1] - self.length :]


@dataclass(frozen=True)
class _Next:
    """One more token for rows of `_Beams`: the row, the token, its log-probability, the sum."""

    row: Int[Tensor, "n X"]
    token: Int[Tensor, "n X"]
    token_log_prob: Float[Tensor, "n X"]
    log_prob: Float[Tensor, "n X"]


@dataclass(frozen=True)
class _Search:
    next_log_probs: NextLogProbs
    state: State | None
    constraints: Constraints
    score: LengthScore
    rule: StopRule
    beam_size: int

    def run(self, start: Int[Tensor, "B t0"]) -> list[list[Hypothesis]]:
        """Search until every sentence is done: what the stop rule kept of each."""
        batch, device = len(start), start.device
        # Sums in double precision, so that they do not depend on the order of small terms.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        kept: list[list[Hypothesis]] = [[] for _ in range(batch)]
        beams = _Beams(
            torch.arange(batch, device=device),
            start,
            torch.zeros(batch, 0, dtype=dtype, device=device),
            torch.zeros(batch, 1, dtype=dtype, device=device),
        )
        while len(beams.sentence):
            endings, going_on = self._step(beams)
            length = beams.length + 1
            longest = self.constraints.max_lengths[beams.sentence]
            at_limit = longest == length
            eos_forced = at_limit if self.constraints.force_eos else torch.zeros_like(at_limit)
            self._keep(kept, beams, endings, ~eos_forced)
            if at_limit.any():
                cut = going_on.log_prob.masked_fill(~at_limit[:, None], -torch.inf)
                cut_off = _Next(going_on.row, going_on.token, going_on.token_log_prob, cut)
                self._keep(kept, beams, cut_off, torch.zeros_like(at_limit))
            open_ = (going_on.log_prob[:, 0] > -torch.inf) & ~at_limit
            self._keep_dead_ends(kept, beams, open_)
            shortest = self.constraints.min_lengths[beams.sentence].clamp(min=length + 1)
            worst = self._worst_kept(kept, beams.sentence, dtype)
            open_ &= ~self.rule.done(worst, going_on.log_prob[:, 0], shortest, longest)
            beams = self._advance(beams, going_on, open_)
        return kept

    def _step(self, beams: _Beams) -> tuple[_Next, _Next]:
        """The endings that count, one place a row, and the `beam_size` best that go on."""
        log_probs = self._log_probs(beams)
        n, width = beams.log_prob.shape
        dtype, eos_id = beams.log_prob.dtype, self.constraints.eos_id
        rows = torch.arange(n * width, device=log_probs.device).view(n, width)

        values, tokens = top_k(log_probs, self.rule.depth)
        self._check(values[:, 0], beams.length + 1)
        depth = values.shape[1]
        token_log_probs = values.to(dtype).view(n, width * depth)
        sums = token_log_probs + beams.log_prob.repeat_interleave(depth, dim=1)
        tokens = tokens.view(n, width * depth)
        is_eos = tokens == eos_id

        eos_log_probs = log_probs[:, eos_id].to(dtype).view(n, width)
        eos_sums = self.rule.counted(sums, is_eos, beams.log_prob + eos_log_probs)
        endings = _Next(rows, torch.full_like(rows, eos_id), eos_log_probs, eos_sums)

        sums = sums.masked_fill(is_eos, -torch.inf)
        order = sums.sort(dim=1, descending=True, stable=True).indices[:, : self.beam_size]
        if order.shape[1] < self.beam_size:
            missing = self.beam_size - order.shape[1]
            order = torch.cat([order, order[:, :1].expand(n, missing)], dim=1)
        best = sums.gather(1, order)
        empty = best == -torch.inf
        empty[:, width * depth :] = True
        order = torch.where(empty, order[:, :1], order)
        going_on = _Next(
            rows.repeat_interleave(depth, dim=1).gather(1, order),
            tokens.gather(1, order),
            token_log_probs.gather(1, order),
            best.masked_fill(empty, -torch.inf),
        )
        return endings, going_on

    def _log_probs(self, beams: _Beams) -> Float[Tensor, "N V"]:
        arguments = (beams.tokens,) if self.state is None else (beams.tokens, self.state)
        log_probs = self.next_log_probs(*arguments)
        rows = len(beams.tokens)
        if log_probs.ndim != 2 or len(log_probs) != rows:
            raise UserError(
                f"next_log_probs gave shape {tuple(log_probs.shape)} for {rows} prefixes: "
                f"it must give ({rows}, vocabulary size)"
            )
        largest = max(self.constraints.eos_id, self.constraints.largest_forced)
        if largest >= log_probs.shape[1]:
            raise UserError(
                f"token id {largest} (EOS or forced) is outside the vocabulary: "
                f"next_log_probs gives {log_probs.shape[1]} log-probabilities"
            )
        sentence = beams.sentence.repeat_interleave(beams.log_prob.shape[1])
        return self.constraints(log_probs, beams.generated, sentence)

    @staticmethod
    def _check(largest: Float[Tensor, "N"], step: int) -> None:
        """Refuse what is no log-probability; NaN shows as the largest entry of its row."""
        if largest.isnan().any():
            raise UserError(
                f"next_log_probs gave NaN at step {step}: look for an overflow in the model"
            )
        if (largest > ROUNDING).any():
            raise UserError(
                f"next_log_probs gave {largest.max().item():.4g} at step {step}: "
                "log-probabilities are at most 0, so take log_softmax of the logits"
            )

    def _keep(
        self,
        kept: list[list[Hypothesis]],
        beams: _Beams,
        found: _Next,
        finished: Tensor,
    ) -> None:
        """Offer what was found to its sentences, where it can be among the kept at all."""
        scores = self.score(found.log_prob, beams.length + 1)
        worst = self._worst_kept(kept, beams.sentence, scores.dtype)
        hits = (found.log_prob > -torch.inf) & (scores > worst[:, None])
        places, columns = hits.nonzero(as_tuple=True)
        if not len(places):
            return
        at = (places, columns)
        rows = found.row[at]
        ids = torch.cat([beams.generated[rows], found.token[at][:, None]], dim=1)
        parts = torch.cat([beams.token_log_probs[rows], found.token_log_prob[at][:, None]], dim=1)
        by_sentence: dict[int, list[Hypothesis]] = {}
        for sentence, *fields in zip(
            beams.sentence[places].tolist(),
            ids.tolist(),
            scores[at].tolist(),
            finished[places].tolist(),
            found.log_prob[at].tolist(),
            parts.tolist(),
            strict=True,
        ):
            by_sentence.setdefault(sentence, []).append(Hypothesis(*fields))
        for sentence, hypotheses in by_sentence.items():
            hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
            kept[sentence] = self.rule.keep(kept[sentence], hypotheses)

    def _keep_dead_ends(self, kept: list[list[Hypothesis]], beams: _Beams, open_: Tensor) -> None:
        """The best open prefix of each sentence that ends now with nothing else to show."""
        scores = self.score(beams.log_prob, beams.length)
        width = beams.log_prob.shape[1]
        for place, sentence in enumerate(beams.sentence.tolist()):
            if not open_[place] and not kept[sentence]:
                row = place * width
                kept[sentence] = [
                    Hypothesis(
                        ids=beams.generated[row].tolist(),
                        score=scores[place, 0].item(),
                        finished=False,
                        log_prob=beams.log_prob[place, 0].item(),
                        token_log_probs=beams.token_log_probs[row].tolist(),
                    )
                ]

    def _worst_kept(
        self, kept: list[list[Hypothesis]], sentence: Int[Tensor, "n"], dtype: torch.dtype
    ) -> Float[Tensor, "n"]:
        """The score of each sentence's worst kept hypothesis; -inf where there is room left."""
        of_sentence = [kept[index] for index in sentence.tolist()]
        full = self.rule.capacity
        worst = [some[-1].score if len(some) == full else -torch.inf for some in of_sentence]
        return torch.tensor(worst, dtype=dtype, device=sentence.device)

    def _advance(self, beams: _Beams, going_on: _Next, open_: Tensor) -> _Beams:
        """The next beams, of the sentences that are still open; the state follows."""
        rows = going_on.row[open_].flatten()
        stays = len(rows) == len(beams.tokens) and torch.equal(
            rows, torch.arange(len(rows), device=rows.device)
        )
        if self.state is not None and len(rows) and not stays:
            self.state.reorder(rows)
        token, part = going_on.token[open_], going_on.token_log_prob[open_]
        return _Beams(
            beams.sentence[open_],
            torch.cat([beams.tokens[rows], token.view(-1, 1)], dim=1),
            torch.cat([beams.token_log_probs[rows], part.view(-1, 1)], dim=1),
            going_on.log_prob[open_],
        )
