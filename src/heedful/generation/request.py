"""The input of a search: start tokens, limits, EOS ids and rules; and the next-token function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.outputs import Hypothesis
from heedful.generation.token_rules import ForcedTokens, MinLength, NoRepeatNgram, Rule

Starts = Int[Tensor, "B t0"] | Sequence[Sequence[int]]
PerSentence = int | Sequence[int] | Int[Tensor, "B"]
EosIds = int | Sequence[int]

EndReason = Literal["eos", "stop", "length", "dead_end"]
"""Why an output ended: an EOS, a `stop` function, the length limit, or no possible next token."""

StopFunction = Callable[[int, list[int]], bool]
"""`stop(sentence index, new token ids)` is True where the output ends after these tokens."""

DoneFunction = Callable[[int, list[Hypothesis]], None]
"""Called with the index and the hypotheses of a sentence when a search has completed it."""


@dataclass(frozen=True)
class SearchRequest:
    """The start tokens of `B` sentences, the limits of their outputs, and every rule, in order.

    Attributes:
        start: ids that every hypothesis of a sentence continues.
        prompts: prompt ids of each sentence, for rules.
        min_new_tokens, max_new_tokens: limits for each sentence, EOS included.
        force_eos: an EOS at the length limit is forced, and does not finish a hypothesis.
        largest_id: the largest id that the vocabulary must have.
        on_done: called for each sentence, while others may be in progress; None: nothing is.
        sources: ids of each sentence that the output is made from, for rules.
    """

    start: Int[Tensor, "B t0"]
    prompts: list[list[int]]
    eos_ids: tuple[int, ...]
    min_new_tokens: list[int]
    max_new_tokens: list[int]
    rules: list[Rule]
    force_eos: bool
    largest_id: int
    on_done: DoneFunction | None = None
    sources: list[list[int]] | None = None

    @classmethod
    def from_options(
        cls,
        start: Starts,
        *,
        eos_id: EosIds,
        max_new_tokens: PerSentence,
        min_new_tokens: PerSentence = 0,
        no_repeat_ngram_size: int = 0,
        forced_prefix: Sequence[Sequence[int]] | None = None,
        force_eos: bool = False,
        rules: Sequence[Rule] = (),
        prompts: Sequence[Sequence[int]] | None = None,
        sources: Sequence[Sequence[int]] | None = None,
        on_done: DoneFunction | None = None,
    ) -> "SearchRequest":
        """The request for options that all searches share.

        Rules apply in this order: the minimum length (first, so that a rule which keeps few tokens
        keeps allowed ones), `rules`, n-grams, the forced EOS, the forced prefix.

        Args:
            start: `(B, t0)` ids that every hypothesis of a sentence continues; `t0` may be 0.
            eos_id: the id, or ids, that end a hypothesis.
            max_new_tokens: EOS included; one number, or one for each sentence.
            min_new_tokens: likewise, EOS included (transformers counts it without EOS).
            no_repeat_ngram_size: no n-gram of this size occurs twice in the new tokens; 0: no rule.
                The start does not count.
            forced_prefix: the first new tokens of each sentence, of any length. They override the
                other rules and have the model's log-probabilities, or 0 where a rule makes the same
                token certain. EOS is allowed at the end only.
            force_eos: at the last allowed token only EOS (the first of several) may follow. Its
                log-probability counts, and the hypothesis is not finished.
            rules: logit rules, in order.
            prompts: the prompt tokens of each sentence without padding, for rules that read them;
                a search does not read `start` itself. None: no prompts.
            sources: the encoder's input for each sentence without padding, for rules that read it;
                None: the prompts.
            on_done: called with the index and the hypotheses of each sentence, best first, as soon
                as they are complete: by a beam search when the sentence leaves the batch.

        Raises:
            UserError: an argument out of range.
        """
        starts = _start_tensor(start)
        batch = len(starts)
        maxima = _per_sentence("max_new_tokens", max_new_tokens, batch, least=1)
        minima = _per_sentence("min_new_tokens", min_new_tokens, batch, least=0)
        for sentence, (low, high) in enumerate(zip(minima, maxima, strict=True)):
            if low > high:
                raise UserError(
                    f"sentence {sentence}: min_new_tokens = {low} is above max_new_tokens = {high}"
                )
        eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(int(token) for token in eos_id)
        if not eos_ids or min(eos_ids) < 0:
            raise UserError(f"eos_id must be a token id, or several, not {eos_id}")
        eos_ids = tuple(dict.fromkeys(eos_ids))
        if no_repeat_ngram_size < 0:
            raise UserError(f"no_repeat_ngram_size must be 0 or more, not {no_repeat_ngram_size}")
        prefixes = _ids_per_sentence("forced_prefix", "prefixes", forced_prefix, batch)
        all_rules: list[Rule] = [MinLength(eos_ids, minima)] if max(minima, default=0) > 1 else []
        all_rules += rules
        if no_repeat_ngram_size:
            all_rules.append(NoRepeatNgram(no_repeat_ngram_size))
        if force_eos:
            last = [{length - 1: eos_ids[0]} for length in maxima]
            all_rules.append(ForcedTokens(last, allow_impossible=False))
        request = cls(
            starts,
            _ids_per_sentence("prompts", "prompts", prompts, batch),
            eos_ids,
            minima,
            maxima,
            all_rules,
            force_eos,
            max([*eos_ids, *(token for tokens in prefixes for token in tokens)]),
            on_done,
            None if sources is None else _ids_per_sentence("sources", "sources", sources, batch),
        )
        if any(prefixes):
            for sentence, tokens in enumerate(prefixes):
                request._check_forced_prefix(sentence, tokens)
            request.rules.append(_prefix_rule(prefixes, rules))
        return request

    @property
    def batch(self) -> int:
        """B."""
        return len(self.start)

    def end_reason(
        self, sentence: int, ids: list[int], stop: StopFunction | None
    ) -> EndReason | None:
        """Why an output with these new tokens ends after the last of them; None: it continues."""
        if ids[-1] in self.eos_ids:
            return "eos"
        long_enough = len(ids) >= self.min_new_tokens[sentence]
        if stop is not None and long_enough and stop(sentence, list(ids)):
            return "stop"
        return "length" if len(ids) == self.max_new_tokens[sentence] else None

    def _check_forced_prefix(self, sentence: int, tokens: list[int]) -> None:
        where = f"forced_prefix of sentence {sentence}"
        ends = bool(tokens) and tokens[-1] in self.eos_ids
        early = [token for token in tokens[:-1] if token in self.eos_ids]
        if min(tokens, default=0) < 0:
            raise UserError(f"{where} holds {min(tokens)}, which is no token id")
        if early:
            raise UserError(f"{where} holds EOS ({early[0]}) before its last token")
        if ends and len(tokens) < self.min_new_tokens[sentence]:
            raise UserError(f"{where} ends after {len(tokens)} tokens, below min_new_tokens")
        limit = self.max_new_tokens[sentence] - (self.force_eos and not ends)
        if len(tokens) > limit:
            raise UserError(f"{where} has {len(tokens)} tokens, but max_new_tokens leaves {limit}")


def _prefix_rule(prefixes: Sequence[Sequence[int]], rules: Sequence[Rule]) -> ForcedTokens:
    """Forces the prefix of each sentence, but for tokens that one of the rules makes certain."""
    certain = [rule for rule in rules if isinstance(rule, ForcedTokens) and rule.certain]
    positions = [
        {
            position: token
            for position, token in enumerate(tokens)
            if all(rule.of_sentence(sentence).get(position) != token for rule in certain)
        }
        for sentence, tokens in enumerate(prefixes)
    ]
    return ForcedTokens(positions, allow_impossible=False)


def _start_tensor(start: Starts) -> Int[Tensor, "B t0"]:
    if isinstance(start, Tensor):
        return start.long()
    lengths = {len(ids) for ids in start}
    if len(lengths) > 1:
        raise UserError(f"starts must be equally long, but there are lengths {sorted(lengths)}")
    ids = [list(row) for row in start]
    return torch.tensor(ids, dtype=torch.long).view(len(ids), max(lengths, default=0))


def _per_sentence(name: str, value: PerSentence, batch: int, least: int) -> list[int]:
    numbers = [value] * batch if isinstance(value, int) else [int(number) for number in value]
    if len(numbers) != batch:
        raise UserError(f"{name} has {len(numbers)} numbers for {batch} sentences")
    for number in numbers:
        if number < least:
            raise UserError(f"{name} must be at least {least}, not {number}")
    return numbers


def _ids_per_sentence(
    name: str, noun: str, rows: Sequence[Sequence[int]] | None, batch: int
) -> list[list[int]]:
    """Ids for each sentence; empty for None."""
    if rows is None:
        return [[] for _ in range(batch)]
    if len(rows) != batch:
        raise UserError(f"{name} has {len(rows)} {noun} for {batch} sentences")
    return [[int(token) for token in tokens] for tokens in rows]


# --- The next-token function --------------------------------------------------------------------


NextLogProbs = Callable[..., Float[Tensor, "N V"]]
"""`f(prefixes (N, t)) -> (N, V)`, or `f(prefixes, state) -> (N, V)` for a search with a state.

