"""Self-attention and cross-attention with several heads."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.attend_products import AttentionOptions, zero_hidden_queries
from heedful.parts.attention_plans import AttentionPlan, plan_attention
from heedful.parts.cache import LayerCache
from heedful.parts.helpers import check_positive, has_hooks
from heedful.parts.joined_cache import JoinedLayer
from heedful.parts.masks import MaskSpec
from heedful.parts.positions import RotaryPositions, rotate
from heedful.parts.residual import Dropout
from heedful.parts.tokens import Span


class MultiHead(nn.Module):
    """Base of self- and cross-attention: heads, the plan of a pass, and the output projection.

    Sources: Vaswani et al. 2017, sec. 3.2.2; multi-query attention (G = 1), Shazeer 2019;
    grouped-query attention (1 < G < H), Ainslie et al. 2023; sliding windows, Beltagy et al. 2020.

    Args:
        d_model: width D of the input and the output.
        num_heads: query heads H.
        num_kv_heads: key/value heads G, each shared by H / G adjacent query heads; default: H.
        head_dim: width E of a head; default: D / H, which must be an integer.
        scale: factor of the scores; default: 1 / √E.
        window: number of keys that a causal query attends to, itself included; without `causal`,
            keys less than this many positions away on either side; default: all keys.
        softcap: bound of the scores (see `attend`); default: none.
        position: position scheme of `parts/positions.py`, rotary or added to the scores; layers may
            share it. Default: none.
        dropout: on the attention weights, in training only.
        out_bias: bias of the output projection.

    Attributes:
        weights_hook: identity over the attention weights (B, H, T, K), after the softmax and before
            dropout, for forward hooks: they read the weights, and a tensor that they return
            replaces them. In a cached step with W branches the shape is (B, H, W · T, K), with K
            slots of the cache. Weights are formed (with a window: the whole matrix) only while it
            has hooks.

    Raises:
        UserError: `num_heads` does not divide `d_model` (without `head_dim`), or `num_kv_heads`
            does not divide `num_heads`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        position: nn.Module | None = None,
        dropout: float = 0.0,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_positive(head_dim=head_dim, window=window, scale=scale, softcap=softcap)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and d_model % num_heads:
            raise UserError(
                f"d_model {d_model} is not divisible by num_heads {num_heads}; change one of them, "
                "or give head_dim"
            )
        if num_heads % kv_heads:
            raise UserError(
                f"num_heads {num_heads} is not divisible by num_kv_heads {kv_heads}; change one of "
                "them"
            )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.position = position
        self.weights_hook = nn.Identity()
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)
        self.uses_flex_attention = False  # set for compiled training (`training/block_compiler.py`)

    @property
    def options(self) -> AttentionOptions:
        """The settings of this module that `plan_attention` reads."""
        rotary = self.position if isinstance(self.position, RotaryPositions) else None
        return AttentionOptions(
            repeats=self.num_heads // self.num_kv_heads,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            rotary=rotary,
            position_scores=self.position if rotary is None else None,
            drops=self.training and self.dropout.p > 0,
            hook=self.weights_hook if has_hooks(self.weights_hook) else None,
            uses_flex=self.uses_flex_attention,
        )

    def plan(
        self,
        mask: MaskSpec | Tensor | None,
        x: Float[Tensor, "B T D"],
        keys: Tensor,
        *,
        causal: bool,
        returns_weights: bool,
    ) -> AttentionPlan:
        """The plan of a call without one.

        Args:
            keys: states (B, K, D) that are attended to, or their projected keys (B, G, K, E).

        Raises:
            UserError: a wrong width, type or shape. Calls with a plan, as those of `Stack`, are not
                checked.
        """
        for states in (x, keys):
            # Projected keys have four dimensions.
            if states.dim() < 4 and (states.dim() < 3 or states.size(-1) != self.d_model):
                raise UserError(
                    f"attention needs states of shape (batch, length, {self.d_model}), "
                    f"not {tuple(states.shape)}"
                )
        if isinstance(mask, MaskSpec):
            if causal:
                raise UserError("causal is a property of the MaskSpec; give it there")
        elif mask is None:
            queries, other = (
                Span(torch.arange(states.size(-2), device=x.device)[None], is_aligned=True)
                for states in (x, keys)
            )
            mask = MaskSpec(queries, queries if keys is x else other, causal=causal)
        else:
            shape = (x.size(0), x.size(1), keys.size(-2))
            mask = MaskSpec.from_bool(mask, shape, causal=causal, window=self.window)
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        return plan_attention(
            mask, self.options, x, needs_grad=needs_grad, returns_weights=returns_weights
        )

    def project_heads(
        self, heads: Float[Tensor, "B H T E"], has_key: Bool[Tensor, "#B #T"] | None
    ) -> Float[Tensor, "B T D"]:
        """The output projection of heads; zeros for queries without a visible key."""
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        # After the projection, whose bias would otherwise be added to the zeros.
        return out if has_key is None else out * has_key[..., None]


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

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Numbers of rows of `qkv` that belong to queries, keys and values."""
        key_rows = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key_rows, key_rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: MaskSpec | AttentionPlan | Tensor | None = None,
        cache: LayerCache | JoinedLayer | None = None,
        *,
        causal: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where no key is visible.

        Args:
            mask: keys that each query may attend to: a bool tensor (T, T) or (B, T, T), True = may
                attend; a `MaskSpec`, which also knows padding and packed rows; or the plan that
                `plan_attention` made of one. Default: all keys.
            cache: the keys and values of `x` are written to it, and attention runs over all its
                slots; needs the mask that `Cache.begin` returns.
            causal: hide the keys after each query. A `MaskSpec` holds this itself.
            return_weights: return (output, weights (B, H, T, K)): weights before dropout, zero
                where no key is visible; not with a plan.

        Raises:
            UserError: `x` has another width than D, or `mask` another type or shape.
        """
        plan = mask
        if not isinstance(plan, AttentionPlan):
            plan = self.plan(plan, x, x, causal=causal, returns_weights=return_weights)
        sizes = [self.num_heads, self.num_kv_heads]
        projected = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        both, value = projected.split([sum(sizes), self.num_kv_heads], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split(sizes, dim=2)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=2)
        if plan.rotation is not None:
            both = rotate(both, plan.rotation)
        query, key = both.transpose(1, 2).split(sizes, dim=1)
        value = value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value)
        heads, weights = plan.attend(query, key, value, self.dropout)
        out = self.project_heads(heads, plan.has_key)
        if not return_weights:
            return out
        assert weights is not None, "weights are returned for a mask, not for a plan"
        return out, zero_hidden_queries(weights, plan.has_key)


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
        mask: MaskSpec | AttentionPlan | Tensor | None = None,
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
        plan = mask
        if not isinstance(plan, AttentionPlan):
            plan = self.plan(plan, x, keys, causal=False, returns_weights=return_weights)
        if projected is None:
            projected = self.project_memory(keys)
        query = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key, value = projected.chunk(2, dim=1)
        heads, weights = plan.attend(query, key, value, self.dropout)
        out = self.project_heads(heads, plan.has_key)
        if not return_weights:
            return out
        assert weights is not None, "weights are returned for a mask, not for a plan"
        return out, zero_hidden_queries(weights, plan.has_key)

    def project_memory(self, memory: Float[Tensor, "B S D"]) -> Float[Tensor, "B both S E"]:
        """Keys and then values of a source; in decoding they are computed once."""
        return self.kv(memory).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
