"""Unpadding: hidden states of the real tokens of a batch, without those of its padding."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from heedful.kernels.attention import Texts

# Products with bf16 of other numbers of rows take up to 4% more time on a CPU (docs/log.md).
_ROW_MULTIPLE = 16


class Unpadding:
    """The real tokens of a padded batch (B, T) as one row, and some padding after them.

    With the padding the row has a multiple of 16 tokens, at most B·T.

    Modules that compute each token by itself (linear layers, norms, feed-forward) then compute
    nothing for padding; only attention needs the padded form (Zeng et al. 2022, "Boosting
    Distributed Training Performance of the Unpadded BERT Model", sec. 3).

    Args:
        shape: (B, T).
        index: the index of each real token in the flattened B·T tokens, in any order, at least
            one; None: no padding.

    Attributes:
        num_tokens: length N of the row.

    >>> unpadding = Unpadding(torch.Size([2, 18]), torch.arange(16) + 18)
    >>> unpadding.unpad(torch.arange(36.0).view(2, 18, 1))[0, :3, 0]
    tensor([18., 19., 20.])
    >>> unpadding.pad(torch.ones(1, 16, 1)).sum(1)[:, 0]
    tensor([ 0., 16.])
    """

    def __init__(self, shape: torch.Size, index: Int[Tensor, "M"] | None) -> None:
        self.shape, self._index = shape, index
        self._rows = None if index is None else _Rows.of_index(index, shape.numel())
        self.num_tokens = shape.numel() if self._rows is None else self._rows.real.size(0)

    def unpad(self, x: Shaped[Tensor, "B T *n"]) -> Shaped[Tensor, "1 N *n"]:
        """The states, or other values, of the tokens of the row."""
        rows = x.flatten(0, 1)
        if self._rows is not None:
            rows = _Take.apply(rows, self._rows)  # type: ignore[no-untyped-call]
        return rows[None]

    def pad(self, x: Float[Tensor, "1 N *n"]) -> Float[Tensor, "B T *n"]:
        """The states of all tokens, and zeros for those that are not in the row."""
        rows = x[0]
        if self._rows is not None:
            rows = _Put.apply(rows, self._rows)  # type: ignore[no-untyped-call]
        return rows.unflatten(0, self.shape)

    @cached_property
    def texts(self) -> Texts | None:
        """The rows of the batch as texts of a kernel; None: their tokens are not in order.

        On a CPU only, since it waits for the device.
        """
        batch, width = self.shape
        if self._index is None:
            starts = torch.arange(batch + 1) * width
            return Texts(starts, starts.new_zeros(batch), width, batch * width)
        text = torch.div(self._index, width, rounding_mode="floor")
        starts = torch.searchsorted(text, torch.arange(batch + 1))
        # Of a text without a token any column.
        first = self._index[starts[:-1].clamp(max=len(self._index) - 1)]
        place = torch.arange(len(self._index)) - starts[text]
        if not torch.equal(first[text] + place, self._index):
            return None
        return Texts(starts, first % width, width, len(self._index))


class _Rows(NamedTuple):
    """Indices of rows in a matrix of M rows, of which N are taken.

    Attributes:
        real: (N,), the real rows, and others after them.
        source: (M,), the index in `real` of the row to copy; at padding any index.
        padding: (M - N,), the other rows.
    """

    real: Int[Tensor, "N"]
    source: Int[Tensor, "M"]
    padding: Int[Tensor, "P"]

    @classmethod
    def of_index(cls, real: Int[Tensor, "N"], num_rows: int) -> "_Rows":
        """All indices from those of real rows, without waiting for the device."""
        is_real = real.new_zeros(num_rows).index_fill_(0, real, 1)
        rows = torch.arange(num_rows, device=real.device)
        num_padding = num_rows - real.size(0)
        # Real rows are written to an extra slot, which is cut off.
        slots = torch.where(is_real > 0, num_padding, rows - is_real.cumsum(0))
        padding = real.new_empty(num_padding + 1).scatter_(0, slots, rows)[:-1]
        num_kept = min(-real.size(0) % _ROW_MULTIPLE if real.size(0) else 0, num_padding)
        real = torch.cat([real, padding[:num_kept]])
        source = real.new_zeros(num_rows).index_copy_(0, real, rows[: real.size(0)])
        return cls(real, source, padding[num_kept:])

    def take(self, x: Shaped[Tensor, "M *n"]) -> Shaped[Tensor, "N *n"]:
        """The rows at `real`."""
        return x.index_select(0, self.real)

    def put(self, x: Float[Tensor, "N *n"]) -> Float[Tensor, "M *n"]:
        """A matrix with the rows of `x` at `real`, and zeros elsewhere.

        On a CPU this takes a quarter of the time of `index_copy_` into zeros.
        """
        return x.index_select(0, self.source).index_fill_(0, self.padding, 0)


class _Take(torch.autograd.Function):
    """`_Rows.take`; its gradient is a copy, while that of `index_select` is a sum of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows) -> Tensor:
        ctx.rows = rows
        return rows.take(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.put(grads[0]), None


class _Put(torch.autograd.Function):
    """`_Rows.put`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows) -> Tensor:
        ctx.rows = rows
        return rows.put(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.take(grads[0]), None
