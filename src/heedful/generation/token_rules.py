"""Logit rules: their type, the context that they can read, and the rules of tokens and texts.

These are bans, biases and forced tokens. Only `PrefixFunction` and `BannedTexts`, which work on the
host, wait for the device.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from heedful.data.decoding import TokenTexts
from heedful.errors import UserError, describe


@dataclass(frozen=True)
class Context:
    """The state of a search for its rules: `N` rows of `B` sentences with `t` new tokens each.

    Attributes:
        prompts: the prompt tokens of each sentence, without padding; may be empty lists.
        generated: the new tokens of each row.
        sentence: the sentence of each row.
        memory: tensors that a rule computes once; kept for the whole search.
        model_log_probs: the log-probabilities before any rule; None: the argument of the rule.
        is_open: False for rows that have ended, as far as the host knows; None: all are open.
        in_place: rules may write to their argument.
        sources: ids of each sentence that the output is made from: the encoder's input; None: the
            prompts.
        eos_ids: ids that end an output.
    """

    prompts: list[list[int]]
    generated: Int[Tensor, "N t"]
    sentence: Int[Tensor, "N"]
    memory: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)
    model_log_probs: Float[Tensor, "N V"] | None = None
    is_open: Sequence[bool] | None = None
    in_place: bool = False
    sources: list[list[int]] | None = None
    eos_ids: Sequence[int] = ()

    @property
    def length(self) -> int:
        """The number of new tokens of each row."""
        return self.generated.shape[1]

    def table(self, key: object, numbers: Sequence[Any]) -> Num[Tensor, "..."]:
        """Constant numbers as a tensor on the device of the search, kept by `key`."""
        if key not in self.memory:
            self.memory[key] = torch.tensor(numbers, device=self.generated.device)
        return self.memory[key]

    def history(self) -> Int[Tensor, "N all"]:
        """Prompt and new tokens of each row, padded with -1 on the left."""
        prompts = self._padded("prompts", self.prompts)[self.sentence]
        return torch.cat([prompts, self.generated], dim=1)

    def source_ids(self) -> Int[Tensor, "N s"]:
        """The source of each row, padded with -1 on the left."""
        rows = self.prompts if self.sources is None else self.sources
        return self._padded("sources", rows)[self.sentence]

    def _padded(self, key: str, rows: list[list[int]]) -> Int[Tensor, "B s"]:
        """Ids of each sentence, padded with -1 on the left; kept for the whole search."""
        if key not in self.memory:
            width = max(map(len, rows), default=0)
            padded = [[-1] * (width - len(ids)) + list(ids) for ids in rows]
            table = torch.tensor(padded, dtype=torch.long, device=self.generated.device)
            self.memory[key] = table.view(len(padded), width)
        return self.memory[key]


Rule = Callable[[Float[Tensor, "N V"], Context], Float[Tensor, "N V"]]
"""`rule(log_probs, context)` returns new log-probabilities; -inf forbids a token.

