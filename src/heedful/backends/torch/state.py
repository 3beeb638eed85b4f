"""How a net answers a search: next-token log-probabilities from its cache."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.parts.cache import Cache
from heedful.parts.heads import OutputHead
from heedful.parts.tokens import Tokens

STEPS_AT_FIRST = 16  # new tokens that a cache has slots for before it grows


class Decoding:
    """What a search remembers of B texts with W beams each: a cache. It is the search's `State`.

    Args:
        net: of one stack or two, with `decode` and `head`.
        cache: of the texts' starts; nothing but sources is in it yet. It grows to powers of two.
        longest: most tokens that the net has positions for. A text of one stack that outgrows them
            is gone on with from its last half alone, as often as need be; texts that may do so must
            be equally long, so that none depends on another.
        left_padding: tokens of each text that are padding on its left; default: none are.
        listed: the tokens that each text may have; default: the whole vocabulary.
    """

    def __init__(
        self,
        net: Any,
        cache: Cache,
        *,
        longest: int,
        left_padding: Int[Tensor, "B"] | None = None,
        listed: "Listed | None" = None,
    ) -> None:
        self.net = net
        self.cache = cache
        self.longest = longest
        self._is_rewound = False  # so that nothing may be forgotten
        self._filled = 0  # tokens that each row has, padding counted
        self._left_padding = left_padding
        self._listed = listed

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b goes on from its former row parents[b, w]."""
        if parents.size(1) > 1:
            self.cache.reorder(parents)

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Only these sentences go on."""
        self.cache = self.cache.select(sentences)
        if self._left_padding is not None:
            self._left_padding = self._left_padding[sentences]
        if self._listed is not None:
            self._listed.select(sentences)

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "Decoding"
    ) -> Float[Tensor, "N V"]:
        """What a search calls; all of the start at first, then with one new token each time."""
        assert state is self
        states = self._next_states(prefixes)
        if self._listed is not None:
            return self._listed.log_probs(states[:, 0])
        return _log_softmax(self.net.head(states)[:, 0])

    def next_logits(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N V"]:
        """The same before probabilities are formed, of the whole vocabulary."""
        logits: Tensor = self.net.head(self._next_states(prefixes))
        return logits[:, 0]

    def _next_states(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N 1 D"]:
        new = prefixes if self._filled == 0 else prefixes[:, -1:]
        if self._filled + new.size(1) > self.longest:
            new = prefixes[:, -max(1, self.longest // 2) :]
            texts, beams = self.cache.num_sources, self.cache.beams
            self.cache = self.net.start(texts, capacity=self.cache.capacity, beams=beams)
            self._filled, self._left_padding = 0, None
        states: Tensor = self.net.decode(self.tokens(new), self.cache)
        return states[:, -1:]

    def feed(self, tokens: Int[Tensor, "t"]) -> Float[Tensor, "t V"]:
        """Log-probabilities after each of several new tokens of one text, which may be rewound."""
        self._is_rewound = True
        new = self.tokens(tokens[None].to(self.cache.device))
        return _log_softmax(self.net.head(self.net.decode(new, self.cache))[0])

    def rewind(self, length: int) -> None:
        """Of one text: forget all but the first `length` tokens."""
        self._filled = min(self._filled, length)
        self.cache.rewind(length)

    def tokens(self, new: Int[Tensor, "N t"]) -> Tokens:
        """New tokens with their positions; the cache has room for them."""
        rows, count = new.shape
        beams = rows // self.cache.num_sources
        columns = torch.arange(self._filled, self._filled + count, device=new.device)[None]
        begins = self._filled == 0
        self._filled += count
        self.cache.reserve(beams * count, forgets=not self._is_rewound)
        if self._left_padding is None:
            return Tokens(new, columns)
        positions = columns - self._left_padding.repeat_interleave(beams)[:, None]
        if begins:
            return Tokens(new, positions.clamp(min=0), positions >= 0)
        return Tokens(new, positions)


class Listed:
    """The tokens that each of B texts may have; others are as if the vocabulary had none of them.

    Logits are formed of the U tokens that any of the texts may have.
    """

    def __init__(self, head: OutputHead, words: Sequence[Sequence[int]]) -> None:
        device = head.out.weight.device
        self.size = head.out.out_features
        rows = [torch.tensor(row, dtype=torch.long, device=device) for row in words]
        self.words = torch.cat(rows).unique()
        self.head = head.restrict_vocabulary(self.words)
        self.allowed = torch.stack([torch.isin(self.words, row) for row in rows])

    def select(self, texts: Int[Tensor, "M"]) -> None:
        """Only these texts go on."""
        self.allowed = self.allowed[texts]

    def log_probs(self, states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Of the rows of the texts, equally many each."""
        allowed = self.allowed.repeat_interleave(len(states) // len(self.allowed), dim=0)
        logits = self.head(states).float().masked_fill(~allowed, -torch.inf)
        found = logits.new_full((len(states), self.size), -torch.inf)
        return found.index_copy_(1, self.words, logits.log_softmax(-1))


def _log_softmax(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """In place on a CPU, where new memory for so many numbers costs more than they do."""
    logits = logits.float()
    if torch.is_grad_enabled() or logits.device.type != "cpu":
        return logits.log_softmax(-1)
    return torch.log_softmax(logits, -1, out=logits)


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "N t"], Int[Tensor, "N"] | None]:
    """Rows that end together, and how much padding stands before each; None: none anywhere."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    padding = [width - len(row) for row in rows]
    return ids, torch.tensor(padding, device=device) if any(padding) else None
