"""Attention of short texts in training on a CPU, by a kernel with a backward pass of its own.

One head of one text is computed at a time, in the cache of the core, and the backward pass computes
its weights again. In a small model's step, autograd's bookkeeping of the single operations, and the
copies that rearrange heads, would take as long as the products.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.kernels import library


class Texts(NamedTuple):
    """The texts of a padded batch (B, width), whose tokens are rows of one matrix.

    Attributes:
        starts: (B + 1,), the row of the first token of each text, and of the first one after all.
        columns: (B,), the column of the first token of each text in the padded batch.
        width: of the padded batch.
        num_tokens: of all texts, which `starts` ends with.
    """

    starts: Int[Tensor, "starts"]
    columns: Int[Tensor, "B"]
    width: int
    num_tokens: int


class Options(NamedTuple):
    """Arguments of the kernel that its forward and its backward pass share.

    Attributes:
        queries, keys: in self-attention the same.
        bias: of the scores of the padded texts, in float32; queries that share a head of keys are
            side by side. None: every query may attend to all keys of its text.
        scale: factor of the scores.
    """

    queries: Texts
    keys: Texts
    bias: Float[Tensor, "#B #G rT K"] | None
    scale: float


def attention(
    query: Float[Tensor, "N H E"],
    key: Float[Tensor, "S G E"],
    value: Float[Tensor, "S G E"],
    options: Options,
    keep: Int16[Tensor, "B G rT K"] | None,
    keep_scale: float,
) -> Float[Tensor, "N H E"]:
    """softmax(scale · QKᵀ + bias) M V within each text; zeros at rows of no text.

    First derivatives only.

    Args:
        query, key, value: of one element type; each may be a part of a larger matrix.
        keep, keep_scale: the mask M of dropout for the padded texts; None: no dropout.
    """
    # The elements of a token's heads must be one after the other.
    parts = (x if x.stride()[1:] == (x.size(2), 1) else x.contiguous() for x in (query, key, value))
    heads: Tensor = _Attention.apply(*parts, options, keep, keep_scale)  # type: ignore[no-untyped-call]
    return heads


class _Attention(torch.autograd.Function):
    """`attention` with its gradient by the kernel; the weights are computed again for it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Options,
        keep: Tensor | None,
        keep_scale: float,
    ) -> Tensor:
        ctx.options, ctx.keep_scale = options, keep_scale
        ctx.save_for_backward(query, key, value, keep)
        arguments = _arguments(query, key, value, options, keep, keep_scale)
        out = _zeros_after(options.queries, query.new_empty(query.shape))
        library.opened().heedful_attention_forward(ctypes.byref(arguments.set(out=out)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep = ctx.saved_tensors
        options: Options = ctx.options
        arguments = _arguments(query, key, value, options, keep, ctx.keep_scale)
        sides = (options.queries, query), (options.keys, key), (options.keys, value)
        out_grad = grads[0].contiguous()
        query_grad, key_grad, value_grad = (
            _zeros_after(side, x.new_empty(x.shape)) for side, x in sides
        )
        arguments.set(
            out_grad=out_grad, query_grad=query_grad, key_grad=key_grad, value_grad=value_grad
        )
        library.opened().heedful_attention_backward(ctypes.byref(arguments))
        return query_grad, key_grad, value_grad, None, None, None


def _zeros_after(texts: Texts, x: Float[Tensor, "N H E"]) -> Float[Tensor, "N H E"]:
    """`x`, with zeros at the rows after all texts."""
    if texts.num_tokens < x.size(0):
        x[texts.num_tokens :].zero_()
    return x


class _Arguments(ctypes.Structure):
    """The arguments of both kernels, as `Attention` of attention.cpp."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("type", "texts", "groups", "repeats", "width", "threads")),
        *((name, ctypes.c_int64) for name in ("queries", "keys")),
        *((name, ctypes.c_double) for name in ("scale", "keep_scale")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_step", ctypes.c_int64) for name in ("query", "key", "value")),
        *((f"{name}_starts", ctypes.c_void_p) for name in ("query", "key")),
        *((f"{name}_columns", ctypes.c_void_p) for name in ("query", "key")),
        ("bias", ctypes.c_void_p),
        *((f"bias_{dim}", ctypes.c_int64) for dim in ("batch", "head", "query", "key")),
        *((name, ctypes.c_void_p) for name in ("keep", "out", "out_grad")),
        *((f"{name}_grad", ctypes.c_void_p) for name in ("query", "key", "value")),
    ]

    def set(self, **values: Any) -> "_Arguments":
        """Set arguments; tensors by their addresses."""
        for name, value in values.items():
            setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)
        return self


def _arguments(
    query: Float[Tensor, "N H E"],
    key: Float[Tensor, "S G E"],
    value: Float[Tensor, "S G E"],
    options: Options,
    keep: Tensor | None,
    keep_scale: float,
) -> _Arguments:
    """The inputs of both kernels."""
    queries, keys, bias, scale = options
    texts, groups = len(queries.columns), key.size(1)
    repeats = query.size(1) // groups
    shape = texts, groups, repeats * queries.width, keys.width
    strides = (0,) * 4 if bias is None else bias.expand(shape).stride()
    steps = zip(("batch", "head", "query", "key"), strides, strict=True)
    return _Arguments().set(
        type=library.element_type(query),
        texts=texts,
        groups=groups,
        repeats=repeats,
        width=query.size(2),
        threads=torch.get_num_threads(),
        queries=queries.width,
        keys=keys.width,
        scale=scale,
        keep_scale=keep_scale,
        query=query,
        key=key,
        value=value,
        query_step=query.stride(0),
        key_step=key.stride(0),
        value_step=value.stride(0),
        query_starts=queries.starts,
        key_starts=keys.starts,
        query_columns=queries.columns,
        key_columns=keys.columns,
        bias=bias,
        **{f"bias_{name}": step for name, step in steps},
        keep=keep,
    )
