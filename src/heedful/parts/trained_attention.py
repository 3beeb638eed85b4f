"""Attention of training steps on a CPU: from projected real tokens to the outputs of their heads.

One operation with a backward pass of its own. In a small model's step, autograd's bookkeeping of
the operations of `attend`, and the copies that rearrange heads, take as long as its products.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.kernels import training as kernels
from heedful.parts.dropout import Dropout, apply_mask
from heedful.parts.positions import Rotation, rotate
from heedful.parts.unpadding import Unpadding

_KERNEL_WEIGHTS = 64 * 64  # of a head: with more, products in the type of the states are faster


class HeadRows(NamedTuple):
    """Indices that gather heads from projected real tokens, and back; rows have the width E.

    Queries, keys and values (B, H or G, T or K) are gathered from the N·P rows of a projection of N
    tokens to P heads, and the gradient of a projection from those of queries, keys and values,
    which are stored in this order as one matrix.

    Attributes:
        shape: B, G, queries per key head (H / G · T) and K.
        query, key, value: rows of the projections.
        heads: rows of the outputs (B, H, T) for the N·H heads of real queries.
        heads_grad: the inverse of `heads`; at padding any row.
        padding: rows of (B, H, T) at padding; None: there are none.
        query_grad: rows of the joint gradient for the projection of queries, in self-attention for
            that of queries, keys and values.
        memory_grad: the same for the projection of a memory; None: self-attention.
    """

    shape: tuple[int, int, int, int]
    query: Int[Tensor, "M"]
    key: Int[Tensor, "M2"]
    value: Int[Tensor, "M2"]
    heads: Int[Tensor, "M3"]
    heads_grad: Int[Tensor, "M"]
    padding: Int[Tensor, "M4"] | None
    query_grad: Int[Tensor, "M5"]
    memory_grad: Int[Tensor, "M6"] | None

    @classmethod
    def of_unpaddings(
        cls, queries: Unpadding, keys: Unpadding, num_heads: int, num_kv_heads: int
    ) -> "HeadRows":
        """The indices of self-attention (`queries` is `keys`) or of cross-attention."""
        is_self, kv = queries is keys, num_kv_heads
        (batch, num_queries), num_keys = queries.shape, keys.shape[1]
        # Heads of a projection, and the first of its heads of keys.
        query_total, key_total, first_key = num_heads, 2 * kv, 0
        query_grad, memory_grad = queries.rows_of_heads([num_heads]), None
        if is_self:
            query_total = key_total = num_heads + 2 * kv
            first_key = num_heads
            query_grad = queries.rows_of_heads([num_heads, kv, kv])
        else:
            memory_grad = keys.rows_of_heads([kv, kv], start=batch * num_heads * num_queries)
        padding = queries.padding_rows_of_heads(num_heads)
        return cls(
            shape=(batch, kv, num_heads // kv * num_queries, num_keys),
            query=queries.heads_of_rows(0, num_heads, query_total).flatten(),
            key=keys.heads_of_rows(first_key, kv, key_total).flatten(),
            value=keys.heads_of_rows(first_key + kv, kv, key_total).flatten(),
            heads=queries.rows_of_heads([num_heads]).flatten(),
            heads_grad=queries.heads_of_rows(0, num_heads, num_heads).flatten(),
            padding=None if padding is None else padding.flatten(),
            query_grad=query_grad.flatten(),
            memory_grad=None if memory_grad is None else memory_grad.flatten(),
        )


def trained_attention(
    projected: Float[Tensor, "1 N W"],
    memory: Float[Tensor, "1 S W2"] | None,
    rows: HeadRows,
    bias: Float[Tensor, "#B #G #T K"] | None,
    dropout: Dropout,
    scale: float,
    head_dim: int,
    rotation: Rotation | None = None,
) -> Float[Tensor, "1 N HE"]:
    """The heads of `attend` for real tokens, side by side; first derivatives only.

    Args:
        projected: queries, keys and values of self-attention, or queries of cross-attention.
        memory: keys and values of cross-attention.
        bias: as in `attend`.
        dropout: on the weights.
        scale: factor of the scores.
        head_dim: E.
        rotation: rotary positions of self-attention.
    """
    mask = None
    if dropout.training and dropout.p > 0:
        mask = dropout.draw_mask(torch.Size(rows.shape))
    queries = projected.reshape(-1, head_dim)
    source = None if memory is None else memory.reshape(-1, head_dim)
    heads: Tensor
    if rotation is None and _has_kernel(queries, source, rows, bias):
        heads = _KernelAttention.apply(queries, source, rows, bias, mask, scale)  # type: ignore[no-untyped-call]
    else:
        heads = _Attention.apply(queries, source, bias, rows, mask, scale, rotation)  # type: ignore[no-untyped-call]
    return heads.view(1, projected.size(1), -1)


def _has_kernel(
    queries: Tensor, source: Tensor | None, rows: HeadRows, bias: Tensor | None
) -> bool:
    """The kernel runs, and is the faster one: its products are in float32."""
    num_queries, num_keys = rows.shape[2:]
    if num_queries * num_keys > _KERNEL_WEIGHTS or not kernels.can_run(queries, source):
        return False
    if source is not None and source.dtype != queries.dtype:
        return False
    return bias is None or (bias.dtype == torch.float32 and not bias.requires_grad)


class _KernelAttention(torch.autograd.Function):
    """`_Attention` without rotation by a kernel, which computes the weights again in its backward
    pass; the arguments are those of `_kernel_arguments`."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        memory: Tensor | None,
        rows: HeadRows,
        bias: Tensor | None,
        mask: tuple[Tensor, float] | None,
        scale: float,
    ) -> Tensor:
        """The heads of real tokens, (N·H, E); arguments as in `trained_attention`."""
        keep, keep_scale = (None, 1.0) if mask is None else mask
        ctx.rows, ctx.scales = rows, (keep_scale, scale)
        ctx.save_for_backward(projected, memory, bias, keep)
        arguments = _kernel_arguments(projected, memory, rows, bias, keep, *ctx.scales)
        out = projected.new_empty(len(rows.heads), projected.size(1))
        kernels.attention_forward(arguments.set(out=out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `projected` and `memory`, each with an element for every row."""
        projected, memory, bias, keep = ctx.saved_tensors
        arguments = _kernel_arguments(projected, memory, ctx.rows, bias, keep, *ctx.scales)
        out_grad, projected_grad = grads[0].contiguous(), torch.empty_like(projected)
        memory_grad = None if memory is None else torch.empty_like(memory)
        kernels.attention_backward(
            arguments.set(
                out_grad=out_grad,
                projected_grad=projected_grad,
                key_value_grad=projected_grad if memory_grad is None else memory_grad,
            )
        )
        return projected_grad, memory_grad, *(None,) * 4


def _kernel_arguments(
    projected: Float[Tensor, "NP E"],
    memory: Float[Tensor, "SG E"] | None,
    rows: HeadRows,
    bias: Float[Tensor, "#B #G #T K"] | None,
    keep: Tensor | None,
    keep_scale: float,
    scale: float,
) -> kernels.AttentionArguments:
    """The inputs of the forward and the backward kernel."""
    batch, groups, num_queries, num_keys = rows.shape
    strides = (0,) * 4 if bias is None else bias.expand(rows.shape).stride()
    steps = zip(("batch", "head", "query", "key"), strides, strict=True)
    return kernels.AttentionArguments().set(
        type=kernels.element_type(projected),
        items=batch * groups,
        queries=num_queries,
        keys=num_keys,
        width=projected.size(1),
        threads=torch.get_num_threads(),
        scale=scale,
        keep_scale=keep_scale,
        projected=projected,
        source=projected if memory is None else memory,
        query=rows.query,
        key=rows.key,
        value=rows.value,
        heads=rows.heads,
        heads_grad=rows.heads_grad,
        query_grad=rows.query_grad,
        source_grad=rows.query_grad if rows.memory_grad is None else rows.memory_grad,
        bias=bias,
        **{f"bias_{name}": step for name, step in steps},
        heads_of_text=groups,
        keep=keep,
    )


class _Attention(torch.autograd.Function):
    """softmax(scale · QKᵀ + bias) M V, with the mask M of dropout, if there is one."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        memory: Tensor | None,
        bias: Tensor | None,
        rows: HeadRows,
        mask: tuple[Tensor, float] | None,
        scale: float,
        rotation: Rotation | None,
    ) -> Tensor:
        """The heads of real tokens, (N·H, E); arguments as in `trained_attention`."""
        num_queries, num_keys = rows.shape[2:]
        width, source = projected.size(1), projected if memory is None else memory
        query = projected.index_select(0, rows.query).mul_(scale)
        key = source.index_select(0, rows.key)
        if rotation is not None:
            query, key = (_rotate_rows(x, rotation, rows.shape[0]) for x in (query, key))
        query, key = query.view(-1, num_queries, width), key.view(-1, num_keys, width)
        value = source.index_select(0, rows.value).view(-1, num_keys, width)
        scores = torch.bmm(query, key.transpose(1, 2)).view(rows.shape)
        if bias is not None:
            scores = scores + bias
        elif scores.dtype.itemsize < 4:
            scores = scores.float()
        weights = scores.softmax(-1)
        dropped = weights.to(value.dtype)
        keep, ctx.keep_scale = (None, 1.0) if mask is None else mask
        if keep is not None:
            dropped = apply_mask(dropped, keep, ctx.keep_scale)
        ctx.rows, ctx.scale, ctx.rotation = rows, scale, rotation
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.save_for_backward(query, key, value, weights, dropped, keep)
        heads = torch.bmm(dropped.flatten(0, 1), value)
        return heads.view(-1, width).index_select(0, rows.heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `projected`, `memory` and `bias`; `heads_grad` are those of the output."""
        query, key, value, weights, dropped, keep = ctx.saved_tensors
        rows: HeadRows = ctx.rows
        heads_grad = grads[0].index_select(0, rows.heads_grad)
        if rows.padding is not None:
            heads_grad.index_fill_(0, rows.padding, 0)
        heads_grad = heads_grad.view_as(query)
        weights_grad = torch.bmm(heads_grad, value.transpose(1, 2)).view(weights.shape)
        if keep is not None:
            weights_grad = apply_mask(weights_grad, keep, ctx.keep_scale)
        weights_grad = weights_grad.to(weights.dtype)
        scores_grad = torch._softmax_backward_data(weights_grad, weights, -1, weights.dtype)
        bias_grad = scores_grad.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[2] else None
        scores_grad = scores_grad.to(query.dtype).flatten(0, 1)
        joint = query.new_empty(query.numel() + 2 * key.numel())
        parts = joint.split([query.numel(), key.numel(), key.numel()])
        torch.bmm(scores_grad, key, out=parts[0].view_as(query)).mul_(ctx.scale)
        torch.bmm(scores_grad.transpose(1, 2), query, out=parts[1].view_as(key))
        torch.bmm(dropped.flatten(0, 1).transpose(1, 2), heads_grad, out=parts[2].view_as(key))
        if ctx.rotation is not None:  # the gradient is turned back
            back = ctx.rotation._replace(sin=-ctx.rotation.sin)
            for part in parts[:2]:
                rotated = part.view(-1, query.size(-1))
                rotated.copy_(_rotate_rows(rotated, back, rows.shape[0]))
        joint = joint.view(-1, query.size(-1))
        of_memory = rows.memory_grad
        memory_grad = None if of_memory is None else joint.index_select(0, of_memory)
        return joint.index_select(0, rows.query_grad), memory_grad, bias_grad, *(None,) * 4


def _rotate_rows(x: Float[Tensor, "M E"], rotation: Rotation, batch: int) -> Float[Tensor, "M E"]:
    """`rotate` for heads (B, H, T, E) as rows."""
    heads = x.view(batch, -1, rotation.cos.size(-2), x.size(-1))
    return rotate(heads, rotation).view_as(x)
