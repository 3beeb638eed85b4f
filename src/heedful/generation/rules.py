"""Logit rules, applied in order: those of one number, and how options become rules.

Those for single tokens are in `heedful.generation.token_rules`.
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
    """The log-probabilities under all rules, the first one first."""
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
    """Whether a token that one of the rules forbids after `length` new tokens stays forbidden.

    Its log-probability then does not matter any more, so that rules may write in place. Forced
    tokens are allowed again, and look at the log-probabilities before any rule; a rule from
    elsewhere may do so too.
    """
    return all(
        not rule.forces(length)
        if isinstance(rule, ForcedTokens)
        else isinstance(rule, _OfNumber | NoRepeatNgram | BannedTokens | MinLength | PrefixFunction)
        for rule in rules
    )


def sampling_rules(**options: Any) -> list[Rule]:
    """The rules that are asked for, in the usual order; None, 0 n-grams or empty leaves one out.

    Keywords, in that order: never (banned by the model), repetition_penalty, presence_penalty,
    frequency_penalty, no_repeat_ngram_size, banned, prefix_function, forced (what is forbidden or
    forced), then temperature, top_k, top_p, min_p and typical_p, each on what the one before left.
    """
    return [
        rule(options[name])
        for name, rule in IN_ORDER.items()
        if options.get(name) is not None
        and not (isinstance(options[name], Sized) and not options[name])
        and (name, options[name]) != ("no_repeat_ngram_size", 0)
    ]


# --- Rules of one number ------------------------------------------------------------------------


class _Range(NamedTuple):
    fits: Callable[[float], bool]
    says: str


_POSITIVE = _Range(lambda x: 0 < x < math.inf, "a finite number above 0")
_FINITE = _Range(math.isfinite, "a finite number")
_SHARE = _Range(lambda x: 0 < x <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class _OfNumber:
    """A rule with one number, named as the option that asks for it; raises UserError outside."""

    value: int | float
    option: ClassVar[str]
    within: ClassVar[_Range]

    def __init_subclass__(cls, option: str, within: _Range) -> None:
        cls.option, cls.within = option, within

    def __post_init__(self) -> None:
        if not self.within.fits(self.value):
            hint = "; 0 in generate takes the likeliest token each time"
            raise UserError(
                f"{self.option} must be {self.within.says}, not {self.value}"
                f"{hint if self.option == 'temperature' else ''}"
            )


class Temperature(_OfNumber, option="temperature", within=_POSITIVE):
    """Every log-probability divided by the temperature: below 1 sharper, above 1 flatter."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        return log_probs / self.value


class TopK(_OfNumber, option="top_k", within=_Range(lambda k: k >= 1, "at least 1")):
    """The `k` likeliest tokens, exactly `k` also among equals, where lower ids come first."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value >= log_probs.shape[1]:
            return log_probs
        return log_probs.masked_fill(~in_top_k(log_probs, int(self.value)), -torch.inf)


class TopP(_OfNumber, option="top_p", within=_SHARE):
    """The nucleus (Holtzman et al. 2020): the likeliest tokens until their sum reaches `p`.

    The token that reaches it stays, so at least one does. Lower ids come first among equals.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        return _until_sum(log_probs, -log_probs, self.value)


class MinP(_OfNumber, option="min_p", within=_Range(lambda p: 0 <= p <= 1, "from 0 to 1")):
    """Tokens at least `p` times as likely as the likeliest (Nguyen et al. 2024)."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value == 0:
            return log_probs
        values = log_probs.to(_at_least_single(log_probs.dtype))
        least = values.amax(dim=1, keepdim=True) + math.log(self.value)
        return log_probs.masked_fill(values < least, -torch.inf)


class Typical(_OfNumber, option="typical_p", within=_SHARE):
    """Locally typical tokens (Meister et al. 2022, "Locally Typical Sampling", section 4).

    Of the tokens ordered by how far their information -log p lies from the entropy, the first
    ones until their probabilities sum to `p`; the token that reaches it stays.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        normal = log_probs.log_softmax(dim=1, dtype=_at_least_single(log_probs.dtype))
        terms = torch.where(normal > -torch.inf, normal.exp() * normal, 0.0)
        entropy = -terms.sum(dim=1, keepdim=True)
        return _until_sum(log_probs, (-normal - entropy).abs(), self.value)


class RepetitionPenalty(_OfNumber, option="repetition_penalty", within=_POSITIVE):
    """CTRL's penalty (Keskar et al. 2019, section 4.1) on tokens of the prompt and the new ones.

    A log-probability is multiplied by the penalty, a value above 0 divided by it. CTRL divides
    logits, which depend on a constant that probabilities do not know; like transformers in its
    beam search (but not in its sampling) this rule sees log-probabilities.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        seen = _counts(context.history(), log_probs) > 0
        scaled = torch.where(log_probs < 0, log_probs * self.value, log_probs / self.value)
        return torch.where(seen, scaled, log_probs)


class PresencePenalty(_OfNumber, option="presence_penalty", within=_FINITE):
    """OpenAI's: the penalty is taken off each token that is among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * (_counts(context.generated, log_probs) > 0)


class FrequencyPenalty(_OfNumber, option="frequency_penalty", within=_FINITE):
    """OpenAI's: the penalty is taken off a token as often as it is among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * _counts(context.generated, log_probs)


IN_ORDER: dict[str, Callable[[Any], Rule]] = {
    "never": BannedTokens,
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
    """-inf behind the first tokens, by rising `key`, whose probabilities sum to `share`."""
    if share == 1:
        return log_probs
    order = key.sort(dim=1, stable=True).indices
    probs = log_probs.to(sum_dtype(log_probs.device)).softmax(dim=1).gather(1, order)
    reached = probs.cumsum(dim=1) >= share
    # A token falls when the sum is reached before it; the first never does.
    behind: Bool[Tensor, "N V"] = torch.zeros_like(reached)
    behind.scatter_(1, order, reached.roll(1, dims=1).index_fill_(1, order.new_zeros(1), False))
    return log_probs.masked_fill(behind, -torch.inf)


def _counts(tokens: Int[Tensor, "N all"], like: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """How often each id of the vocabulary is in each row; ids outside it count nowhere."""
    rows, size = like.shape
    outside = (tokens < 0) | (tokens >= size)
    counts = like.new_zeros(rows, size + 1, dtype=_at_least_single(like.dtype))
    ones = torch.ones_like(tokens, dtype=counts.dtype)
    return counts.scatter_add_(1, tokens.masked_fill(outside, size), ones)[:, :size]


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Single precision for the 16-bit formats, which can neither count nor sum."""
    return torch.promote_types(dtype, torch.float32)
