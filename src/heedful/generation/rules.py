"""Logit rules: small functions from next-token log-probabilities to others, applied in order.

No rule waits for the device but `PrefixFunction`, which asks the host.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.state import sum_dtype
from heedful.generation.topk import in_top_k


@dataclass(frozen=True)
class Context:
    """What a rule may look at, for `N` rows of `B` sentences with `t` new tokens each.

    Attributes:
        prompts: the real prompt tokens of each sentence, without padding; may be empty lists.
        generated: the new tokens of each row.
        sentence: which sentence each row belongs to.
        memory: lives as long as the search, for what a rule works out once.
        given: the log-probabilities before any rule; None: those that the rule gets.
        is_open: which rows have not ended, as far as the host knows; None: all.
        in_place: a rule may write to what it gets, which nobody needs any more.
    """

    prompts: list[list[int]]
    generated: Int[Tensor, "N t"]
    sentence: Int[Tensor, "N"]
    memory: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)
    given: Float[Tensor, "N V"] | None = None
    is_open: Sequence[bool] | None = None
    in_place: bool = False

    @property
    def length(self) -> int:
        """How many new tokens each row has."""
        return self.generated.shape[1]

    def table(self, key: object, numbers: Sequence[Any]) -> Int[Tensor, "..."]:
        """Numbers that stay the same, on the device of the search."""
        if key not in self.memory:
            self.memory[key] = torch.tensor(numbers, device=self.generated.device)
        return self.memory[key]


Rule = Callable[[Float[Tensor, "N V"], Context], Float[Tensor, "N V"]]
"""`rule(log_probs, context)`: -inf forbids a token. It gives a new tensor wherever it changes one,
unless the context lets it write in place.

