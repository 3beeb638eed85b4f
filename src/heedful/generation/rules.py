"""Logit rules with one number, the rules for a set of options, and their application in order.

Rules that forbid or force single tokens are in `heedful.generation.token_rules`.
"""

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.context import Context, Rule
from heedful.generation.state import sum_dtype
from heedful.generation.token_rules import (
    BannedTokens,
    ForcedTokens,
    MinLength,
    NoRepeatNgram,
    PrefixFunction,
)
from heedful.generation.topk import in_top_k


def apply_rules(
    rules: Sequence[Rule], log_probs: Float[Tensor, "N V"], context: Context
) -> Float[Tensor, "N V"]:
    """The log-probabilities after all rules, applied in order."""
    if context.model_log_probs is None:
        context = replace(context, model_log_probs=log_probs)
    for rule in rules:
        shape = log_probs.shape
        log_probs = rule(log_probs, context)
        if log_probs.shape != shape:
            raise UserError(
                f"{rule} gave shape {tuple(log_probs.shape)}: it must keep {tuple(shape)}"
            )
    return log_probs


def bans_are_final(rules: Sequence[Rule], length: int) -> bool:
    """True if no rule allows, after `length` new tokens, a token that an earlier rule forbids.

    Then no rule reads the model's log-probability of a forbidden token, and rules may write in
    place. Forced tokens do read it, and a rule of the caller could.
    """
    return all(
        not rule.forces(length)
        if isinstance(rule, ForcedTokens)
        else isinstance(
            rule, _NumberRule | NoRepeatNgram | BannedTokens | MinLength | PrefixFunction
        )
        for rule in rules
    )


def sampling_rules(**options: Any) -> list[Rule]:
    """The rules for options named as in `RULES_BY_OPTION`, in its order.

    No rule is added for an option without a value, or for an n-gram size of 0. Penalties, and rules
    that forbid or force tokens, come before those that reshape or truncate the distribution.
    """
    return [
        rule(options[name])
        for name, rule in RULES_BY_OPTION.items()
        if options.get(name) is not None
        and not (isinstance(options[name], Sized) and not options[name])
        and (name, options[name]) != ("no_repeat_ngram_size", 0)
    ]


# --- Rules of one number ------------------------------------------------------------------------


class _Range(NamedTuple):
    contains: Callable[[float], bool]
    description: str