A rule must not write to its argument unless `context.in_place`. Its result need not sum to 1; a
rule that needs probabilities normalizes its argument.
"""


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
    single_ids: list[int] = field(init=False, repr=False, compare=False)
    # Sequences of several ids, by their length without the last one.
    sequences: dict[int, list[tuple[int, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        single_ids: list[int] = []
        sequences: dict[int, list[tuple[int, ...]]] = {}
        for ids in self.tokens:
            banned = (ids,) if isinstance(ids, int) else tuple(ids)
            if not banned:
                raise UserError("a banned sequence is empty: give it at least one token id")
            if min(banned) < 0:
                raise UserError(f"banned tokens contain {min(banned)}, which is no token id")
            if len(banned) == 1:
                single_ids.append(banned[0])
            else:
                sequences.setdefault(len(banned) - 1, []).append(banned)
        object.__setattr__(self, "single_ids", single_ids)
        object.__setattr__(self, "sequences", dict(sorted(sequences.items())))

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        if self.single_ids:
            check_vocabulary("banned", max(self.single_ids), log_probs)
            log_probs = log_probs if context.in_place else log_probs.clone()
            log_probs.index_fill_(1, context.table(id(self), self.single_ids), -torch.inf)
        history = context.history() if self.sequences else context.generated
        for length, sequences in self.sequences.items():
            check_vocabulary("banned", max(map(max, sequences)), log_probs)
            table = context.table((id(self), length), sequences)
            if length <= history.shape[1]:
                ends = history[:, None, history.shape[1] - length :] == table[:, :-1]
                last = table[:, -1].expand(len(history), -1)
                log_probs = _forbid(log_probs, last, ends.all(dim=2))
        return log_probs


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


@dataclass(frozen=True)
class MinLength:
    """Forbids EOS until an output of `lengths[sentence]` tokens, EOS included."""

    eos_ids: Sequence[int]
    lengths: Sequence[int]

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        least = context.length + 2
        if max(self.lengths, default=0) < least:
            return log_probs
        eos_ids = context.table(id(self), self.eos_ids)
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

    def of_sentence(self, sentence: int) -> Mapping[int, int]:
        """The forced tokens of a sentence by position."""
        return self.tokens if isinstance(self.tokens, Mapping) else self.tokens[sentence]

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


@dataclass(frozen=True, eq=False)
class BannedTexts:
    """Forbids each token with which the decoded new tokens would contain a banned text.

    A text is found anywhere, also inside a word. A token completes it if it has all of it, or if
    the text so far ends in a beginning of it and the token begins with the rest. Only the last
    bytes of the text so far count, so that the ids for each possible rest are found once.

    Args:
        texts: that are banned.
        tokens: what each token adds to a text.
    """

    texts: Sequence[str]
    tokens: TokenTexts
    _banned: tuple[bytes, ...] = field(init=False, repr=False)
    _completing: dict[frozenset[bytes] | None, list[int]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not all(self.texts):
            raise UserError("a banned text is empty: give it at least one character")
        object.__setattr__(self, "_banned", tuple(text.encode() for text in self.texts))

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        size = log_probs.shape[1]
        forbidden = torch.zeros_like(log_probs, dtype=torch.bool, device="cpu")
        for row, ids in enumerate(context.generated.tolist()):
            if context.is_open is not None and not context.is_open[row]:
                continue
            forbidden[row, [token for token in self.completing(ids) if token < size]] = True
        return log_probs.masked_fill(forbidden.to(log_probs.device), -torch.inf)

    def completing(self, ids: Sequence[int]) -> list[int]:
        """The tokens that complete a banned text after these new tokens."""
        tail = self._tail(ids)
        rests = None
        if tail is not None:
            rests = frozenset(
                text[size:]
                for text in self._banned
                for size in range(1, len(text))
                if tail.endswith(text[:size])
            )
        found = self._completing.get(rests)
        if found is None:
            found = self.tokens.containing(self._banned, at_start=rests is None)
            for rest in rests or ():
                found += self.tokens.beginning_with(rest)
            self._completing[rests] = found
        return found

    def _tail(self, ids: Sequence[int]) -> bytes | None:
        """The last bytes of the text of ids, enough for each banned text; None: there is none."""
        later = self.tokens.later
        # Special tokens are not decoded, and neither are ids that the tokenizer lacks.
        shown = (token for token in reversed(ids) if 0 <= token < len(later) and later[token])
        last = next(shown, None)
        if last is None:
            return None
        longest, tail = max(map(len, self._banned), default=0), b""
        for token in shown:  # before the last one, which is not the first of the text
            tail = later[last] + tail
            if len(tail) >= longest:
                return tail
            last = token
        return self.tokens.first[last] + tail


BANS = (
    *(NoRepeatNgram, NoSourceNgram, BannedTokens, BannedAtBegin, BannedTexts, MinLength),
    PrefixFunction,
)
"""Rules that forbid tokens and keep all other values, so that they apply to logits too."""


def single_bans(rules: Sequence[Rule]) -> list[int] | None:
    """The ids that rules forbid at every position; None: they do something else."""
    banned: list[int] = []
    for rule in rules:
        if not isinstance(rule, BannedTokens) or rule.sequences:
            return None
        banned += rule.single_ids
    return banned


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