What a rule gives need not sum to 1; one that needs probabilities normalises for itself.
"""


def apply_rules(
    rules: Sequence[Rule], log_probs: Float[Tensor, "N V"], context: Context
) -> Float[Tensor, "N V"]:
    """The log-probabilities under all rules, the first one first."""
    if context.given is None:
        context = replace(context, given=log_probs)
    for rule in rules:
        shape = log_probs.shape
        log_probs = rule(log_probs, context)
        if log_probs.shape != shape:
            raise UserError(
                f"{rule} gave shape {tuple(log_probs.shape)}: it must keep {tuple(shape)}"
            )
    return log_probs


def keep_forbidden(rules: Sequence[Rule], length: int) -> bool:
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
        seen = _counts(_history(context), log_probs) > 0
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


# --- What may not, or must, come next -----------------------------------------------------------


@dataclass(frozen=True)
class NoRepeatNgram:
    """No n-gram of `size` twice in the new tokens; with `include_prompt` in prompt and new ones."""

    size: int
    include_prompt: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"no_repeat_ngram_size must be at least 1, not {self.size}")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        tokens = _history(context) if self.include_prompt else context.generated
        t = tokens.shape[1]
        if t < self.size:
            return log_probs
        followers = tokens[:, self.size - 1 :]
        # Windows that have a next token, against the last size - 1 tokens.
        windows = tokens[:, : t - 1].unfold(1, self.size - 1, 1)
        seen = (windows == tokens[:, None, t - self.size + 1 :]).all(dim=2)
        return _forbid(log_probs, followers, seen)


@dataclass(frozen=True)
class BannedTokens:
    """Ids that may not come, or sequences of ids that may not be completed.

    Of a sequence the last token is forbidden wherever the prompt and the new tokens end in the
    others.
    """

    tokens: Sequence[int | Sequence[int]]

    def __post_init__(self) -> None:
        for banned in self._sequences():
            if not banned:
                raise UserError("a banned sequence is empty: give it at least one token id")
            if min(banned) < 0:
                raise UserError(f"banned tokens hold {min(banned)}, which is no token id")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for banned in self._sequences():
            _check_vocabulary("banned", max(banned), log_probs)
            by_length.setdefault(len(banned) - 1, []).append(banned)
        for length, sequences in sorted(by_length.items()):
            table = context.table((id(self), length), sequences)
            if length == 0:
                log_probs = log_probs if context.in_place else log_probs.clone()
                log_probs.index_fill_(1, table[:, 0], -torch.inf)
                continue
            history = _history(context)
            if length <= history.shape[1]:
                ends = history[:, None, history.shape[1] - length :] == table[:, :-1]
                last = table[:, -1].expand(len(history), -1)
                log_probs = _forbid(log_probs, last, ends.all(dim=2))
        return log_probs

    def _sequences(self) -> list[tuple[int, ...]]:
        return [(ids,) if isinstance(ids, int) else tuple(ids) for ids in self.tokens]


@dataclass(frozen=True)
class MinLength:
    """No end before a sentence has so many new tokens, the end included; a length a sentence."""

    eos_ids: Sequence[int]
    lengths: Sequence[int]

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        least = context.length + 2
        if max(self.lengths, default=0) < least:
            return log_probs
        ends = context.table((id(self), "ends"), self.eos_ids)
        log_probs = log_probs if context.in_place else log_probs.clone()
        if min(self.lengths) >= least:
            return log_probs.index_fill_(1, ends, -torch.inf)
        lengths = context.table((id(self), "lengths"), self.lengths)
        short = lengths[context.sentence, None] >= least
        return log_probs.index_copy_(1, ends, log_probs[:, ends].masked_fill(short, -torch.inf))


@dataclass(frozen=True)
class ForcedTokens:
    """At some places of the new tokens (the first is 0) one token and no other.

    The token has the model's own log-probability, whatever the rules before say of it.

    Attributes:
        tokens: place -> token; or such a mapping for each sentence.
        certain: the token costs nothing.
        always: nor does one that the model itself rules out; else that is a dead end.
    """

    tokens: Mapping[int, int] | Sequence[Mapping[int, int]]
    certain: bool = False
    always: bool = True

    def __post_init__(self) -> None:
        for position, token in (pair for tokens in self._each() for pair in tokens.items()):
            if position < 0 or token < 0:
                raise UserError(
                    f"forced tokens say {position}: {token}, but neither a position nor a "
                    "token id is below 0"
                )

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        place = context.length
        if not self.forces(place):
            return log_probs
        here = [tokens.get(place, -1) for tokens in self._each()]
        _check_vocabulary("forced", max(here), log_probs)
        if isinstance(self.tokens, Mapping):
            token = torch.full_like(context.sentence, here[0])[:, None]
        else:
            table = torch.tensor(here, device=log_probs.device)
            token = table[context.sentence, None]
        index = token.clamp(min=0)
        value = (log_probs if context.given is None else context.given).gather(1, index)
        only = torch.full_like(log_probs, -torch.inf)
        if self.certain:
            value = torch.zeros_like(value)
        elif self.always:
            value = torch.where(value > -torch.inf, value, 0.0)
        only.scatter_(1, index, value)
        return only if min(here) >= 0 else torch.where(token >= 0, only, log_probs)

    def forces(self, place: int) -> bool:
        """Whether it forces a token at a place of any sentence."""
        return any(place in tokens for tokens in self._each())

    def _each(self) -> Sequence[Mapping[int, int]]:
        return [self.tokens] if isinstance(self.tokens, Mapping) else self.tokens


Allowed = Callable[[int, list[int]], Sequence[int]]
"""`allowed(sentence index, new token ids) -> ids that may come next`."""


@dataclass(frozen=True)
class PrefixFunction:
    """Only what a function of the new tokens allows may come (De Cao et al. 2021)."""

    function: Allowed

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        allowed = torch.zeros_like(log_probs, dtype=torch.bool, device="cpu")
        for row, (sentence, ids) in enumerate(
            zip(context.sentence.tolist(), context.generated.tolist(), strict=True)
        ):
            if context.is_open is not None and not context.is_open[row]:
                continue
            may_come = [int(token) for token in self.function(sentence, ids)]
            if not may_come:
                raise UserError(
                    f"the prefix function allows nothing for sentence {sentence} after {ids}: "
                    "it must allow at least one token, for example EOS"
                )
            if min(may_come) < 0:
                raise UserError(f"the prefix function allows {min(may_come)}, which is no token id")
            _check_vocabulary("allowed", max(may_come), log_probs)
            allowed[row, may_come] = True
        return log_probs.masked_fill(~allowed.to(log_probs.device), -torch.inf)


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


def _history(context: Context) -> Int[Tensor, "N all"]:
    """Each row's prompt and new tokens, filled up with -1 on the left."""
    if "prompts" not in context.memory:
        width = max((len(ids) for ids in context.prompts), default=0)
        filled = [[-1] * (width - len(ids)) + list(ids) for ids in context.prompts]
        table = torch.tensor(filled, dtype=torch.long, device=context.generated.device)
        context.memory["prompts"] = table.view(len(filled), width)
    prompts = context.memory["prompts"][context.sentence]
    return torch.cat([prompts, context.generated], dim=1)


def _forbid(
    log_probs: Float[Tensor, "N V"], tokens: Int[Tensor, "N X"], where: Bool[Tensor, "N X"]
) -> Float[Tensor, "N V"]:
    """-inf for each row's own tokens where they are marked; ids outside the vocabulary: none."""
    rows, size = log_probs.shape
    marked = where & (tokens >= 0) & (tokens < size)
    forbidden = log_probs.new_zeros(rows, size + 1, dtype=torch.bool)
    forbidden.scatter_(1, torch.where(marked, tokens, size), True)
    return log_probs.masked_fill(forbidden[:, :size], -torch.inf)


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


def _check_vocabulary(what: str, token: int, log_probs: Float[Tensor, "N V"]) -> None:
    if token >= log_probs.shape[1]:
        raise UserError(
            f"{what} token id {token} is outside the vocabulary of {log_probs.shape[1]}"
        )
