"""Tokens of a batch (ids, positions, padding and segments), and which of them attention sees."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.errors import UserError, describe
from heedful.parts.helpers import move

PaddingSide = Literal["right", "left"]


class Span(NamedTuple):
    """`Tokens` without ids, as those in a cache; the same fields."""

    positions: Int[Tensor, "#B T"]
    real: Bool[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    is_aligned: bool = False
    longest_text: int | None = None
    real_index: Int[Tensor, " N"] | None = None


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids with their positions: padded rows, packed rows or newly decoded tokens.

    Attributes:
        ids: (B, T).
        positions: (B, T), or (1, T) if equal in all rows: position of each token in its sequence,
            from 0. Padding has any valid position.
        real: (B, T), padding mask, False at padding; None: no padding.
        segments: (B, T), number of the segment (text) of each token in a packed row; attention
            stays within a segment (Krell et al. 2021), so no two of a row may have one number.
            None: one segment per row.
        is_aligned: the position of each token is its column, so padding is on the right.
        longest_text: upper bound of the tokens per segment of packed rows, known on the host, so
            that attention can skip keys that are farther away. None: unknown.
        real_index: (N,), index of each real token in the flattened B·T tokens, found on the host,
            so that training can skip padding without waiting for the device. None: unknown.

    >>> ids, lengths = torch.tensor([[5, 6, 7], [0, 8, 9]]), torch.tensor([3, 2])
    >>> tokens = Tokens.from_ids(ids, lengths, "left")
    >>> tokens.positions
    tensor([[0, 1, 2],
            [0, 0, 1]])
    >>> tokens.real
    tensor([[ True,  True,  True],
            [False,  True,  True]])
    """

    ids: Int[Tensor, "B T"]
    positions: Int[Tensor, "#B T"]
    real: Bool[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    is_aligned: bool = False
    longest_text: int | None = None
    real_index: Int[Tensor, " N"] | None = None

    @classmethod
    def from_ids(
        cls,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, "B"] | None = None,
        padding_side: PaddingSide = "right",
        segments: Int[Tensor, "B T"] | None = None,
        longest_text: int | None = None,
    ) -> "Tokens":
        """Tokens of padded or packed ids; positions start at 0 in each segment.

        It does not synchronize with the device, so it does not check values: the forward methods of
        nets do (`check_batch`).

        Args:
            ids: (B, T).
            lengths: (B,), real tokens of each row; default: all.
            padding_side: side of the padding.
            segments: (B, T), any numbers that differ between adjacent segments; they are numbered
                from 0 in each row, so that a number that recurs is another segment.
            longest_text: see `Tokens`.
        """
        size = ids.size(1)
        columns = torch.arange(size, device=ids.device)
        if lengths is None and not size:
            lengths = ids.new_zeros(ids.size(0))
        if lengths is None:
            if segments is None:
                return cls(ids, columns[None], is_aligned=True)
            segments, positions = _number_segments(segments, None)
            return cls(ids, positions, None, segments, longest_text=longest_text)
        if padding_side == "right":
            positions, real = columns[None], columns < lengths[:, None]
        else:
            positions = columns - (size - lengths)[:, None]
            positions, real = positions.clamp(min=0), positions >= 0
        if segments is not None:
            segments, positions = _number_segments(segments, real)
            return cls(ids, positions, real, segments, longest_text=longest_text)
        return cls(ids, positions, real, is_aligned=padding_side == "right")

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Number of real tokens of each row."""
        if self.real is None:
            return torch.full(self.ids.shape[:1], self.ids.size(1), device=self.ids.device)
        return self.real.sum(1)

    def to(self, device: torch.device | str) -> "Tokens":
        """A copy on another device."""
        names = ("ids", "positions", "real", "segments", "real_index")
        tensors = {name: getattr(self, name) for name in names}
        moved: Any = {n: None if t is None else move(t, device) for n, t in tensors.items()}
        return replace(self, **moved)

    def rows(self, first: int, last: int) -> "Tokens":
        """The rows from `first` to before `last`."""
        names = ("ids", "real", "segments")
        tensors = {name: getattr(self, name) for name in names}
        parts: Any = {n: None if t is None else t[first:last] for n, t in tensors.items()}
        if self.positions.size(0) > 1:  # otherwise shared by all rows
            parts["positions"] = self.positions[first:last]
        if self.real_index is not None:
            start, stop = (row * self.ids.size(1) for row in (first, last))
            index = self.real_index
            parts["real_index"] = index[(index >= start) & (index < stop)] - start
        return replace(self, **parts)

    def longest(self) -> int:
        """Number of tokens of the longest sequence, as a host integer (synchronizes)."""
        positions = self.positions
        if self.real is not None:
            positions = torch.where(self.real, positions, -1)
        return int(positions.max()) + 1 if positions.numel() else 0


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


def check_batch(
    name: str, ids: Int[Tensor, "B T"], lengths: Int[Tensor, "B"] | None, side: PaddingSide
) -> None:
    """Raise UserError unless ids and lengths are those of a batch; ids are checked by `check_ids`.

    Lengths on an accelerator, and all of a traced net, are not checked: that would synchronize.

    Args:
        name: of the ids, in errors.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        form: object = (
            f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else describe(ids)
        )
        raise UserError(f"{name} must be a tensor (B, T) of token ids, not {form}")
    if side not in ("right", "left"):
        raise UserError(f"padding_side must be right or left, not {side!r}")
    if lengths is None:
        return
    size = ids.size(1)
    if not isinstance(lengths, Tensor) or lengths.shape != ids.shape[:1]:
        form = str(tuple(lengths.shape)) if isinstance(lengths, Tensor) else describe(lengths)
        raise UserError(
            f"the lengths of {name} must be a tensor ({ids.size(0)},), one for each row, not {form}"
        )
    if lengths.device.type != "cpu":
        return
    if lengths.numel() and (int(lengths.max()) > size or int(lengths.min()) < 0):
        raise UserError(
            f"lengths must be from 0 to {size}, the width of the batch, "
            f"not {int(lengths.min())} to {int(lengths.max())}"
        )


def check_ids(ids: Int[Tensor, "B T"], vocab_size: int, name: str = "token ids") -> None:
    """Raise UserError for ids that an embedding of `vocab_size` rows does not have.

    For messages, after an embedding failed: the check reads all ids.
    """
    if not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{name} must be from 0 to {vocab_size - 1}, not {low} to {high}; is this the "
            "tokenizer of the model?"
        )


def padding_mask(
    lengths: Int[Tensor, "B"], size: int, side: PaddingSide = "right"
) -> Bool[Tensor, "B {size}"]:
    """Padding mask: True at the real tokens of rows that are padded to `size` columns."""
    columns = torch.arange(size, device=lengths.device)
    if side == "left":
        columns = columns.flip(0)
    return columns < lengths[:, None]


def _number_segments(
    segments: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Numbers from 0 of the segments of packed rows, and positions that start at 0 in each.

    Adjacent tokens of one number are one segment; padding, with any numbers, is one of its own.
    """
    columns = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if real is not None:
        begins[:, 1:] |= real[:, 1:] != real[:, :-1]
    positions = columns - torch.where(begins, columns, 0).cummax(dim=1).values
    return begins.cumsum(dim=1) - 1, positions


def _columns(tokens: Tokens | Span, columns: range) -> Span:
    """The tokens of some columns."""
    index = slice(columns.start, columns.stop)
    tensors = (tokens.positions, tokens.real, tokens.segments)
    return Span(*(None if t is None else t[:, index] for t in tensors))  # type: ignore[arg-type]


torch.export.register_dataclass(Tokens)  # for `torch.export` of nets
