"""How a net answers a search: next-token log-probabilities from its cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.parts.cache import Cache
from heedful.parts.tokens import Tokens


class Decoding:
    """What a search remembers of N texts: the cache of their net. It is the search's `State`.

    Args:
        net: of one stack or two, with `decode` and `head`.
        cache: of the texts' starts; nothing but sources is in it yet.
        never: tokens that may not be written.
        longest: most tokens that the net has positions for. A text of one stack that outgrows them
            is gone on with from its last half alone, as often as need be; texts that may do so must
            be equally long, so that none depends on another.
        left_padding: tokens of each row that are padding on its left; default: none are.
    """

    def __init__(
        self,
        net: Any,
        cache: Cache,
        *,
        never: Sequence[int],
        longest: int,
        left_padding: Int[Tensor, "N"] | None = None,
    ) -> None:
        self.net = net
        self.cache = cache
        self.filled = 0
        self._never = list(never)
        self._longest = longest
        self._left_padding = left_padding
        self._beams = 1

    def follow(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b goes on from its former row parents[b, w]."""
        size = self.cache.num_sources // len(parents)
        first = torch.arange(0, self.cache.num_sources, size, device=parents.device)
        self._take((parents + first[:, None]).flatten())
        self._beams = parents.size(1)

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Only these sentences go on."""
        rows = sentences[:, None] * self._beams
        self._take((rows + torch.arange(self._beams, device=rows.device)).flatten())

    def _take(self, rows: Int[Tensor, "M"]) -> None:
        self.cache = self.cache.select(rows)
        if self._left_padding is not None:
            self._left_padding = self._left_padding[rows]

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "Decoding"
    ) -> Float[Tensor, "N V"]:
        """What a search calls; all of the start at first, then with one new token each time."""
        assert state is self
        new = prefixes if self.filled == 0 else prefixes[:, -1:]
        if self.filled + new.size(1) > self._longest:
            new = prefixes[:, -max(1, self._longest // 2) :]
            self.cache = self.net.start(len(prefixes), capacity=self._longest)
            self.filled, self._left_padding = 0, None
        states = self.net.decode(self._tokens(new), self.cache)[:, -1:]
        logits: Tensor = self.net.head(states)[:, 0].float()
        return _without(logits.log_softmax(-1), self._never)

    def feed(self, tokens: Int[Tensor, "t"]) -> Float[Tensor, "t V"]:
        """Of one text: log-probabilities after each of several new tokens."""
        new = self._tokens(tokens[None].to(self.cache.used.device))
        logits: Tensor = self.net.head(self.net.decode(new, self.cache))[0].float()
        return _without(logits.log_softmax(-1), self._never)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.filled = min(self.filled, length)
        self.cache.rewind(length)

    def _tokens(self, new: Int[Tensor, "N t"]) -> Tokens:
        columns = torch.arange(self.filled, self.filled + new.size(1), device=new.device)[None]
        self.filled += new.size(1)
        if self._left_padding is None:
            return Tokens(new, columns)
        positions = columns - self._left_padding[:, None]
        return Tokens(new, positions.clamp(min=0), positions >= 0)


def _without(log_probs: Float[Tensor, "N V"], never: list[int]) -> Float[Tensor, "N V"]:
    """Some tokens forbidden; what is left keeps the model's own log-probabilities."""
    if never:
        log_probs[:, never] = -math.inf
    return log_probs


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "N t"], Int[Tensor, "N"] | None]:
    """Rows that end together, and how much padding stands before each; None: none anywhere."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    starts = torch.tensor([width - len(row) for row in rows], device=device)
    return ids, starts if bool(starts.any()) else None
