"""Which keys a query may attend to: a predicate of positions, padding and segments; its bias."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.parts.rotary import Rotation
from heedful.parts.tokens import Span, Tokens


def visible_keys(
    queries: Span, keys: Span, *, causal: bool, window: int | None = None
) -> Bool[Tensor, "#B t k"] | None:
    """True where a query may attend to a key; None: everywhere.

    Both must be real and of one segment. Causal: the key's position is at most the query's.
    A window of W keeps keys less than W positions away (W keys in all where it is causal, as in
    Mistral and GPT-Neo).
    """
    found: Tensor | None = None
    if causal or window is not None:
        distance = queries.positions[:, :, None] - keys.positions[:, None, :]
        found = distance >= 0 if causal else distance > -(window or 0)
        if window is not None:
            found = found & (distance < window)
    if keys.real is not None:
        real = keys.real[:, None, :]
        found = real if found is None else found & real
    if queries.real is not None:
        real = queries.real[:, :, None]
        found = real if found is None else found & real
    if queries.segments is not None and keys.segments is not None:
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        found = same if found is None else found & same
    if found is None:
        return None
    return found.expand(-1, queries.positions.size(1), keys.positions.size(1))


class MaskSpec:
    """The keys that each query of a pass may attend to: a predicate, without any tensor of scores.

    A query with nothing to attend to gets zeros and gives zero gradients: its softmax runs over
    equal finite numbers (no NaN forward or backward) and its output is multiplied by 0.

    Args:
        queries: the tokens of a pass.
        keys: what they may attend to.
        allowed: (B, T, K), what else must hold: True = may attend.

    Attributes:
        real: (B, T), False for queries that attend to nothing; None: all attend to something.
    """

    def __init__(
        self,
        queries: Span,
        keys: Span,
        *,
        causal: bool,
        allowed: Bool[Tensor, "#B T K"] | None = None,
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.causal = causal
        self.allowed = allowed
        self.real = queries.real
        if keys.real is not None and not causal:
            some = keys.real.any(-1, keepdim=True)
            self.real = some if self.real is None else self.real & some

    @classmethod
    def from_tokens(cls, tokens: Tokens, *, causal: bool) -> "MaskSpec":
        """The tokens of each row among themselves."""
        span = tokens.span
        return cls(span, span, causal=causal)

    @property
    def is_sequence(self) -> bool:
        """Whether queries and keys are the same tokens, in the order of their positions."""
        return self.queries is self.keys

    @property
    def is_causal_alone(self) -> bool:
        """Whether causality alone hides all that must not be seen, as fused kernels know it.

        Padding on the right stands after every real query, so that causality hides it.
        """
        nothing_else = self.allowed is self.queries.segments is None
        shows_no_padding = self.queries.real is None or self.queries.is_aligned
        return self.causal and self.is_sequence and nothing_else and shows_no_padding

    def bias(
        self,
        dtype: torch.dtype,
        *,
        scheme: nn.Module | None = None,
        window: int | None = None,
        repeats: int = 1,
        part: tuple[range, range] | None = None,
    ) -> Float[Tensor, "#B #H t k"] | None:
        """A tensor to add to the scores; None: there is nothing to add.

        A position scheme's scores where a query may attend to a key; elsewhere half of the type's
        lowest number, whose softmax is exactly zero beside any score. (The whole of it overflows to
        -inf in fp16 once a negative score is added, and a row of -inf is NaN.)

        Args:
            scheme: gives scores (#B, H, t, k) of positions (`parts/relative.py`).
            repeats: query heads that share a key head: (#B, H / repeats, repeats · t, k) then.
            part: queries and keys for which it is formed alone; default: all.
        """
        queries, keys, allowed = self.queries, self.keys, self.allowed
        if part is not None:
            queries, keys = queries.part(part[0]), keys.part(part[1])
        seen = visible_keys(queries, keys, causal=self.causal, window=window)
        if allowed is not None:
            seen = allowed if seen is None else seen & allowed
        bias: Tensor | None = None
        if scheme is not None:
            bias = scheme(queries.positions, keys.positions).to(dtype)
        if seen is not None:
            scores = torch.zeros((), dtype=dtype, device=seen.device) if bias is None else bias
            bias = torch.where(seen[:, None], scores, torch.finfo(dtype).min / 2)
        if bias is not None and repeats > 1:
            if bias.size(1) == 1:
                bias = bias.repeat(1, 1, repeats, 1)
            else:
                bias = bias.unflatten(1, (-1, repeats)).flatten(2, 3)
        return bias


class MaskBlock(NamedTuple):
    """Queries that attend together, the keys within their reach, and the bias of their scores.

    Ranges of columns; None: all of them.
    """

    queries: range | None
    keys: range | None
    bias: Float[Tensor, "#B #H t k"] | None


class AttentionMask(NamedTuple):
    """All that an attention needs to know of a pass, formed before the first block.

    It is handed down, so that no layer forms it while its activations are checkpointed, and equal
    layers share its tensors (`MultiHead.mask`).

    Attributes:
        real: (B, T), False for queries that attend to nothing; None: all attend to something.
        rotation: of rotary positions; None: the attention has none.
        blocks: one for all queries, or one for each part of them.
        forms_weights: plain products that form the weights, not a fused kernel.
        is_causal: the kernel's own causality is all that is to be seen; there is no bias.
    """

    real: Bool[Tensor, "#B #T"] | None
    rotation: Rotation | None
    blocks: tuple[MaskBlock, ...]
    forms_weights: bool
    is_causal: bool
