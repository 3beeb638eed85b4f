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
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from heedful.errors import UserError
from heedful.generation.decoding import DecodingStep, check_shape
from heedful.generation.hypotheses import Hypothesis, LengthScore
from heedful.generation.request import SearchRequest, StopFunction
from heedful.generation.state import check_largest

_LONGEST_MATCH = 3  # tokens that a lookup compares at most


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


class Speculation:
    """The output so far, and how it grows by one call of the target.

    Iterated, it gives after each call the tokens that were added: at least one, but for a last call
    that met a dead end. The first call reads the prompt and gives one token; each later one reads
    up to `num_draft_tokens` proposals and gives those it accepts and one token more. The target is
    rewound to nothing first, and never holds more than `len(prompt) + max_new_tokens - 1` tokens.
    `num_target_calls` counts its calls, the one for the prompt included, `num_proposed` the draft's
    tokens and `num_accepted` those of them that the output holds.

    Args:
        target: whose greedy continuation or samples are wanted.
        prompt: at least one token.
        num_draft_tokens: how many tokens the draft may propose for each call of the target.
        seed: of the random numbers of sampling; None for greedy decoding.
        stop: asked after each token other than EOS, with 0 (the sentence) and all new tokens;
            where it says yes the output is finished.
        options: eos_id, max_new_tokens and more, as of `SearchRequest.from_options`; rules change
            log-probabilities of the draft and of the target alike.
    """

    def __init__(
        self,
        target: Scorer,
        draft: Draft,
        prompt: Sequence[int],
        *,
        num_draft_tokens: int = 4,
        seed: int | None = None,
        stop: StopFunction | None = None,
        **options: Any,
    ) -> None:
        self._request = SearchRequest.from_options([prompt], **{"prompts": [prompt]} | options)
        if num_draft_tokens < 1:
            raise UserError(f"num_draft_tokens must be at least 1, not {num_draft_tokens}")
        if not len(prompt):
            raise UserError("the prompt is empty: give it at least one token, for example BOS")
        if min(prompt) < 0:
            raise UserError(f"the prompt holds {min(prompt)}, which is no token id")
        if seed is not None and seed < 0:
            raise UserError(f"seed must be 0 or more, not {seed}")
        self._target, self._draft = Reader(target, "the target"), draft
        self._prompt, self._longest = list(map(int, prompt)), self._request.max_new_tokens[0]
        self._num_draft_tokens, self._stop = num_draft_tokens, stop
        self._greedy, self._uniform = seed is None, random.Random(seed or 0).random
        largest = max(*self._prompt, self._request.largest_id)
        request = replace(self._request, largest_id=largest)
        self._target_step = DecodingStep(request, "the target")
        self._draft_step = DecodingStep(request, "the draft")
        self._vocab_size: int | None = None
        self.num_target_calls = self.num_proposed = self.num_accepted = 0
        self.ids: list[int] = []
        self.token_log_probs: list[float] = []
        self.ended = self.finished = False

    def __iter__(self) -> Iterator[list[int]]:
        while not self.ended:
            before = len(self.ids)
            with torch.no_grad():  # not held while the caller has the tokens
                self._round()
            yield self.ids[before:]

    def result(self) -> Hypothesis:
        """What there is by now; log-probabilities are the target's, before any rule."""
        return LengthScore().hypothesis(self.ids, self.token_log_probs, self.finished)

    def _round(self) -> None:
        """Propose, call the target once, and add what it accepts and one token of its own."""
        proposals = self._propose()
        drafted = [token for token, _ in proposals]
        rows = self._target.log_probs(self._prompt + self.ids + drafted, len(drafted) + 1)
        self.num_target_calls += 1
        self.num_proposed += len(proposals)
        self._vocab_size = rows.shape[1]
        for row, proposal in zip(rows, [*proposals, None], strict=True):
            ruled = self._ruled(self._target_step, row, self.ids)
            best = ruled.max().item()  # NaN where any is NaN
            if math.isnan(best):
                raise UserError(f"a rule gave NaN at step {len(self.ids) + 1}")
            if best == -math.inf:
                self.ended = True
                return
            probs = self._probs(ruled)
            if proposal is None:
                token, accepted = draw(probs, self._uniform()), False
            else:
                token, accepted = verify(*proposal, probs, self._uniform)
            self.num_accepted += accepted
            self.ids.append(token)
            self.token_log_probs.append(row[token].item())
            end = self._request.end_reason(0, self.ids, self._stop)
            self.ended, self.finished = end is not None, end in ("eos", "stop")
            if self.ended or not accepted:
                return

    def _propose(self) -> list[tuple[int, Float[Tensor, "V"]]]:
        """The draft's next tokens, each with what it was drawn from: none beyond the output's end.

        The last place under the limit is left to the target, which always adds a token. The first
        round has none, since it is the one that tells the size of the vocabulary.
        """
        proposals: list[tuple[int, Tensor]] = []
        ids = list(self.ids)
        most = min(self._num_draft_tokens, self._longest - len(ids) - 1)
        while self._vocab_size is not None and len(proposals) < most:
            row = self._draft.next_log_probs(self._prompt + ids, self._vocab_size)
            if row is None:
                break
            if len(row) != self._vocab_size:
                raise UserError(
                    f"the draft has a vocabulary of {len(row)} tokens and the target one of "
                    f"{self._vocab_size}: they must share one"
                )
            row = self._ruled(self._draft_step, row, ids)
            # The rules may leave nothing of a draft that knows a single token (NaN where they
            # normalise): then it has nothing to propose.
            if not row.max().item() > -math.inf:
                break
            probs = self._probs(row)
            proposals.append((draw(probs, self._uniform()), probs))
            ids.append(proposals[-1][0])
            if ids[-1] in self._request.eos_ids:
                break
        return proposals

    def _ruled(
        self, step: DecodingStep, row: Float[Tensor, "V"], ids: list[int]
    ) -> Float[Tensor, "V"]:
        """The log-probabilities after the new tokens `ids` under the rules."""
        return step(row[None], torch.tensor([ids], dtype=torch.long, device=row.device), [0])[0]

    def _probs(self, row: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """What the next token is drawn from: the row normalised, or its first largest alone.

        On the host in double precision: the verdicts then wait for no device.
        """
        if self._greedy:
            return one_hot(row.argmax().cpu(), len(row)).double()
        return row.cpu().double().softmax(dim=0)


class PromptLookup:
    """A draft without a model: what followed the same last tokens earlier in prompt and output.

    Of the earlier places the one that agrees with the most last tokens counts, up to three, and of
    equals the latest. All mass is on that one token. It pays where the output repeats the input, as
    in editing and summaries (Saxena 2023, "Prompt Lookup Decoding").
    """

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """Log-probability 0 for the token that followed, -inf for the others."""
        best, token = 0, -1
        for end in range(len(ids) - 2, -1, -1):  # a match ends here, and ids[end + 1] follows it
            agreeing = 0
            while agreeing < min(_LONGEST_MATCH, end + 1) and (
                ids[end - agreeing] == ids[-1 - agreeing]
            ):
                agreeing += 1
            if agreeing > best:
                best, token = agreeing, ids[end + 1]
            if best == _LONGEST_MATCH:
                break
        if not best:
            return None
        return torch.full((vocab_size,), -torch.inf).index_fill(0, torch.tensor(token), 0.0)


class Reader:
    """A scorer together with the tokens it holds, so that it is fed only what is new.

    As a draft it is a smaller language model. The scorer belongs to it: it is rewound to nothing
    now, and to what is still right after each rejection. As a draft it never holds more than
    `len(prompt) + max_new_tokens - 2` tokens.

    Args:
        longest: most tokens that the scorer can hold; behind them a draft proposes nothing.
    """

    def __init__(self, scorer: Scorer, name: str = "the draft", longest: int | None = None) -> None:
        scorer.rewind(0)
        self._scorer = scorer
        self._name = name
        self._longest = longest
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
        check_shape(rows, len(new), self._name, "tokens")
        rows = rows[-count:]
        check_largest(rows.amax().item(), len(ids), self._name)
        return rows

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """Log-probabilities of the token after `ids`; None where they are too many."""
        if self._longest is not None and len(ids) > self._longest:
            return None
        return self.log_probs(list(ids), 1)[0]


def verify(
    token: int,
    proposed: Float[Tensor, "V"],
    probs: Float[Tensor, "V"],
    uniform: Callable[[], float],
) -> tuple[int, bool]:
    """A token distributed as `probs`, and whether it is the one drawn from `proposed`.

    A proposal x drawn from q is accepted with probability min(1, p(x) / q(x)); otherwise the token
    is drawn from the normalised (p - q)+ (Leviathan et al. 2023, section 2.3 and appendix A.1).
    `uniform` gives independent numbers from [0, 1).
    """
    if uniform() * proposed[token].item() < probs[token].item():
        return token, True
    missing = (probs - proposed).clamp(min=0)
    # p and q that differ by rounding alone may leave nothing.
    return draw(missing if missing.any() else probs, uniform()), False


def draw(weights: Float[Tensor, "V"], number: float) -> int:
    """The token at `number`, from [0, 1), of the cumulative weights: never one of weight 0."""
    sums = weights.cumsum(dim=0)
    return int(torch.searchsorted(sums, number * sums[-1], right=True))
