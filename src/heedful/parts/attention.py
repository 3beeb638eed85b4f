"""Self-attention with several heads, the plan of a pass, and the formula (`attend`).

A plan is made before the blocks of a stack run: equal layers share its mask and rotation, and no
layer computes them again where its activations are checkpointed. The computations in `attend_*.py`
are equal to the formula but for the order of sums.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.attend_blocks import diagonal_blocks, join_blocks
from heedful.parts.attend_fused import choose_fused
from heedful.parts.attend_kernel import Kernel, Unpadded, choose_kernel
from heedful.parts.attend_options import (
    Attend,
    AttentionOptions,
    PreferredKernel,
    fold_queries,
    unfold_heads,
)
from heedful.parts.cache import LayerCache
from heedful.parts.helpers import check_positive, has_hooks
from heedful.parts.joined_cache import Joined, JoinedLayer, JoinedMask
from heedful.parts.positions import RotaryPositions, Rotation, rotate
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec, Span
from heedful.parts.unpadding import Unpadding

# Attention weights of a head from which on the fused kernel trains faster on a CPU (docs/log.md).
_FUSED_WEIGHTS = 256 * 256


class AttentionPlan(NamedTuple):
    """The computation of an attention module in one pass.

    Attributes:
        attend: heads from queries, keys and values.
        rotation: of queries and keys (#B, T, H, E), before `attend`; None: no rotary positions.
        has_key: False for queries without a visible key; None: every query has one.
    """

    attend: Attend
    rotation: Rotation | None
    has_key: Bool[Tensor, "#B #T"] | None


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
        preferred_kernel: for training: `flex` where it is possible, if it is compiled
            (`training/block_compiler.py`); `fused` also on a CPU, if a step is traced as on a GPU
            (`cost/trace.py`).

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
        self.preferred_kernel: PreferredKernel | None = None

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
        return plan_attention(mask, self, x, needs_grad=needs_grad, returns_weights=returns_weights)

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
        heads, weights = plan.attend(query, key, value, dropout=self.dropout)
        out = self.project_heads(heads, plan.has_key)
        if not return_weights:
            return out
        assert weights is not None, "weights are returned for a mask, not for a plan"
        return out, zero_hidden_queries(weights, plan.has_key)


def plan_attention(
    mask: MaskSpec,
    attention: MultiHead,
    x: Float[Tensor, "N T D"],
    *,
    needs_grad: bool,
    returns_weights: bool = False,
    unpaddings: tuple[Unpadding, Unpadding] | None = None,
    made: dict[AttentionOptions, AttentionPlan] | None = None,
) -> AttentionPlan:
    """The plan of one pass.

    Args:
        mask: keys that each query may attend to.
        x: any padded states of the pass, for their type and device.
        needs_grad: the pass needs gradients.
        returns_weights: the attention weights will be returned.
        unpaddings: the states of queries and of keys are those of their real tokens, as one row
            (`Stack.skips_padding`); None: the states are padded.
        made: plans of the layers before under the same mask: one of equal settings is returned, a
            new one is added.
    """
    rotary = attention.position if isinstance(attention.position, RotaryPositions) else None
    hook = attention.weights_hook
    options = AttentionOptions(
        repeats=attention.num_heads // attention.num_kv_heads,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
        rotary=rotary,
        position_scores=attention.position if rotary is None else None,
        drops=attention.training and attention.dropout.p > 0,
        hook=hook if has_hooks(hook) else None,
        preferred_kernel=attention.preferred_kernel,
    )
    if made is not None and options in made:
        return made[options]
    rest: Any = {"needs_grad": needs_grad, "returns_weights": returns_weights}
    computation: Attend
    if isinstance(mask, JoinedMask):
        computation = Joined([_choose(m, options, x, **rest) for m in mask.parts], mask.sizes)
    else:
        computation = _choose(mask, options, x, **rest, unpaddings=unpaddings)
    positions, has_key = mask.queries.positions, mask.has_key
    if unpaddings is not None:
        queries, keys = unpaddings
        if not isinstance(computation, Kernel):
            computation = Unpadded(computation, queries, keys)
        positions = queries.unpad(positions.expand(queries.shape))
        if queries is keys:
            has_key = None  # the query itself is visible
        elif has_key is not None:
            has_key = queries.unpad(has_key.expand(queries.shape))
    rotation = None
    if rotary is not None:
        cos, sin, layout = rotary(positions)
        rotation = Rotation(cos.transpose(1, 2), sin.transpose(1, 2), layout)
    plan = AttentionPlan(computation, rotation, has_key)
    if made is not None:
        made[options] = plan
    return plan


def _choose(
    mask: MaskSpec,
    options: AttentionOptions,
    x: Tensor,
    *,
    needs_grad: bool,
    returns_weights: bool,
    unpaddings: tuple[Unpadding, Unpadding] | None = None,
) -> Attend:
    """The formula where it is needed or faster, otherwise a fused kernel.

    It is needed where the weights are read, and for capped scores. In training on a CPU the fused
    kernel has no backward pass with dropout or for a trained bias, and a slow one for short
    sequences in 16 bits.
    """
    needs_formula = options.softcap is not None
    parts: list[tuple[range, range] | None] = [None]  # columns of queries and of keys; None: all
    if returns_weights or options.hook is not None:
        needs_formula = True
    elif options.window is not None or mask.queries.longest_text is not None:
        parts = diagonal_blocks(mask, options.window)
    trains_on_cpu = needs_grad and x.device.type == "cpu" and options.preferred_kernel != "fused"
    if trains_on_cpu and not needs_formula:
        sides, block = (mask.queries, mask.keys), parts[0]
        rows, reach = map(len, block) if block else (s.positions.size(1) for s in sides)
        is_short = rows * reach < _FUSED_WEIGHTS
        needs_formula = options.drops or options.position_scores is not None or is_short
    if not needs_formula:
        return choose_fused(mask, options, parts, x, needs_grad=needs_grad)
    if unpaddings is not None and parts[0] is None:
        kernel = choose_kernel(mask, options, unpaddings, x)
        if kernel is not None:
            return kernel
    hook = None if options.hook is None else partial(_call_hook, options.hook, mask.has_key)
    formula = partial(attend, scale=options.scale, softcap=options.softcap, hook=hook)
    scheme, window, repeats = options.position_scores, options.window, options.repeats
    dtype = torch.promote_types(x.dtype, torch.float32)
    computations = []
    for part in parts:
        bias = mask.bias(dtype, scheme=scheme, window=window, repeats=repeats, part=part)
        computations.append(partial(formula, bias=bias))
    return computations[0] if parts[0] is None else join_blocks(parts, computations)


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B G K E"],
    value: Float[Tensor, "B G K E"],
    bias: Float[Tensor, "#B #G #rT K"] | None = None,
    dropout: nn.Module | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    *,
    hook: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(scale · QKᵀ + bias) V, and the weights (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 at least; the weights are returned before dropout. A query without a
    visible key gets equal weights, so that nothing is NaN; `Attention` then zeroes its output.

    Args:
        key, value: of G heads, each shared by H / G adjacent query heads.
        bias: `MaskSpec.bias`, in fp32 at least, for the queries of a key head side by side.
        scale: default 1 / √E.
        softcap: scores s are replaced by softcap · tanh(s / softcap) before the bias is added
            (Gemma 2); default: no cap.
        hook: function of the weights (B, H, T, K), applied before dropout; default: none.

    >>> query, key, value = (torch.ones(1, 2, n, 8) for n in (3, 5, 5))
    >>> output, weights = attend(query, key, value)
    >>> output.shape, weights.shape
    (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 3, 5]))
    """
    repeats = query.size(1) // key.size(1)
    if repeats > 1:
        query = fold_queries(query, repeats)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    elif scores.dtype.itemsize < 4:
        scores = scores.float()
    weights = scores.softmax(-1).to(value.dtype)
    if hook is not None:
        weights = fold_queries(hook(unfold_heads(weights, repeats)), repeats)
    heads = (weights if dropout is None else dropout(weights)) @ value
    if repeats == 1:
        return heads, weights
    return unfold_heads(heads, repeats), unfold_heads(weights, repeats)


def zero_hidden_queries(
    weights: Float[Tensor, "B H T K"], has_key: Bool[Tensor, "#B #T"] | None
) -> Float[Tensor, "B H T K"]:
    """The weights, with zeros for queries without a visible key."""
    return weights if has_key is None else weights * has_key[:, None, :, None]


def _call_hook(hook: nn.Module, has_key: Tensor | None, weights: Tensor) -> Tensor:
    changed: Tensor = hook(zero_hidden_queries(weights, has_key))
    return changed
