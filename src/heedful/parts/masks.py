"""Masks: who may attend to whom, in one convention.

A mask is bool, `True` = may attend, broadcastable to (B, H, T, K). Padding is told by lengths,
never by comparing ids, so that the padding id may equal any other. Causality is a property of the
call, right also when there are fewer queries than keys (a cache).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PaddingSide = Literal["right", "left"]


def padding_mask(
    lengths: Int[Tensor, "B"], size: int, side: PaddingSide = "right"
) -> Bool[Tensor, "B {size}"]:
    """True at the real positions of rows that were padded to `size`."""
    positions = torch.arange(size, device=lengths.device)
    if side == "left":
        positions = positions.flip(0)
    return positions < lengths[:, None]


def causal_mask(
    queries: int, keys: int, device: torch.device | None = None
) -> Bool[Tensor, "{queries} {keys}"]:
    """True where key <= query, the last query standing at the last key (bottom-right aligned)."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=keys - queries)


def combine(*masks: Bool[Tensor, "..."] | None) -> Bool[Tensor, "..."] | None:
    """What all of the masks allow; `None` allows everything."""
    combined: Tensor | None = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined


def token_positions(
    lengths: Int[Tensor, "B"] | None, size: int, side: PaddingSide
) -> Int[Tensor, "B {size}"] | None:
    """Position of every token in its own row, so that left padding moves none of them.

    `None` where the positions are simply 0, 1, 2, … in every row (right padding, or no padding).
    Left pads get 0: their states are never looked at, but tables must not be indexed below zero.
    """
    if lengths is None or side == "right":
        return None
    shift = (size - lengths)[:, None]
    return (torch.arange(size, device=lengths.device) - shift).clamp(min=0)


@dataclass(frozen=True)
class MaskRule:
    """Who may attend to whom, said by rules, so that a part of the table can be made alone.

    Query i stands at key K - T + i: the last query at the last key. A rule that is left out forbids
    nothing.

    Args:
        queries, keys: T and K.
        causal: a query attends to keys up to its own place.
        window: and only to keys less than this many places away, its own counted (Mistral's and
            GPT-Neo's definition: W keys in all where it is causal).
        real_queries, real_keys: (B, T) and (B, K), False at padding. A real query's own key is
            real, where queries and keys are the same tokens.
        query_documents, key_documents: (B, T) and (B, K): which text of a packed row a token is of;
            attention stays inside it (Krell et al. 2021).
    """

    queries: int
    keys: int
    causal: bool = False
    window: int | None = None
    real_queries: Bool[Tensor, "B T"] | None = None
    real_keys: Bool[Tensor, "B K"] | None = None
    query_documents: Int[Tensor, "B T"] | None = None
    key_documents: Int[Tensor, "B K"] | None = None

    def table(
        self, rows: range, columns: range, device: torch.device | None
    ) -> Bool[Tensor, "#B 1 #t k"] | None:
        """The part of these queries and keys; None where nothing of it is forbidden."""
        found: Tensor | None = None
        first, last = self.place(rows.start), self.place(rows.stop - 1)
        if self.causal and columns.stop - 1 > first:
            found = self._distances(rows, columns, device) >= 0
        if self.window is not None:
            if last - columns.start >= self.window:
                found = combine(found, self._distances(rows, columns, device) < self.window)
            if columns.stop - 1 - first >= self.window and not self.causal:
                found = combine(found, self._distances(rows, columns, device) > -self.window)
        if self.real_keys is not None:
            found = combine(found, self.real_keys[:, None, None, columns.start : columns.stop])
        if self.real_queries is not None:
            found = combine(found, self.real_queries[:, None, rows.start : rows.stop, None])
        if self.query_documents is not None and self.key_documents is not None:
            own = self.query_documents[:, None, rows.start : rows.stop, None]
            seen = self.key_documents[:, None, None, columns.start : columns.stop]
            found = combine(found, own == seen)
        return None if found is None else found.expand(-1, -1, -1, len(columns))

    def place(self, query: int) -> int:
        """The key that a query stands at."""
        return self.keys - self.queries + query

    def reach(self, rows: range) -> range:
        """The keys that any of these queries may attend to, by causality and window alone."""
        start, stop = 0, self.keys
        if self.window is not None:
            start = max(0, self.place(rows.start) - self.window + 1)
            stop = min(stop, self.place(rows.stop - 1) + self.window)
        if self.causal:
            stop = min(stop, self.place(rows.stop - 1) + 1)
        return range(start, stop)

    def rows(self) -> Bool[Tensor, "#B 1 #T 1"] | None:
        """Which queries have anything to attend to; None: all."""
        real = self.real_queries
        if self.real_keys is not None and not self.causal:
            some = self.real_keys.any(-1, keepdim=True)
            real = some if real is None else real & some
        return None if real is None else real[:, None, :, None]

    def _distances(
        self, rows: range, columns: range, device: torch.device | None
    ) -> Int[Tensor, "1 1 t k"]:
        return key_distances(rows, columns, self.place(0), device)[None, None]


def key_distances(
    rows: range, columns: range, offset: int, device: torch.device | None = None
) -> Int[Tensor, "t k"]:
    """How many places each key lies before each query, where query i stands at key offset + i."""
    queries = torch.arange(rows.start, rows.stop, device=device) + offset
    return queries[:, None] - torch.arange(columns.start, columns.stop, device=device)


