"""Speculative decoding: a cheap draft proposes several tokens, the target checks them in one call.

The result is the target's own: with greedy decoding token for token, with sampling in distribution.
The algorithm is that of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding", algorithm 1, and Chen et al. 2023, "Accelerating Large Language Model Decoding with
Speculative Sampling", algorithm 2. Greedy decoding is the case where every distribution has all its
mass on one token.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from heedful.errors import UserError
from heedful.generation.request import EosIds, read_request
from heedful.generation.rules import Context, Rule, apply_rules
from heedful.generation.sampling import StopFunction
from heedful.generation.state import check_largest


@runtime_checkable
class Scorer(Protocol):
    """A language model that remembers what it has read of one sequence, for example in a cache."""

    def feed(self, tokens: Int[Tensor, "t"]) -> Float[Tensor, "t V"]:
        """Read `t` >= 1 more tokens, given on the host: log-probabilities of what follows each."""

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens fed; never more than were fed."""


@runtime_checkable
class Draft(Protocol):
    """What proposes tokens. Any draft leaves the output's distribution as it is; a good one is
    cheap and often right."""

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """The draft's distribution of the token after `ids`, or None where it proposes nothing.

        `ids` are the prompt, the output so far and what was proposed since; from one call to the
        next they may be longer, or shorter and different where proposals were rejected.
        """


@dataclass(frozen=True)
class SpeculativeResult:
    """One output of speculative decoding.

    `ids` are the new tokens only: without the prompt, with EOS where it was reached. `finished` is
    False where `max_new_tokens` (or a dead end: no token of probability above zero) cut the output
    off. `token_log_probs` are the target's, before any rule, in nats; `log_prob` is their sum.

    `num_target_calls` counts calls of the target, the one for the prompt included, `num_proposed`
    the draft's tokens and `num_accepted` those of them that the output holds.
    """

    ids: list[int]
    finished: bool
    log_prob: float
    token_log_probs: list[float]
    num_target_calls: int
    num_proposed: int
    num_accepted: int


def speculative_decode(
    target: Scorer,
    draft: Draft,
    prompt: Sequence[int],
    *,
    eos_id: EosIds,
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    rules: Sequence[Rule] = (),
    seed: int | None = None,
    stop: StopFunction | None = None,
) -> SpeculativeResult:
    """Go on from a prompt as the target would alone, with fewer calls of the target.

    The first call reads the prompt and gives one token; each later one reads up to
    `num_draft_tokens` proposals and gives those it accepts and one token more. The target is
    rewound to nothing first, and never holds more than `len(prompt) + max_new_tokens - 1` tokens.

    Args:
        target: whose greedy continuation or samples are wanted.
        prompt: at least one token.
        eos_id: the token that ends the output, or several of them.
        max_new_tokens: EOS included.
        num_draft_tokens: how many tokens the draft may propose for each call of the target.
        rules: change log-probabilities, of the draft and of the target alike, in this order.
        seed: of the random numbers of sampling; None for greedy decoding.
        stop: asked after each token other than EOS, with 0 (the sentence) and all new tokens;
            where it says yes the output is finished.
    """
    speculation = speculate(
        target,
        draft,
        prompt,
        eos_id=eos_id,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        rules=rules,
        seed=seed,
        stop=stop,
    )
    for _ in speculation:
        pass
    return speculation.result()


def speculate(
    target: Scorer,
    draft: Draft,
    prompt: Sequence[int],
    *,
    eos_id: EosIds,
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    rules: Sequence[Rule] = (),
    seed: int | None = None,
    stop: StopFunction | None = None,
) -> "Speculation":
    """What `speculative_decode` does, run by run of tokens, for output that is shown as it comes.

    The arguments are those of `speculative_decode`; they are checked here, not at the first run.
    """
    request = read_request([prompt], eos_id=eos_id, max_new_tokens=max_new_tokens)
    if num_draft_tokens < 1:
        raise UserError(f"num_draft_tokens must be at least 1, not {num_draft_tokens}")
    if not len(prompt):
        raise UserError("the prompt is empty: give it at least one token, for example BOS")
    if min(prompt) < 0:
        raise UserError(f"the prompt holds {min(prompt)}, which is no token id")
    if seed is not None and seed < 0:
        raise UserError(f"seed must be 0 or more, not {seed}")
    return Speculation(
        target=_Reader(target, "the target"),
        draft=draft,
        prompt=[int(token) for token in prompt],
        eos_ids=request.eos_ids,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        rules=rules,
        greedy=seed is None,
        uniform=random.Random(seed or 0).random,
        stop=stop,
    )


