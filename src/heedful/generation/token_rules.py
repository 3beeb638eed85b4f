"""Logit rules of single tokens and sequences: bans, biases and forced tokens.

Only `PrefixFunction`, which calls a function on the host, waits for the device.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.errors import UserError, describe
from heedful.generation.context import Context, Rule


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbids a second occurrence of an n-gram in the new tokens (or in prompt and new tokens)."""

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
        is_repeated = (windows == tokens[:, None, t - self.size + 1 :]).all(dim=2)
        return _forbid(log_probs, followers, is_repeated)


@dataclass(frozen=True)
class NoSourceNgram:
    """Forbids an n-gram of the source among the tokens of prompt and output."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"encoder_no_repeat_ngram_size must be at least 1, not {self.size}")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        history, source = context.history(), context.source_ids()
        if min(history.shape[1] + 1, source.shape[1]) < self.size:
            return log_probs
        followers = source[:, self.size - 1 :]
        windows = source[:, :-1].unfold(1, self.size - 1, 1)
        ends = history[:, None, history.shape[1] - self.size + 1 :]
        is_equal = (windows == ends) & (windows >= 0)  # padding is -1
        return _forbid(log_probs, followers, is_equal.all(dim=2))


@dataclass(frozen=True)
class BannedTokens:
    """Forbids ids, and sequences of ids.

    The last id of a sequence is forbidden where the prompt and the new tokens end in the others.
    """

    tokens: Sequence[int | Sequence[int]]

    def __post_init__(self) -> None:
        for banned in self._sequences():
            if not banned:
                raise UserError("a banned sequence is empty: give it at least one token id")
            if min(banned) < 0:
                raise UserError(f"banned tokens contain {min(banned)}, which is no token id")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for banned in self._sequences():
            check_vocabulary("banned", max(banned), log_probs)
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
class BannedAtBegin:
    """Forbids ids at one position of the output: the first, or the first after a forced one."""

    tokens: Sequence[int]
    position: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, default=0) < 0:
            raise UserError(
                f"begin_suppress_tokens contains {min(self.tokens)}, which is no token id"
            )

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        if context.length != self.position or not self.tokens:
            return log_probs
        check_vocabulary("begin_suppress_tokens", max(self.tokens), log_probs)
        log_probs = log_probs if context.in_place else log_probs.clone()
        return log_probs.index_fill_(1, context.table(id(self), self.tokens), -torch.inf)


@dataclass(frozen=True)
class SequenceBias:
    """Adds a bias to the log-probabilities of ids, and of the last ids of sequences.

    That of a sequence is added where the prompt and the new tokens end in its other ids.

    Attributes:
        biases: pairs of a sequence of ids and its bias in nats; -inf forbids. Of two pairs with the
            same sequence the last counts.
    """

    biases: Sequence[tuple[Sequence[int], float]]

    def __post_init__(self) -> None:
        for ids, bias in self.biases:
            if not ids or min(ids) < 0:
                raise UserError(f"sequence_bias has {list(ids)}, which is no sequence of token ids")
            if not bias < math.inf:
                raise UserError(f"sequence_bias has {bias} for {list(ids)}; give a finite number")

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        by_length: dict[int, dict[tuple[int, ...], float]] = {}
        for ids, bias in self.biases:
            check_vocabulary("sequence_bias", max(ids), log_probs)
            by_length.setdefault(len(ids) - 1, {})[tuple(ids)] = bias
        history = context.history()
        added = torch.zeros_like(log_probs)
        for length, biases in sorted(by_length.items()):
            if length > history.shape[1]:
                continue
            table = context.table((id(self), length), [*biases])
            values = context.table((id(self), length, "bias"), [float(b) for b in biases.values()])
            ends = history[:, None, history.shape[1] - length :] == table[:, :-1]
            values = values.to(log_probs.dtype).expand(len(history), -1)
            added.index_add_(1, table[:, -1], values.masked_fill(~ends.all(dim=2), 0.0))
        return log_probs + added


def single_bans(rules: Sequence[Rule]) -> list[int] | None:
    """The ids that rules forbid at every position; None: they do something else."""
    banned: list[int] = []
    for rule in rules:
        if not isinstance(rule, BannedTokens):
            return None
        for token in rule.tokens:
            ids = [token] if isinstance(token, int) else token
            if len(ids) != 1:
                return None
            banned.append(ids[0])
    return banned


@dataclass(frozen=True)
class MinLength:
    """Forbids EOS until an output of `lengths[sentence]` tokens, EOS included."""

    eos_ids: Sequence[int]
    lengths: Sequence[int]

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        least = context.length + 2
        if max(self.lengths, default=0) < least:
            return log_probs
        eos_ids = context.table((id(self), "eos_ids"), self.eos_ids)
        log_probs = log_probs if context.in_place else log_probs.clone()
        if min(self.lengths) >= least:
            return log_probs.index_fill_(1, eos_ids, -torch.inf)
        lengths = context.table((id(self), "lengths"), self.lengths)
        is_short = lengths[context.sentence, None] >= least
        values = log_probs[:, eos_ids].masked_fill(is_short, -torch.inf)
        return log_probs.index_copy_(1, eos_ids, values)


@dataclass(frozen=True)
class ForcedTokens:
    """Forces tokens at positions of the output (the first is 0); all others are forbidden there.

    A forced token has the model's log-probability, regardless of earlier rules.

    Attributes:
        tokens: position -> token; or such a mapping for each sentence.
        certain: a forced token has log-probability 0.
        allow_impossible: a token of probability 0 gets log-probability 0; False: it is a dead end.
    """

    tokens: Mapping[int, int] | Sequence[Mapping[int, int]]
    certain: bool = False
    allow_impossible: bool = True

    def __post_init__(self) -> None:
        for tokens in self._mappings():
            for position, token in tokens.items():
                if position < 0 or token < 0:
                    raise UserError(
                        f"forced tokens contain {position}: {token}, but positions and token ids "
                        "are 0 or more"
                    )

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        position = context.length
        if not self.forces(position):
            return log_probs
        forced = [tokens.get(position, -1) for tokens in self._mappings()]  # -1: none
        check_vocabulary("forced", max(forced), log_probs)
        if isinstance(self.tokens, Mapping):
            token = torch.full_like(context.sentence, forced[0])[:, None]
        else:
            table = torch.tensor(forced, device=log_probs.device)
            token = table[context.sentence, None]
        index = token.clamp(min=0)
        value = (log_probs if context.model_log_probs is None else context.model_log_probs).gather(
            1, index
        )
        result = torch.full_like(log_probs, -torch.inf)
        if self.certain:
            value = torch.zeros_like(value)
        elif self.allow_impossible:
            value = torch.where(value > -torch.inf, value, 0.0)
        result.scatter_(1, index, value)
        return result if min(forced) >= 0 else torch.where(token >= 0, result, log_probs)

    def forces(self, position: int) -> bool:
        """True if a token is forced at this position of any sentence."""
        return any(position in tokens for tokens in self._mappings())

    def _mappings(self) -> Sequence[Mapping[int, int]]:
        return [self.tokens] if isinstance(self.tokens, Mapping) else self.tokens


Allowed = Callable[[int, list[int]], Sequence[int]]
"""`allowed(sentence index, new token ids)` returns the ids that are allowed next."""


@dataclass(frozen=True)
class PrefixFunction:
    """Allows only ids that a function of the new tokens returns (De Cao et al. 2021).

    Where it returns none, no token can continue the output.
    """

    function: Allowed

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        allowed = torch.zeros_like(log_probs, dtype=torch.bool, device="cpu")
        for row, (sentence, ids) in enumerate(
            zip(context.sentence.tolist(), context.generated.tolist(), strict=True)
        ):
            if context.is_open is not None and not context.is_open[row]:
                continue
            returned: Any = self.function(sentence, ids)
            if not isinstance(returned, Iterable):
                raise UserError(f"the prefix function must return ids, not {describe(returned)}")
            next_ids = [int(token) for token in returned]
            if not next_ids:  # the output ends there
                continue
            if min(next_ids) < 0:
                raise UserError(f"the prefix function allows {min(next_ids)}, which is no token id")
            check_vocabulary("allowed", max(next_ids), log_probs)
            allowed[row, next_ids] = True
        return log_probs.masked_fill(~allowed.to(log_probs.device), -torch.inf)


def _forbid(
    log_probs: Float[Tensor, "N V"], tokens: Int[Tensor, "N X"], is_forbidden: Bool[Tensor, "N X"]
) -> Float[Tensor, "N V"]:
    """-inf for the tokens of each row that are marked; ids outside the vocabulary are ignored."""
    rows, size = log_probs.shape
    is_valid = is_forbidden & (tokens >= 0) & (tokens < size)
    forbidden = log_probs.new_zeros(rows, size + 1, dtype=torch.bool)
    forbidden.scatter_(1, torch.where(is_valid, tokens, size), True)
    return log_probs.masked_fill(forbidden[:, :size], -torch.inf)


def check_vocabulary(kind: str, token: int, log_probs: Float[Tensor, "N V"]) -> None:
    """Raise UserError for a token id that is no index of the log-probabilities or logits."""
    if token >= log_probs.shape[1]:
        raise UserError(
            f"{kind} token id {token} is outside the vocabulary of {log_probs.shape[1]}"
        )
