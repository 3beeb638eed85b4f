"""Self-attention and cross-attention with several heads."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.cache import LayerCache
from heedful.parts.joined_cache import JoinedLayer
from heedful.parts.masks import AttentionMask, JoinedMask, MaskSpec
from heedful.parts.multi_head import MultiHead
from heedful.parts.positions import RotaryPositions, rotate


class Attention(MultiHead):
    """Self-attention. One matrix `qkv` ((H + 2·G)·E, D) projects queries, keys and values.

    Args:
        bias: bias of that matrix.
        query_norm, key_norm: norms over the width of each head, before the rotation (Qwen 3,
            Gemma 3), both or none; default: none.
        options: see `MultiHead`.

    Raises:
        UserError: only one of the norms is given; as in `MultiHead`.

    >>> attention = Attention(16, 2)
    >>> x = torch.randn(3, 5, 16)
    >>> attention(x).shape
    torch.Size([3, 5, 16])
    >>> attention(x, causal=True).shape
    torch.Size([3, 5, 16])
    >>> mask = torch.ones(5, 5, dtype=torch.bool).tril()
    >>> output, weights = attention(x, mask, return_weights=True)
    >>> weights.shape
    torch.Size([3, 2, 5, 5])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        bias: bool = True,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        if (query_norm is None) != (key_norm is None):
            raise UserError("query_norm and key_norm work together; give both, or none")
        self.qkv = nn.Linear(d_model, sum(self.split_sizes), bias=bias)
        self.query_norm, self.key_norm = query_norm, key_norm

    def _can_use_trained_attention(self, mask: AttentionMask) -> bool:
        """False with norms of heads; otherwise as for every `MultiHead`."""
        return self.query_norm is None and super()._can_use_trained_attention(mask)

    def prepare_mask(
        self, spec: MaskSpec, x: Float[Tensor, "N T D"], **options: Any
    ) -> AttentionMask:
        """See `MultiHead.prepare_mask`; of a `JoinedMask` each part is prepared."""
        if not isinstance(spec, JoinedMask):
            return super().prepare_mask(spec, x, **options)
        rotation = None
        if isinstance(self.position, RotaryPositions):
            rotation = self.position(spec.queries.positions)
        parts = tuple(
            super(Attention, self).prepare_mask(part, x, **options) for part in spec.parts
        )
        return AttentionMask(None, rotation, (), forms_weights=False, is_causal=False, parts=parts)

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Numbers of rows of `qkv` that belong to queries, keys and values."""
        key_rows = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key_rows, key_rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: MaskSpec | AttentionMask | Tensor | None = None,
        cache: LayerCache | JoinedLayer | None = None,
        *,
        causal: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where no key is visible.

        Args:
            mask: keys that each query may attend to: a bool tensor (T, T) or (B, T, T), True = may
                attend; a `MaskSpec`, which also knows padding and packed rows; or the mask that
                `prepare_mask` made of one. Default: all keys.
            cache: the keys and values of `x` are written to it, and attention runs over all its
                slots; needs the mask that `Cache.begin` returns.
            causal: hide the keys after each query. A `MaskSpec` holds this itself.
            return_weights: return (output, weights (B, H, T, K)): weights before dropout, zero
                where no key is visible; not with a prepared mask.

        Raises:
            UserError: `x` has another width than D, or `mask` another type or shape.
        """
        prepared = self._resolve_mask(mask, x, x, causal=causal, return_weights=return_weights)
        projected = self.qkv(x)
        if prepared.rows is not None:
            return self._attend_rows(projected, None, prepared)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        both, value = self._split_heads(projected, prepared.queries).split(
            [heads + kv_heads, kv_heads], dim=1
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split([heads, kv_heads], dim=1)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if prepared.rotation is not None:
            both = rotate(both, prepared.rotation)
        query, key = both.split([heads, kv_heads], dim=1)
        if isinstance(cache, JoinedLayer):
            return self._attend_parts(query, key, value, prepared, cache)
        if cache is not None:
            key, value = cache.update(key, value)
        return self._attend_and_project(query, key, value, prepared, return_weights)

    def _attend_parts(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, cache: JoinedLayer
    ) -> Float[Tensor, "B T D"]:
        """The output of attention over the rows of each part."""
        heads = []
        rows = zip(*(states.split(cache.sizes) for states in (query, key, value)), strict=True)
        for (part, *new), layer, own in zip(rows, cache.parts, mask.parts, strict=True):
            heads.append(self._attend_blocks(part, *layer.update(*new), own)[0])
        return self._project_heads(torch.cat(heads).transpose(1, 2).flatten(2), None)


class CrossAttention(MultiHead):
    """Attention from a target to a source.

    `q` (H·E, D) projects the target to queries, `kv` (2·G·E, D) the source to keys and values.

    Args:
        bias: bias of both matrices.
        options: see `MultiHead`; no window, and no rotary positions: positions of a source and of
            a target are those of different texts.

    Raises:
        UserError: a window or rotary positions; as in `MultiHead`.

    >>> attention = CrossAttention(16, 2)
    >>> target, source = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    >>> attention(target, source).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        if self.window is not None:
            raise UserError("cross-attention has no window: leave out window")
        if isinstance(self.position, RotaryPositions):
            raise UserError(
                "cross-attention has no rotary positions; leave out position, or give a scheme "
                "that adds to the scores (parts/positions.py)"
            )
        self.q = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.kv = nn.Linear(d_model, 2 * self.num_kv_heads * self.head_dim, bias=bias)
        # Initialized like parts of one matrix, as in self-attention (`parts/init.py`).
        joint_rows: Any = self.q.out_features + self.kv.out_features
        self.q.joint_rows = self.kv.joint_rows = joint_rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        mask: MaskSpec | AttentionMask | Tensor | None = None,
        *,
        projected: Float[Tensor, "B both S E"] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where no key is visible.

        Args:
            memory: encoder states of the source.
            mask: source tokens that each target token may attend to: as in `Attention.forward`,
                (T, S) or (B, T, S). Default: all.
            projected: keys and values of the source by `project_memory`, in place of `memory`.
            return_weights: as in `Attention.forward`; the weights are (B, H, T, S).

        Raises:
            UserError: neither `memory` nor `projected` is given, the width is not D, or `mask` has
                another type or shape.
        """
        keys = memory if projected is None else projected
        if keys is None:
            raise UserError("cross-attention needs `memory`, the states of the source")
        if projected is None and keys.size(0) != x.size(0):
            raise UserError(f"memory has {keys.size(0)} rows, but x has {x.size(0)}")
        prepared = self._resolve_mask(mask, x, keys, causal=False, return_weights=return_weights)
        if prepared.rows is not None:
            return self._attend_rows(self.q(x), self.kv(keys), prepared)
        if projected is None:
            projected = self._split_heads(self.kv(keys), prepared.keys)
        key, value = projected.chunk(2, dim=1)
        query = self._split_heads(self.q(x), prepared.queries)
        return self._attend_and_project(query, key, value, prepared, return_weights)

    def project_memory(self, memory: Float[Tensor, "B S D"]) -> Float[Tensor, "B both S E"]:
        """Keys and then values of a source; in decoding they are computed once."""
        return self._split_heads(self.kv(memory), None)
