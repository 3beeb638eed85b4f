"""Speculative decoding: a cheap draft proposes several tokens, the target checks them in one call.

The result is that of the target alone: the same tokens with greedy decoding, the same distribution
with sampling.
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
from heedful.generation.outputs import Failure, Hypothesis, LengthScore
from heedful.generation.request import SearchRequest, StopFunction, check_largest
from heedful.generation.search_base import RequestRules, check_shape

_MAX_NGRAM = 3  # tokens that `PromptLookup` compares


@runtime_checkable
class Scorer(Protocol):
    """A language model with the tokens of one sequence in its state, for example in a cache."""

    def feed(self, tokens: Int[Tensor, "t"]) -> Float[Tensor, "t V"]:
        """Append `t` >= 1 tokens (on the host): log-probabilities of the next token after each."""

    def rewind(self, length: int) -> None:
        """Remove all but the first `length` tokens, which is at most the number fed."""


@runtime_checkable
class Draft(Protocol):
    """A source of proposed tokens.

    The distribution of the output does not depend on the draft; its speed does, so a draft should
    be cheap and often right.
    """

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """The draft's distribution of the token after `ids`; None: no proposal.

        `ids` are the prompt, the output so far and the proposals after it. From one call to the
        next they can become longer, or shorter and different after a rejection.
        """


class Speculation:
    """Speculative decoding of one output; each iteration calls the target once.

    An iteration returns the tokens that it adds: at least one, except for a last one at a dead end.
    The first call of the target is for the prompt and adds one token; each later call is for up to
    `num_draft_tokens` proposals and adds the accepted ones and one token more. The target is
    rewound first, and never holds more than `len(prompt) + max_new_tokens - 1` tokens.

    Args:
        target: the model whose greedy output or sample is computed.
        prompt: at least one token.
        num_draft_tokens: the largest number of proposals for each call of the target.
        seed: for sampling; None: greedy decoding.
        stop: called after each token other than EOS with 0 (the sentence) and all new tokens; where
            it returns True the output is finished.
        options: `eos_id`, `max_new_tokens` and more, see `SearchRequest.from_options`. Rules apply
            to the log-probabilities of the draft and of the target.

    Attributes:
        num_target_calls: calls of the target so far, the one for the prompt included.
        num_proposed: tokens of the draft so far.
        num_accepted: tokens of the draft that the output contains.
        failure: see `Hypothesis`.
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
        self._target, self._draft = CachedScorer(target, "the target"), draft
        self._prompt, self._limit = list(map(int, prompt)), self._request.max_new_tokens[0]
        self._num_draft_tokens, self._stop = num_draft_tokens, stop
        self._greedy, self._uniform = seed is None, random.Random(seed or 0).random
        largest = max(*self._prompt, self._request.largest_id)
        request = replace(self._request, largest_id=largest)
        self._target_rules = RequestRules(request, "the target")
        self._draft_rules = RequestRules(request, "the draft")
        self._vocab_size: int | None = None
        self.num_target_calls = self.num_proposed = self.num_accepted = 0
        self.ids: list[int] = []
        self.token_log_probs: list[float] = []
        self.ended = self.finished = False
        self.failure: Failure | None = None

    def __iter__(self) -> Iterator[list[int]]:
        while not self.ended:
            before = len(self.ids)
            with torch.no_grad():  # not held while the caller has the tokens
                self._round()
            yield self.ids[before:]

    def result(self, score: LengthScore | None = None) -> Hypothesis:
        """The output so far; its log-probabilities are the target's, before any rule.

        Args:
            score: computes the score; None: the mean log-probability of a token.
        """
        score = score or LengthScore()
        return score.hypothesis(self.ids, self.token_log_probs, self.finished, self.failure)

    def _round(self) -> None:
        """Propose, call the target once, and add the accepted tokens and one of the target."""
        proposals, before = self._propose(), len(self.ids)
        draft_ids = [token for token, _ in proposals]
        rows = self._target.log_probs(self._prompt + self.ids + draft_ids, len(draft_ids) + 1)
        self.num_target_calls += 1
        self.num_proposed += len(proposals)
        self._vocab_size = rows.shape[1]
        for row, proposal in zip(rows, [*proposals, None], strict=True):
            log_probs = self._under_rules(self._target_rules, row, self.ids)
            best = log_probs.max().item()  # NaN where any is NaN
            if math.isnan(best):
                raise UserError(f"a rule gave NaN at step {len(self.ids) + 1}")
            if best == -math.inf:
                if len(self.ids) == before:  # else the next round finds it, and adds nothing
                    self.ended, self.failure = True, "dead_end"
                return
            probs = self._probs(log_probs)
            if proposal is None:
                token, accepted = sample_token(probs, self._uniform()), False
            else:
                token, accepted = accept_or_resample(*proposal, probs, self._uniform)
            self.num_accepted += accepted
            self.ids.append(token)
            self.token_log_probs.append(row[token].item())
            end = self._request.end_reason(0, self.ids, self._stop)
            self.ended, self.finished = end is not None, end in ("eos", "stop")
            if self.ended or not accepted:
                return

    def _propose(self) -> list[tuple[int, Float[Tensor, "V"]]]:
        """The draft's next tokens up to an EOS, each with the distribution that it is sampled from.

        One token under the length limit is left to the target, which always adds one. The first
        round has no proposals, because the size of the vocabulary is not known before it.
        """
        proposals: list[tuple[int, Tensor]] = []
        ids = list(self.ids)
        count = min(self._num_draft_tokens, self._limit - len(ids) - 1)
        while self._vocab_size is not None and len(proposals) < count:
            row = self._draft.next_log_probs(self._prompt + ids, self._vocab_size)
            if row is None:
                break
            if len(row) != self._vocab_size:
                raise UserError(
                    f"the draft has a vocabulary of {len(row)} tokens and the target one of "
                    f"{self._vocab_size}: they must share one"
                )
            row = self._under_rules(self._draft_rules, row, ids)
            # The rules may forbid all tokens of a draft with few (NaN, if they normalize): then
            # there is no proposal.
            if not row.max().item() > -math.inf:
                break
            probs = self._probs(row)
            proposals.append((sample_token(probs, self._uniform()), probs))
            ids.append(proposals[-1][0])
            if ids[-1] in self._request.eos_ids:
                break
        return proposals

    def _under_rules(
        self, rules: RequestRules, row: Float[Tensor, "V"], ids: list[int]
    ) -> Float[Tensor, "V"]:
        """The log-probabilities of the token after the new tokens `ids` under the rules."""
        return rules(row[None], torch.tensor([ids], dtype=torch.long, device=row.device), [0])[0]

    def _probs(self, row: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """The distribution to sample from: the normalized row; for greedy decoding, its argmax.

        It is on the host, where acceptance is decided, in double precision.
        """
        if self._greedy:
            return one_hot(row.argmax().cpu(), len(row)).double()
        return row.cpu().double().softmax(dim=0)


class PromptLookup:
    """A draft without a model: the token that followed the last n-gram earlier in `ids`.

    The longest n-gram with an earlier occurrence is used, up to trigrams, and its last occurrence.
    All probability is on that token. It is fast where the output repeats the input, as in editing
    and summarization (Saxena 2023, "Prompt Lookup Decoding").
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of each n-gram in them, ascending

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """Log-probability 0 for the token that followed, -inf for the others."""
        self._read([*ids])
        for size in range(min(_MAX_NGRAM, len(ids)), 0, -1):
            ends = self._ends[tuple(self._ids[-size:])]
            if len(ends) > 1:  # the last one is that of all ids
                token = torch.tensor(self._ids[ends[-2] + 1])
                return torch.full((vocab_size,), -torch.inf).index_fill(0, token, 0.0)
        return None

    def _read(self, ids: list[int]) -> None:
        """Read the n-grams of ids, of which those that the last ids began with are known."""
        known = min(len(self._ids), len(ids))
        while self._ids[:known] != ids[:known]:
            known -= 1
        for end in range(len(self._ids) - 1, known - 1, -1):
            for ngram in _ngrams(self._ids, end):
                self._ends[ngram].pop()
        for end in range(known, len(ids)):
            for ngram in _ngrams(ids, end):
                self._ends.setdefault(ngram, []).append(end)
        self._ids = ids


def _ngrams(ids: list[int], end: int) -> Iterator[tuple[int, ...]]:
    """The n-grams whose last token has an index."""
    for size in range(1, min(_MAX_NGRAM, end + 1) + 1):
        yield tuple(ids[end - size + 1 : end + 1])


class CachedScorer:
    """A scorer with a record of the tokens in its state, so that it is fed only new ones.

    As a `Draft` it is a smaller language model, which never holds more than
    `len(prompt) + max_new_tokens - 2` tokens. The scorer must not be used elsewhere: it is rewound
    here, at first to the start and then to the tokens that a call has in common with the last one.

    Args:
        max_length: the most tokens that the scorer can hold; a draft proposes none after them.
    """

    def __init__(
        self, scorer: Scorer, name: str = "the draft", max_length: int | None = None
    ) -> None:
        scorer.rewind(0)
        self._scorer = scorer
        self._name = name
        self._max_length = max_length
        self._fed: list[int] = []

    def log_probs(self, ids: list[int], count: int) -> Float[Tensor, "count V"]:
        """Log-probabilities of the next token after each of the last `count` tokens of `ids`."""
        known = min(len(self._fed), len(ids) - count)
        while self._fed[:known] != ids[:known]:
            known -= 1
        if known < len(self._fed):
            self._scorer.rewind(known)
        new = ids[known:]
        rows = self._scorer.feed(torch.tensor(new))
        self._fed = list(ids)
        check_shape(rows, len(new), self._name, "tokens")
        rows = rows[-count:]
        check_largest(rows.amax().item(), len(ids), self._name)
        return rows

    def next_log_probs(self, ids: Sequence[int], vocab_size: int) -> Float[Tensor, "V"] | None:
        """Log-probabilities of the token after `ids`; None if these are too many."""
        if self._max_length is not None and len(ids) > self._max_length:
            return None
        return self.log_probs(list(ids), 1)[0]


def accept_or_resample(
    token: int,
    proposed: Float[Tensor, "V"],
    probs: Float[Tensor, "V"],
    uniform: Callable[[], float],
) -> tuple[int, bool]:
    """A token distributed as `probs`, and True if it is the one sampled from `proposed`.

    A proposal x sampled from q is accepted with probability min(1, p(x) / q(x)); otherwise the
    token is sampled from the normalized (p - q)+ (Leviathan et al. 2023, section 2.3 and appendix
    A.1).

    Args:
        uniform: returns independent numbers from [0, 1).
    """
    if uniform() * proposed[token].item() < probs[token].item():
        return token, True
    residual = (probs - proposed).clamp(min=0)
    # The residual of p and q that differ by rounding alone can be zero.
    return sample_token(residual if residual.any() else probs, uniform()), False


def sample_token(weights: Float[Tensor, "V"], number: float) -> int:
    """The token at `number`, from [0, 1), of the cumulative weights; its weight is above 0."""
    sums = weights.cumsum(dim=0)
    return int(torch.searchsorted(sums, number * sums[-1], right=True))
