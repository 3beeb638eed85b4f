"""The request of a search, checked: starts, lengths, ends of text and rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.context import Rule
from heedful.generation.token_rules import ForcedTokens, MinLength, NoRepeatNgram

Starts = Int[Tensor, "B t0"] | Sequence[Sequence[int]]
PerSentence = int | Sequence[int] | Int[Tensor, "B"]
EosIds = int | Sequence[int]

End = Literal["eos", "stop", "length", "dead_end"]
"""Why a row ended: an EOS, a `stop` function, the length limit, or nothing that may come."""

StopFunction = Callable[[int, list[int]], bool]
"""`stop(sentence index, new token ids) -> whether that is enough`."""


@dataclass(frozen=True)
class Request:
    """Where each of `B` sentences starts, how long it may become, and every rule, in order."""

    start: Int[Tensor, "B t0"]
    prompts: list[list[int]]
    eos_ids: tuple[int, ...]
    shortest: list[int]
    longest: list[int]
    rules: list[Rule]
    force_eos: bool = False
    largest_id: int = 0

    @property
    def batch(self) -> int:
        """B."""
        return len(self.start)

    def end(self, sentence: int, ids: list[int], stop: StopFunction | None) -> End | None:
        """Whether new tokens end with the last of them, and why."""
        if ids[-1] in self.eos_ids:
            return "eos"
        long_enough = len(ids) >= self.shortest[sentence]
        if stop is not None and long_enough and stop(sentence, list(ids)):
            return "stop"
        return "length" if len(ids) == self.longest[sentence] else None


def read_request(
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
) -> Request:
    """What any search may be asked for.

    The rules come in this order: no early end (first, so that a rule which keeps few tokens keeps
    some that may come), the caller's, n-grams, the forced end, the forced prefix.

    Args:
        start: `(B, t0)` ids that every hypothesis of the sentence goes on from; `t0` may be 0.
        eos_id: what ends a hypothesis, one id or several.
        max_new_tokens: EOS included; one number, or one for each sentence. So `min_new_tokens`
            (which transformers counts without EOS).
        no_repeat_ngram_size: no n-gram of this size twice in the new tokens; 0 for no rule. The
            start does not count.
        forced_prefix: for each sentence the first new tokens, of any length. They win over the
            other rules, with the model's log-probabilities. EOS may only come last.
        force_eos: at the last allowed token only EOS (the first of several) may follow, its
            log-probability counts and the hypothesis is marked as not finished.
        rules: logit rules, in their order.
        prompts: the real prompt tokens of each sentence, for the rules that look at them; a search
            itself never looks into `start`. None: no prompts.

    Raises:
        UserError: an argument out of range.
    """
    starts = _read_start(start)
    batch = len(starts)
    longest = _per_sentence("max_new_tokens", max_new_tokens, batch, least=1)
    shortest = _per_sentence("min_new_tokens", min_new_tokens, batch, least=0)
    for sentence, (low, high) in enumerate(zip(shortest, longest, strict=True)):
        if low > high:
            raise UserError(
                f"sentence {sentence}: min_new_tokens = {low} is above max_new_tokens = {high}"
            )
    eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(int(token) for token in eos_id)
    if not eos_ids or min(eos_ids) < 0:
        raise UserError(f"eos_id must be a token id, or some, not {eos_id}")
    eos_ids = tuple(dict.fromkeys(eos_ids))
    if no_repeat_ngram_size < 0:
        raise UserError(f"no_repeat_ngram_size must be 0 or more, not {no_repeat_ngram_size}")
    forced = _of_each("forced_prefix", "prefixes", forced_prefix, batch)
    all_rules: list[Rule] = [MinLength(eos_ids, shortest)] if max(shortest, default=0) > 1 else []
    all_rules += rules
    if no_repeat_ngram_size:
        all_rules.append(NoRepeatNgram(no_repeat_ngram_size))
    if force_eos:
        all_rules.append(
            ForcedTokens([{length - 1: eos_ids[0]} for length in longest], always=False)
        )
    request = Request(
        starts,
        _of_each("prompts", "prompts", prompts, batch),
        eos_ids,
        shortest,
        longest,
        all_rules,
        force_eos,
        max([*eos_ids, *(token for tokens in forced for token in tokens)]),
    )
    for sentence, tokens in enumerate(forced):
        _check_forced(request, sentence, tokens)
    if any(forced):
        places = [dict(enumerate(tokens)) for tokens in forced]
        request.rules.append(ForcedTokens(places, always=False))
    return request


def _read_start(start: Starts) -> Int[Tensor, "B t0"]:
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


def _of_each(
    name: str, what: str, rows: Sequence[Sequence[int]] | None, batch: int
) -> list[list[int]]:
    """Ids for each sentence, none where none are given."""
    if rows is None:
        return [[] for _ in range(batch)]
    if len(rows) != batch:
        raise UserError(f"{name} has {len(rows)} {what} for {batch} sentences")
    return [[int(token) for token in tokens] for tokens in rows]


def _check_forced(request: Request, sentence: int, tokens: list[int]) -> None:
    where = f"forced_prefix of sentence {sentence}"
    ends = bool(tokens) and tokens[-1] in request.eos_ids
    early = [token for token in tokens[:-1] if token in request.eos_ids]
    if min(tokens, default=0) < 0:
        raise UserError(f"{where} holds {min(tokens)}, which is no token id")
    if early:
        raise UserError(f"{where} holds EOS ({early[0]}) before its last token")
    if ends and len(tokens) < request.shortest[sentence]:
        raise UserError(f"{where} ends after {len(tokens)} tokens, below min_new_tokens")
    limit = request.longest[sentence] - (request.force_eos and not ends)
    if len(tokens) > limit:
        raise UserError(f"{where} has {len(tokens)} tokens, but max_new_tokens leaves {limit}")