_POSITIVE = _Range(lambda x: 0 < x < math.inf, "a finite number above 0")
_FINITE = _Range(math.isfinite, "a finite number")
_FRACTION = _Range(lambda x: 0 < x <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class _NumberRule:
    """A rule with one number, checked against the range of the option of that name."""

    value: int | float
    option: ClassVar[str]
    limits: ClassVar[_Range]

    def __init_subclass__(cls, option: str, limits: _Range) -> None:
        cls.option, cls.limits = option, limits

    def __post_init__(self) -> None:
        if not self.limits.contains(self.value):
            hint = "; temperature 0 of generate is greedy decoding"
            raise UserError(
                f"{self.option} must be {self.limits.description}, not {self.value}"
                f"{hint if self.option == 'temperature' else ''}"
            )


class Temperature(_NumberRule, option="temperature", limits=_POSITIVE):
    """Divides log-probabilities by the temperature: sharper below 1, flatter above 1.

    Temperatures below 1e-30 and above 1e30 act as these: in fp32 all quotients could be -inf, or
    NaN. There only the most probable tokens, or all with equal probability, are left anyway.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        return log_probs / min(max(self.value, 1e-30), 1e30)


class TopK(_NumberRule, option="top_k", limits=_Range(lambda k: k >= 1, "at least 1")):
    """Keeps the `k` most probable tokens, exactly `k`: of equal ones those of lower ids."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value >= log_probs.shape[1]:
            return log_probs
        return log_probs.masked_fill(~in_top_k(log_probs, int(self.value)), -torch.inf)


class TopP(_NumberRule, option="top_p", limits=_FRACTION):
    """Nucleus sampling (Holtzman et al. 2020): the most probable tokens until they sum to `p`.

    The token that reaches the sum stays, so at least one does. Of equal tokens those of lower ids
    come first.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        return _until_sum(log_probs, -log_probs, self.value)


class MinP(_NumberRule, option="min_p", limits=_Range(lambda p: 0 <= p <= 1, "from 0 to 1")):
    """Keeps tokens at least `p` times as probable as the best one (Nguyen et al. 2024)."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value == 0:
            return log_probs
        values = log_probs.to(_at_least_single(log_probs.dtype))
        least = values.amax(dim=1, keepdim=True) + math.log(self.value)
        return log_probs.masked_fill(values < least, -torch.inf)


class Typical(_NumberRule, option="typical_p", limits=_FRACTION):
    """Locally typical tokens (Meister et al. 2022, "Locally Typical Sampling", section 4).

    Keeps tokens in order of the distance between their information -log p and the entropy, until
    their probabilities sum to `p`; the token that reaches the sum stays.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        normal = log_probs.log_softmax(dim=1, dtype=_at_least_single(log_probs.dtype))
        terms = torch.where(normal > -torch.inf, normal.exp() * normal, 0.0)
        entropy = -terms.sum(dim=1, keepdim=True)
        return _until_sum(log_probs, (-normal - entropy).abs(), self.value)


class RepetitionPenalty(_NumberRule, option="repetition_penalty", limits=_POSITIVE):
    """Penalty of CTRL (Keskar et al. 2019, section 4.1) on tokens of the prompt and new tokens.

    A log-probability is multiplied by the penalty, a value above 0 divided by it. CTRL divides
    logits, which are defined up to a constant; this rule, like that of beam search in transformers
    (but not of sampling there), is applied to log-probabilities.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        is_repeated = _counts(context.history(), log_probs) > 0
        scaled = torch.where(log_probs < 0, log_probs * self.value, log_probs / self.value)
        return torch.where(is_repeated, scaled, log_probs)


class PresencePenalty(_NumberRule, option="presence_penalty", limits=_FINITE):
    """Penalty of OpenAI's API: subtracted from each token that is among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * (_counts(context.generated, log_probs) > 0)


class FrequencyPenalty(_NumberRule, option="frequency_penalty", limits=_FINITE):
    """Penalty of OpenAI's API: subtracted once for each occurrence among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * _counts(context.generated, log_probs)


RULES_BY_OPTION: dict[str, Callable[[Any], Rule]] = {
    "suppressed": BannedTokens,  # by the model
    "repetition_penalty": RepetitionPenalty,
    "presence_penalty": PresencePenalty,
    "frequency_penalty": FrequencyPenalty,
    "no_repeat_ngram_size": NoRepeatNgram,
    "banned": BannedTokens,
    "prefix_function": PrefixFunction,
    "forced": ForcedTokens,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "typical_p": Typical,
}


# --- Helpers ------------------------------------------------------------------------------------


def _until_sum(
    log_probs: Float[Tensor, "N V"], key: Float[Tensor, "N V"], share: float
) -> Float[Tensor, "N V"]:
    """Keeps tokens in ascending order of `key` until their probabilities sum to `share`."""
    if share == 1:
        return log_probs
    order = key.sort(dim=1, stable=True).indices
    probs = log_probs.to(sum_dtype(log_probs.device)).softmax(dim=1).gather(1, order)
    reached = probs.cumsum(dim=1) >= share
    # A token is removed if the sum is reached before it; the first one never is.
    is_removed: Bool[Tensor, "N V"] = torch.zeros_like(reached)
    is_removed.scatter_(1, order, reached.roll(1, dims=1).index_fill_(1, order.new_zeros(1), False))
    return log_probs.masked_fill(is_removed, -torch.inf)


def _counts(tokens: Int[Tensor, "N all"], like: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Occurrences of each id of the vocabulary in each row; other ids are ignored."""
    rows, size = like.shape
    outside = (tokens < 0) | (tokens >= size)
    counts = like.new_zeros(rows, size + 1, dtype=_at_least_single(like.dtype))
    ones = torch.ones_like(tokens, dtype=counts.dtype)
    return counts.scatter_add_(1, tokens.masked_fill(outside, size), ones)[:, :size]


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Single precision in place of 16-bit formats, which are too coarse for counts and sums."""
    return torch.promote_types(dtype, torch.float32)
