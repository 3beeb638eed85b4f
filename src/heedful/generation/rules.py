"""Logit rules with one number, the rules for a set of options, and their application in order.

Rules that forbid or force single tokens are in `heedful.generation.token_rules`.
"""

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.exact_counts import ExactCounts
from heedful.generation.hypotheses import in_top_k, sum_dtype
from heedful.generation.token_rules import (
    BANS,
    BannedAtBegin,
    BannedTokens,
    Context,
    ForcedTokens,
    NoRepeatNgram,
    NoSourceNgram,
    PrefixFunction,
    Rule,
    SequenceBias,
)
from heedful.option_ranges import FINITE, RANGES
from heedful.options import TEMPERATURES


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


def sampling_rules(*, min_tokens_to_keep: int = 1, **options: Any) -> list[Rule]:
    """The rules for options named as in `RULES_BY_OPTION`, in its order.

    No rule is added for an option without a value, for False, or for an n-gram size or a cutoff of
    0. Penalties, and rules that forbid or force tokens, come before those that reshape or truncate
    the distribution. The order is that of transformers.

    Args:
        min_tokens_to_keep: see `Truncation`.
    """
    rules: list[Rule] = []
    for name, rule in RULES_BY_OPTION.items():
        value = options.get(name)
        is_empty = isinstance(value, Sized) and not len(value)
        if value is None or value is False or is_empty or (name in _OFF_AT_0 and value == 0):
            continue
        is_truncation = isinstance(rule, type) and issubclass(rule, Truncation)
        rules.append(rule(value, min_tokens_to_keep) if is_truncation else rule(value))
    return rules


# --- Rules of one number ------------------------------------------------------------------------


_TOP_H_TOKENS = 100  # most probable tokens that top-H decoding reads


@dataclass(frozen=True)
class _NumberRule:
    """A rule with one number, checked against the range of the option of that name."""

    value: int | float
    option: ClassVar[str] = ""

    def __init_subclass__(cls, option: str = "") -> None:
        cls.option = option

    def __post_init__(self) -> None:
        RANGES.get(self.option, FINITE).check(self.option, self.value)


class Temperature(_NumberRule, option="temperature"):
    """Divides log-probabilities by the temperature: sharper below 1, flatter above 1.

    Those outside `TEMPERATURES` act as its ends.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        least, most = TEMPERATURES
        return log_probs / min(max(self.value, least), most)


@dataclass(frozen=True)
class Truncation(_NumberRule):
    """A rule that forbids a part of the distribution.

    Attributes:
        min_tokens_to_keep: the first tokens, in the order of the rule, that are kept in any case:
            the most probable ones, for locally typical sampling the most typical ones.
    """

    min_tokens_to_keep: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_tokens_to_keep < 1:
            raise UserError(f"min_tokens_to_keep must be at least 1, not {self.min_tokens_to_keep}")

    def _forbid_below(
        self, log_probs: Float[Tensor, "N V"], least: Float[Tensor, "N 1"]
    ) -> Float[Tensor, "N V"]:
        """Forbids tokens below a log-probability, and of those to keep none, nor their equals."""
        kept = log_probs.topk(min(self.min_tokens_to_keep, log_probs.shape[1]), dim=1).values
        values, edge = log_probs.to(least.dtype), kept[:, -1:].to(least.dtype)
        return log_probs.masked_fill(values < torch.minimum(least, edge), -torch.inf)


class TopH(_NumberRule, option="top_h"):
    """Keeps the most probable tokens while the sum of -p log p is at most this share of the whole.

    Top-H decoding (Potraghloo et al. 2025), over the 100 most probable tokens, as in transformers.
    At least one is kept; of equal tokens those of lower ids come first.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        order = log_probs.sort(dim=1, descending=True, stable=True).indices[:, :_TOP_H_TOKENS]
        terms = _entropy_terms(log_probs.gather(1, order))
        sums = terms.cumsum(dim=1)
        is_kept = sums <= self.value * sums[:, -1:]
        is_kept[:, 0] = True
        is_removed = torch.ones_like(log_probs, dtype=torch.bool).scatter_(1, order, ~is_kept)
        return log_probs.masked_fill(is_removed, -torch.inf)