class DraftModel:
    """A smaller language model as a draft, with its own memory.

    The scorer belongs to the draft: it is rewound to nothing now, and to what is still right after
    each rejection. It never holds more than `len(prompt) + max_new_tokens - 2` tokens.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._reader = _Reader(scorer, "the draft")

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"]:
        """The model's log-probabilities of the token after `ids`."""
        return self._reader.log_probs(list(ids), 1)[0]


@dataclass(frozen=True)
class PromptLookup:
    """A draft without a model: what followed the same last tokens earlier in prompt and output.

    Of the earlier places the one that agrees with the most last tokens counts, up to `max_ngram`
    of them, and of equals the latest; nothing is proposed where fewer than `min_ngram` agree. All
    mass is on that one token. It pays where the output repeats the input, as in editing and
    summaries (Saxena 2023, "Prompt Lookup Decoding").
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UserError(
                f"min_ngram must be from 1 to max_ngram = {self.max_ngram}, not {self.min_ngram}"
            )

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """Log-probability 0 for the token that followed, -inf for the others."""
        token = self.follower(ids)
        if token is None:
            return None
        log_probs = torch.full((vocab_size,), -torch.inf)
        log_probs[token] = 0.0
        return log_probs

    def follower(self, ids: Sequence[int]) -> int | None:
        """The token after the best earlier match of the last tokens of `ids`, if there is one."""
        best, token = self.min_ngram - 1, None
        for end in range(len(ids) - 2, -1, -1):  # a match ends here, and ids[end + 1] follows it
            agreeing = 0
            while agreeing < min(self.max_ngram, end + 1) and (
                ids[end - agreeing] == ids[-1 - agreeing]
            ):
                agreeing += 1
            if agreeing > best:
                best, token = agreeing, ids[end + 1]
            if best == self.max_ngram:
                break
        return token


class _Reader:
    """A scorer together with the tokens it holds, so that it is fed only what is new."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        scorer.rewind(0)
        self._scorer = scorer
        self._name = name
        self._held: list[int] = []

    def log_probs(self, ids: list[int], count: int) -> Float[Tensor, "count V"]:
        """Log-probabilities of what follows each of the last `count` tokens of `ids`."""
        known = min(len(self._held), len(ids) - count)
        while self._held[:known] != ids[:known]:
            known -= 1
        if known < len(self._held):
            self._scorer.rewind(known)
        new = ids[known:]
        rows = self._scorer.feed(torch.tensor(new))
        self._held = list(ids)
        if rows.ndim != 2 or len(rows) != len(new):
            raise UserError(
                f"{self._name} gave shape {tuple(rows.shape)} for {len(new)} tokens: "
                f"it must give ({len(new)}, vocabulary size)"
            )
        rows = rows[-count:]
        check_largest(rows.amax().item(), len(ids), self._name)
        return rows


@dataclass(frozen=True)
class Proposal:
    """A token, and the draft's distribution that it was drawn from."""

    token: int
    probs: Float[Tensor, "V"]


def verify(
    proposal: Proposal, probs: Float[Tensor, "V"], uniform: Callable[[], float]
) -> tuple[int, bool]:
    """A token distributed as `probs`, and whether it is the proposed one.

    A proposal x drawn from q is accepted with probability min(1, p(x) / q(x)); otherwise the token
    is drawn from the normalised (p - q)+ (Leviathan et al. 2023, section 2.3 and appendix A.1).
    `uniform` gives independent numbers from [0, 1).
    """
    token = proposal.token
    if uniform() * proposal.probs[token].item() < probs[token].item():
        return token, True
    missing = (probs - proposal.probs).clamp(min=0)
    # p and q that differ by rounding alone may leave nothing.
    return draw(missing if missing.any() else probs, uniform()), False


def draw(weights: Float[Tensor, "V"], number: float) -> int:
    """The token at `number`, from [0, 1), of the cumulative weights: never one of weight 0.

    These are weights in double precision and on the host, where `sampling.inverse_cdf` has rows
    of log-probabilities.
    """
    sums = weights.cumsum(dim=0)
    return int(torch.searchsorted(sums, number * sums[-1], right=True))