class Scores:
    """What a position scheme adds to the scores of attention, formed where it is needed.

    As a mask's rule is: a sliding window asks for the part that it sees, and the layers of a stack
    share what was formed.

    Args:
        of: gives (1, H, t, k) for some queries and keys.
        queries, keys: how many there are.
    """

    def __init__(
        self, of: Callable[[range, range], Float[Tensor, "1 H t k"]], queries: int, keys: int
    ) -> None:
        self._of = of
        self.queries = queries
        self.keys = keys
        self._formed: dict[tuple[range, range], Tensor] = {}

    def part(self, rows: range, columns: range) -> Float[Tensor, "1 H t k"]:
        """Those of some queries and keys."""
        if (rows, columns) not in self._formed:
            self._formed[rows, columns] = self._of(rows, columns)
        return self._formed[rows, columns]

    def whole(self) -> Float[Tensor, "1 H T K"]:
        """All of them."""
        return self.part(range(self.queries), range(self.keys))


class AttentionMask:
    """A mask made ready once a forward pass and shared by all layers.

    It is given as a bool table, four-dimensional, or as a `MaskRule`. From it come `bias`, what is
    added to the scores, and `rows`, which queries have anything to attend to. A query that has
    nothing gets zeros and gives zero gradients: its softmax runs over equal finite numbers (no NaN
    forward or backward) and its result is multiplied by zero.

    Args:
        allowed: the table, or the rule that it follows from.
        scores: added to the scores besides: what a position scheme says.
    """

    def __init__(
        self,
        allowed: Bool[Tensor, "..."] | MaskRule,
        *,
        scores: Scores | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rule = allowed if isinstance(allowed, MaskRule) else None
        self.scores = scores
        self._device = device
        self._tables: dict[tuple[range, range], Tensor | None] = {}
        self._bias: dict[torch.dtype, Tensor | None] = {}
        self._within: dict[int, AttentionMask] = {}
        self._table: Tensor | None = None
        self._rows: Tensor | None = None
        if isinstance(allowed, MaskRule):
            self._rows = allowed.rows()
            return
        if allowed.dtype != torch.bool:
            raise TypeError(
                f"a mask must be bool with True = may attend, not {allowed.dtype}; "
                "an additive mask `m` becomes one by `m == 0`"
            )
        if allowed.dim() != 4:
            raise ValueError(
                f"a mask must have 4 dimensions (batch, heads, queries, keys), not {allowed.dim()}"
            )
        self._table = allowed
        self._rows = allowed.any(-1, keepdim=True)

    @classmethod
    def of(cls, mask: "AttentionMask | Bool[Tensor, '...'] | None") -> "AttentionMask | None":
        """The mask itself, or a bool tensor made ready."""
        return mask if mask is None or isinstance(mask, AttentionMask) else cls(mask)

    @property
    def allowed(self) -> Bool[Tensor, "#B #H #T K"] | None:
        """The whole table; None where nothing is forbidden."""
        if self.rule is None:
            return self._table
        return self._part(range(self.rule.queries), range(self.rule.keys))

    @property
    def rows(self) -> Bool[Tensor, "#B #H #T 1"] | None:
        """True for queries that have at least one key to attend to; None: all have."""
        return self._rows

    @property
    def is_causal_alone(self) -> bool:
        """Whether it only says that no query looks ahead, which fused kernels do by themselves."""
        rule = self.rule
        if rule is None or not rule.causal or rule.queries != rule.keys:
            return False
        others = (rule.window, rule.real_queries, rule.real_keys, rule.query_documents)
        return self.scores is None and all(other is None for other in others)

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "#B #H #T K"] | None:
        """The position scheme's scores where allowed; elsewhere what no real score stands up to.

        That is half of the type's lowest number, whose softmax is exactly zero beside any score.
        The whole of it overflows to -inf in fp16 once a negative score is added, and a row of
        -inf is NaN. None where nothing is to be added.
        """
        if dtype not in self._bias:
            scores = None if self.scores is None else self.scores.whole()
            self._bias[dtype] = _bias(self.allowed, scores, dtype)
        return self._bias[dtype]

    def part_bias(
        self, rows: range, columns: range, dtype: torch.dtype
    ) -> Float[Tensor, "#B #H t k"] | None:
        """`bias` of some queries and keys, made alone: for attention that never sees the whole."""
        scores = None if self.scores is None else self.scores.part(rows, columns)
        return _bias(self._part(rows, columns), scores, dtype)

    def plus(self, scores: Scores) -> "AttentionMask":
        """The same mask with a position scheme's scores."""
        assert self.scores is None, "a mask has one position scheme"
        source = self._table if self.rule is None else self.rule
        assert source is not None
        return AttentionMask(source, scores=scores, device=self._device)

    def within(self, window: int) -> "AttentionMask":
        """The same mask for a layer with a sliding window; needs a rule."""
        assert self.rule is not None, "a window is put on a rule, not on a table"
        if window not in self._within:
            rule = replace(self.rule, window=window)
            self._within[window] = AttentionMask(rule, scores=self.scores, device=self._device)
        return self._within[window]

    def _part(self, rows: range, columns: range) -> Tensor | None:
        assert self.rule is not None
        if (rows, columns) not in self._tables:
            self._tables[rows, columns] = self.rule.table(rows, columns, self._device)
        return self._tables[rows, columns]


def _bias(allowed: Tensor | None, scores: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if allowed is None:
        return None if scores is None else scores.to(dtype)
    blocked = torch.finfo(dtype).min / 2
    if scores is not None:
        return torch.where(allowed, scores.to(dtype), blocked)
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, blocked)
