"""Attention masks: the keys that each query may attend to, and the biases computed from them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import UserError, describe
from heedful.parts.tokens import Span, Tokens


def visible_keys(
    queries: Tokens | Span, keys: Tokens | Span, *, causal: bool, window: int | None = None
) -> Bool[Tensor, "#B t k"] | None:
    """Bool mask, True where a query may attend to a key; None if every query may attend to all.

    Both must be real tokens of the same segment.

    Args:
        causal: the position of the key must be at most that of the query.
        window: W; the key must be less than W positions away. With `causal` these are W keys, the
            query's own included (Mistral, GPT-Neo). Also assumed by `diagonal_blocks`,
            `packed_block_mask`, `LayerGroup` (drops keys), `backends/torch/batch_rows.py`,
            `backends/aot` and `backends/ctranslate2/conversion.py`.
    """
    mask: Tensor | None = None
    if causal or window is not None:
        distance = queries.positions[:, :, None] - keys.positions[:, None, :]
        mask = distance >= 0 if causal else distance > -(window or 0)
        if window is not None:
            mask = mask & (distance < window)
    if keys.real is not None:
        real = keys.real[:, None, :]
        mask = real if mask is None else mask & real
    if queries.real is not None:
        real = queries.real[:, :, None]
        mask = real if mask is None else mask & real
    if queries.segments is not None and keys.segments is not None:
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        mask = same if mask is None else mask & same
    if mask is None:
        return None
    return mask.expand(-1, queries.positions.size(1), keys.positions.size(1))


class MaskSpec:
    """The mask of one forward pass as a rule over positions, padding and segments.

    No (T, K) tensor is formed until an attention layer reads `bias`. A query without a visible key
    has a zero output and zero gradients: its softmax runs over equal finite scores (never NaN,
    forward or backward) and its output is multiplied by 0.

    Args:
        queries: tokens that attend.
        keys: tokens that are attended to; default: the queries themselves (self-attention).
        causal: keys after the query are hidden.
        allowed: (B, T, K), a further condition: True = may attend.

    Attributes:
        has_key: (B, T), False for queries without a visible key; None: every query has one.

    >>> tokens = Tokens.from_ids(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]))
    >>> spec = MaskSpec(tokens, causal=True)
    >>> spec.has_key
    tensor([[ True,  True,  True],
            [ True,  True, False]])
    """

    def __init__(
        self,
        queries: Tokens | Span,
        keys: Tokens | Span | None = None,
        *,
        causal: bool,
        allowed: Bool[Tensor, "#B T K"] | None = None,
    ) -> None:
        self.queries = queries
        self.keys = keys = queries if keys is None else keys
        self.causal = causal
        self.allowed = allowed
        self.has_key = queries.real
        if keys.real is not None and not causal:
            of_row = keys.real.any(-1, keepdim=True)
            self.has_key = of_row if self.has_key is None else self.has_key & of_row

    @classmethod
    def from_bool(
        cls,
        mask: Tensor,
        shape: tuple[int, int, int],
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> "MaskSpec":
        """A mask given as a tensor, for positions 0, 1, … of queries and keys.

        Args:
            mask: bool, (T, K), (1, T, K) or (B, T, K): True = may attend.
            shape: B, T and K of the call.
            causal, window: further conditions, see `visible_keys`.

        Raises:
            UserError: `mask` is not bool, or has another shape.
        """
        batch, num_queries, num_keys = shape
        if not isinstance(mask, Tensor):
            raise UserError(f"the attention mask must be a bool tensor, not {describe(mask)}")
        if mask.dtype != torch.bool:
            raise UserError(
                f"the attention mask is {str(mask.dtype).removeprefix('torch.')}; give a bool "
                "tensor that is True where a query may attend to a key"
            )
        size = tuple(mask.shape)
        if size[-2:] != (num_queries, num_keys) or size[:-2] not in ((), (1,), (batch,)):
            raise UserError(
                f"the attention mask has shape {size}; it must be ({num_queries}, {num_keys}) or "
                f"({batch}, {num_queries}, {num_keys}): queries by keys, for each row"
            )
        mask = mask if mask.dim() == 3 else mask[None]
        queries, keys = (Span(torch.arange(n, device=mask.device)[None]) for n in shape[1:])
        spec = cls(queries, keys, causal=causal, allowed=mask)
        visible = visible_keys(queries, keys, causal=causal, window=window)
        spec.has_key = (mask if visible is None else mask & visible).any(-1)
        return spec

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys are the same tokens, in the order of their positions."""
        return self.queries is self.keys

    @property
    def is_causal_alone(self) -> bool:
        """True if the mask is only causal, so that a fused kernel needs no bias.

        Padding on the right comes after every real query, so causality hides it.
        """
        no_other_condition = self.allowed is self.queries.segments is None
        padding_is_hidden = self.queries.real is None or self.queries.is_aligned
        return self.causal and self.is_self_attention and no_other_condition and padding_is_hidden

    @property
    def hides_padding_alone(self) -> bool:
        """True if real queries may attend to all real keys of their row."""
        packed = self.queries.segments is not None and self.keys.segments is not None
        return not (self.causal or packed) and self.allowed is None

    def bias(
        self,
        dtype: torch.dtype,
        *,
        scheme: nn.Module | None = None,
        window: int | None = None,
        repeats: int = 1,
        part: tuple[range, range] | None = None,
    ) -> Float[Tensor, "#B #H t k"] | None:
        """The tensor to add to the attention scores; None if there is nothing to add.

        Visible keys have the score of the position scheme (or 0), hidden keys half of the lowest
        number of `dtype`, whose softmax is exactly zero next to any score. (The lowest number
        itself overflows to -inf in fp16 when a negative score is added, and a row of -inf is NaN.)

        Args:
            scheme: computes scores (#B, H, t, k) from positions (`parts/positions.py`).
            window: see `visible_keys`.
            repeats: query heads per key head; the result is (#B, H / repeats, repeats · t, k).
            part: columns of queries and of keys to compute it for; default: all.
        """
        queries, keys, allowed = self.queries, self.keys, self.allowed
        if part is not None:
            queries, keys = _columns(queries, part[0]), _columns(keys, part[1])
        mask = visible_keys(queries, keys, causal=self.causal, window=window)
        if allowed is not None:
            mask = allowed if mask is None else mask & allowed
        bias: Tensor | None = None
        if scheme is not None:
            bias = scheme(queries.positions, keys.positions).to(dtype)
        if mask is not None:
            scores = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
            bias = torch.where(mask[:, None], scores, torch.finfo(dtype).min / 2)
        if bias is not None and repeats > 1:
            if bias.size(1) == 1:
                bias = bias.repeat(1, 1, repeats, 1)
            else:
                bias = bias.unflatten(1, (-1, repeats)).flatten(2, 3)
        return bias


def _columns(tokens: Tokens | Span, columns: range) -> Span:
    """The tokens of some columns."""
    index = slice(columns.start, columns.stop)
    tensors = (tokens.positions, tokens.real, tokens.segments)
    return Span(*(None if t is None else t[:, index] for t in tensors))  # type: ignore[arg-type]
