"""Logit rules for tokens that may not, or must, come next.

No rule waits for the device but `PrefixFunction`, which asks the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.context import Context


@dataclass(frozen=True)
class NoRepeatNgram:
    """No n-gram of `size` twice in the new tokens; with `include_prompt` in prompt and new ones."""

    size: int
    include_prompt: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"no_repeat_ngram_size must be at least 1, not {self.size}")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        tokens = context.history() if self.include_prompt else context.generated
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
            history = context.history()
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
        allow_impossible: a token of probability 0 gets log-probability 0; False: it is a dead end.
    """

    tokens: Mapping[int, int] | Sequence[Mapping[int, int]]
    certain: bool = False
    allow_impossible: bool = True

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
        value = (log_probs if context.model_log_probs is None else context.model_log_probs).gather(
            1, index
        )
        only = torch.full_like(log_probs, -torch.inf)
        if self.certain:
            value = torch.zeros_like(value)
        elif self.allow_impossible:
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


def _forbid(
    log_probs: Float[Tensor, "N V"], tokens: Int[Tensor, "N X"], where: Bool[Tensor, "N X"]
) -> Float[Tensor, "N V"]:
    """-inf for each row's own tokens where they are marked; ids outside the vocabulary: none."""
    rows, size = log_probs.shape
    marked = where & (tokens >= 0) & (tokens < size)
    forbidden = log_probs.new_zeros(rows, size + 1, dtype=torch.bool)
    forbidden.scatter_(1, torch.where(marked, tokens, size), True)
    return log_probs.masked_fill(forbidden[:, :size], -torch.inf)


def _check_vocabulary(what: str, token: int, log_probs: Float[Tensor, "N V"]) -> None:
    if token >= log_probs.shape[1]:
        raise UserError(
            f"{what} token id {token} is outside the vocabulary of {log_probs.shape[1]}"
        )