class TopK(Truncation, option="top_k"):
    """Keeps the `k` most probable tokens, exactly `k`: of equal ones those of lower ids."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        k = max(int(self.value), self.min_tokens_to_keep)
        if k >= log_probs.shape[1]:
            return log_probs
        return log_probs.masked_fill(~in_top_k(log_probs, k), -torch.inf)


class TopP(Truncation, option="top_p"):
    """Nucleus sampling (Holtzman et al. 2020): the most probable tokens until they sum to `p`.

    The token that reaches the sum stays, so at least one does. Of equal tokens those of lower ids
    come first.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value == 1:
            return log_probs
        order, last, _key = _until_sum(log_probs, -log_probs, self)
        places = torch.arange(log_probs.shape[1], device=log_probs.device)
        is_removed: Bool[Tensor, "N V"] = torch.zeros_like(log_probs, dtype=torch.bool)
        is_removed.scatter_(1, order, places > last)
        return log_probs.masked_fill(is_removed, -torch.inf)


class MinP(Truncation, option="min_p"):
    """Keeps tokens at least `p` times as probable as the best one (Nguyen et al. 2024)."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value == 0:
            return log_probs
        best = log_probs.amax(dim=1, keepdim=True).to(_at_least_single(log_probs.dtype))
        return self._forbid_below(log_probs, best + math.log(self.value))


class Typical(Truncation, option="typical_p"):
    """Locally typical tokens (Meister et al. 2022, "Locally Typical Sampling", section 4).

    Keeps tokens in order of the distance between their information -log p and the entropy, until
    their probabilities sum to `p`; the token that reaches the sum stays, and those at the same
    distance.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        if self.value == 1:
            return log_probs
        normal = log_probs.log_softmax(dim=1, dtype=_at_least_single(log_probs.dtype))
        entropy = _entropy_terms(log_probs).sum(dim=1, keepdim=True)
        distance = (-normal - entropy).abs()
        _order, _last, farthest = _until_sum(log_probs, distance, self)
        return log_probs.masked_fill(distance > farthest, -torch.inf)


class EpsilonCutoff(Truncation, option="epsilon_cutoff"):
    """Keeps tokens of at least this probability (Hewitt et al. 2022, section 4.2)."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        dtype = _at_least_single(log_probs.dtype)
        normalizer = log_probs.to(dtype).logsumexp(dim=1, keepdim=True)
        return self._forbid_below(log_probs, normalizer + math.log(self.value))


class EtaCutoff(Truncation, option="eta_cutoff"):
    """Keeps tokens of at least the probability min(eta, sqrt(eta) exp(-entropy)).

    Hewitt et al. 2022, "Truncation Sampling as Language Model Desmoothing", section 4.2.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        dtype = _at_least_single(log_probs.dtype)
        normalizer = log_probs.to(dtype).logsumexp(dim=1, keepdim=True)
        entropy = _entropy_terms(log_probs).sum(dim=1, keepdim=True)
        least = (math.log(self.value) / 2 - entropy).clamp(max=math.log(self.value))
        return self._forbid_below(log_probs, normalizer + least)


class RepetitionPenalty(_NumberRule, option="repetition_penalty"):
    """Penalty of CTRL (Keskar et al. 2019, section 4.1) on tokens of the prompt and new tokens.

    A log-probability is multiplied by the penalty, a value above 0 divided by it. CTRL divides
    logits, which are defined up to a constant; this rule, like that of beam search in transformers
    (but not of sampling there), is applied to log-probabilities.
    """

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        is_repeated = _counts(context.history(), log_probs) > 0
        scaled = torch.where(log_probs < 0, log_probs * self.value, log_probs / self.value)
        return torch.where(is_repeated, scaled, log_probs)


class SourcePenalty(_NumberRule, option="encoder_repetition_penalty"):
    """The inverse of `RepetitionPenalty` on tokens of the source: above 1 it raises them."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        is_source = _counts(context.source_ids(), log_probs) > 0
        scaled = torch.where(log_probs < 0, log_probs / self.value, log_probs * self.value)
        return torch.where(is_source, scaled, log_probs)


class PresencePenalty(_NumberRule, option="presence_penalty"):
    """Penalty of OpenAI's API: subtracted from each token that is among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * (_counts(context.generated, log_probs) > 0)