With a state the search may overwrite the tensor that it returns.
"""

ROUNDING = 1e-3  # how far above 0 a log-probability may lie by rounding in 16-bit formats
LOG_SOFTMAX = "log-probabilities are at most 0, so use log_softmax of the logits"


@runtime_checkable
class State(Protocol):
    """Data that a next-token function keeps between calls, for example a cache.

    Each of `B` sentences has equally many rows, which are adjacent: one at the first call, then
    one for each of its `W` hypotheses or samples.
    """

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b continues the row `parents[b, w]` of that sentence."""

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Keep only these sentences, in this order."""


@runtime_checkable
class LogitState(State, Protocol):
    """A `State` that can return logits, for searches that need no normalized values.

    Attributes:
        has_logits: `next_logits` can be called.
        longest: up to so many tokens of a row, all calls but the first read its last one alone.
    """

    has_logits: bool
    longest: int

    def next_logits(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N V"]:
        """Logits after each row, in memory that the caller may write to."""


def check_largest(
    largest: float, step: int, source: str = "next_log_probs", advice: str = LOG_SOFTMAX
) -> None:
    """Raise UserError if the largest value of a step, which NaN is, is no log-probability."""
    check_not_nan(largest, step, source)
    if largest > ROUNDING:
        raise UserError(f"{source} gave {largest:.4g} at step {step}: {advice}")


def check_not_nan(value: float, step: int, source: str) -> None:
    """Raise UserError for NaN."""
    if value != value:
        raise UserError(f"{source} gave NaN at step {step}: look for an overflow in it")
