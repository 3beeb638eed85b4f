"""A logit rule that keeps texts out of decoded outputs, however their tokens divide them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.data.decoding import TokenTexts
from heedful.errors import UserError
from heedful.generation.context import Context


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
        ids = [token for token in ids if 0 <= token < len(later) and later[token]]
        if not ids:
            return None
        longest, tail = max(map(len, self._banned), default=0), b""
        for token in reversed(ids[1:]):
            tail = later[token] + tail
            if len(tail) >= longest:
                return tail
        return self.tokens.first[ids[0]] + tail