@dataclass
class Speculation:
    """The output so far, and how it grows by one call of the target.

    Iterated, it gives after each call the tokens that were added: at least one, but for a last call
    that met a dead end.
    """

    target: _Reader
    draft: Draft
    prompt: list[int]
    eos_ids: tuple[int, ...]
    max_new_tokens: int
    num_draft_tokens: int
    rules: Sequence[Rule]
    greedy: bool
    uniform: Callable[[], float]
    stop: StopFunction | None
    ids: list[int] = field(default_factory=list)
    token_log_probs: list[float] = field(default_factory=list)
    ended: bool = False
    finished: bool = False
    vocab_size: int | None = None
    target_memory: dict[object, Tensor] = field(default_factory=dict)
    draft_memory: dict[object, Tensor] = field(default_factory=dict)
    num_target_calls: int = 0
    num_proposed: int = 0
    num_accepted: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        while not self.ended:
            before = len(self.ids)
            with torch.no_grad():  # not held while the caller has the tokens
                self.round()
            yield self.ids[before:]

    def round(self) -> None:
        """Propose, call the target once, and add what it accepts and one token of its own."""
        proposals = self._propose()
        drafted = [proposal.token for proposal in proposals]
        rows = self.target.log_probs(self.prompt + self.ids + drafted, len(drafted) + 1)
        self.num_target_calls += 1
        self.num_proposed += len(proposals)
        if self.vocab_size is None:
            self.vocab_size = self._read_vocab_size(rows)
        for row, proposal in zip(rows, [*proposals, None], strict=True):
            ruled = self._ruled(row, self.ids, self.target_memory)
            largest = ruled.max().item()  # NaN where any is NaN
            if math.isnan(largest):
                raise UserError(f"a rule gave NaN at step {len(self.ids) + 1}")
            if largest == -math.inf:
                self.ended = True
                return
            probs = self._probs(ruled)
            if proposal is None:
                token, accepted = draw(probs, self.uniform()), False
            else:
                token, accepted = verify(proposal, probs, self.uniform)
            self.num_accepted += accepted
            self._add(token, row[token].item())
            if self.ended or not accepted:
                return

    def result(self) -> SpeculativeResult:
        """What there is by now."""
        return SpeculativeResult(
            ids=self.ids,
            finished=self.finished,
            log_prob=math.fsum(self.token_log_probs),
            token_log_probs=self.token_log_probs,
            num_target_calls=self.num_target_calls,
            num_proposed=self.num_proposed,
            num_accepted=self.num_accepted,
        )

    def _propose(self) -> list[Proposal]:
        """The draft's next tokens: none that could not be part of the output.

        The last place under the limit is left to the target, which always adds a token. The first
        round has none, since it is the one that tells the size of the vocabulary.
        """
        proposals: list[Proposal] = []
        ids = list(self.ids)
        room = min(self.num_draft_tokens, self.max_new_tokens - len(ids) - 1)
        while self.vocab_size is not None and len(proposals) < room:
            row = self.draft.next_log_probs(self.prompt + ids, self.vocab_size)
            if row is None:
                break
            if len(row) != self.vocab_size:
                raise UserError(
                    f"the draft has a vocabulary of {len(row)} tokens and the target one of "
                    f"{self.vocab_size}: they must share one"
                )
            row = self._ruled(row, ids, self.draft_memory)
            # The rules may leave nothing of a draft that knows a single token (NaN where they
            # normalise): then it has nothing to propose.
            if not row.max().item() > -math.inf:
                break
            probs = self._probs(row)
            token = draw(probs, self.uniform())
            proposals.append(Proposal(token, probs))
            ids.append(token)
            if token in self.eos_ids:
                break
        return proposals

    def _ruled(
        self, row: Float[Tensor, "V"], ids: list[int], memory: dict[object, Tensor]
    ) -> Float[Tensor, "V"]:
        """The log-probabilities after the new tokens `ids` under the rules."""
        if not self.rules:
            return row
        generated = torch.tensor([ids], dtype=torch.long, device=row.device)
        sentence = torch.zeros(1, dtype=torch.long, device=row.device)
        context = Context([self.prompt], generated, sentence, memory)
        return apply_rules(self.rules, row[None], context)[0]

    def _probs(self, row: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """What the next token is drawn from: the row normalised, or its first largest alone.

        On the host in double precision: the verdicts then wait for no device.
        """
        if self.greedy:
            return one_hot(row.argmax().cpu(), len(row)).double()
        return row.cpu().double().softmax(dim=0)

    def _add(self, token: int, log_prob: float) -> None:
        self.ids.append(token)
        self.token_log_probs.append(log_prob)
        self.finished = token in self.eos_ids or (
            self.stop is not None and self.stop(0, list(self.ids))
        )
        self.ended = self.finished or len(self.ids) == self.max_new_tokens

    def _read_vocab_size(self, rows: Float[Tensor, "t V"]) -> int:
        """The size of the vocabulary, which must hold every id that is known."""
        size, largest = rows.shape[1], max([*self.prompt, *self.eos_ids])
        if largest >= size:
            raise UserError(
                f"token id {largest} (prompt or EOS) is outside the vocabulary: "
                f"the target gives {size} log-probabilities"
            )
        return size