class FrequencyPenalty(_NumberRule, option="frequency_penalty"):
    """Penalty of OpenAI's API: subtracted once for each occurrence among the new tokens."""

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        return log_probs - self.value * _counts(context.generated, log_probs)


# --- Rules of several numbers, or of none -------------------------------------------------------


@dataclass(frozen=True)
class ExponentialDecay:
    """Raises the log-probability of EOS exponentially with the length of an output.

    After `start` new tokens, t - start tokens later, |log p| (factor^(t - start) - 1) is added.
    """

    start: int
    factor: float

    def __post_init__(self) -> None:
        if self.start < 0 or not 0 < self.factor < math.inf:
            raise UserError(
                "exponential_decay_length_penalty must be a number of tokens and a finite factor "
                f"above 0, not {self.start} and {self.factor}"
            )

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        past = context.length - self.start
        if past <= 0 or not context.eos_ids:
            return log_probs
        # A larger power is certain too, and would overflow.
        power = math.exp(min(past * math.log(self.factor), _LARGEST_EXPONENT))
        eos_ids = context.table("eos_ids", list(context.eos_ids))
        values = log_probs[:, eos_ids]
        raised = values + values.abs() * (power - 1)
        return log_probs.index_copy(1, eos_ids, raised.masked_fill(values == -torch.inf, -math.inf))


@dataclass(frozen=True)
class Renormalize:
    """Divides probabilities by their sum, so that beams with and without bans compare."""

    def __call__(self, log_probs: Float[Tensor, "N V"], _: Context) -> Float[Tensor, "N V"]:
        normal = log_probs.log_softmax(dim=1)
        return normal.masked_fill(log_probs == -torch.inf, -torch.inf)  # no NaN at a dead end


_LARGEST_EXPONENT = 60.0
RULES_BY_OPTION: dict[str, Callable[..., Rule]] = {
    "sequence_bias": SequenceBias,
    "suppressed": BannedTokens,  # by the model
    "encoder_repetition_penalty": SourcePenalty,
    "repetition_penalty": RepetitionPenalty,
    "presence_penalty": PresencePenalty,
    "frequency_penalty": FrequencyPenalty,
    "no_repeat_ngram_size": NoRepeatNgram,
    "encoder_no_repeat_ngram_size": NoSourceNgram,
    "banned": BannedTokens,
    "prefix_function": PrefixFunction,
    "forced": ForcedTokens,
    "exponential_decay_length_penalty": lambda numbers: ExponentialDecay(*numbers),
    "begin_suppress_tokens": BannedAtBegin,
    "temperature": Temperature,
    "top_h": TopH,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "typical_p": Typical,
    "epsilon_cutoff": EpsilonCutoff,
    "eta_cutoff": EtaCutoff,
    "renormalize_logits": lambda _true: Renormalize(),
}
_OFF_AT_0 = (
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
)
KEEP_BANS = (*BANS, ExactCounts, _NumberRule, SequenceBias, ExponentialDecay, Renormalize)
"""Rules that allow no token which an earlier rule forbids, and do not read the model's values."""


# --- Helpers ------------------------------------------------------------------------------------


def _until_sum(
    log_probs: Float[Tensor, "N V"], key: Float[Tensor, "N V"], rule: Truncation
) -> tuple[Int[Tensor, "N V"], Int[Tensor, "N 1"], Float[Tensor, "N 1"]]:
    """The part of the tokens, in ascending order of `key`, that sums to the value of a rule.

    Returns the order, and the last position in it of the part and its key.
    """
    ordered, order = key.sort(dim=1, stable=True)
    probs = log_probs.to(sum_dtype(log_probs.device)).softmax(dim=1).gather(1, order)
    below = (probs.cumsum(dim=1) < rule.value).sum(dim=1, keepdim=True)
    last = below.clamp(min=rule.min_tokens_to_keep - 1).clamp(max=log_probs.shape[1] - 1)
    return order, last, ordered.gather(1, last)


def _entropy_terms(log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """-p log p of each token, 0 for those of probability 0, in nats."""
    normal = log_probs.log_softmax(dim=1, dtype=_at_least_single(log_probs.dtype))
    return torch.where(normal > -torch.inf, -normal.exp() * normal, 0.0)


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
