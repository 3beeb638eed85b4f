"""Unpadding: hidden states of the real tokens of a batch, without those of its padding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

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
        device: of the states, without an index.

    Attributes:
        num_tokens: length N of the row.

    >>> unpadding = Unpadding(torch.Size([2, 18]), torch.arange(16) + 18)
    >>> unpadding.unpad(torch.arange(36.0).view(2, 18, 1))[0, :3, 0]
    tensor([18., 19., 20.])
    >>> unpadding.pad(torch.ones(1, 16, 1)).sum(1)[:, 0]
    tensor([ 0., 16.])
    """

    def __init__(
        self, shape: torch.Size, index: Int[Tensor, "M"] | None, device: torch.device | None = None
    ) -> None:
        self.shape = shape
        self._rows = None if index is None else _Rows.of_index(index, shape.numel())
        self.num_tokens = shape.numel() if self._rows is None else self._rows.real.size(0)
        self._all = torch.arange(shape.numel(), device=device)

    def unpad(self, x: Shaped[Tensor, "B T D"]) -> Shaped[Tensor, "1 N D"]:
        """The states, or other values, of the tokens of the row."""
        rows = x.flatten(0, 1)
        if self._rows is not None:
            rows = _Take.apply(rows, self._rows)  # type: ignore[no-untyped-call]
        return rows[None]

    def pad(self, x: Float[Tensor, "1 N D"]) -> Float[Tensor, "B T D"]:
        """The states of all tokens, and zeros for those that are not in the row."""
        rows = x[0]
        if self._rows is not None:
            rows = _Put.apply(rows, self._rows)  # type: ignore[no-untyped-call]
        return rows.unflatten(0, self.shape)

    def heads_of_rows(self, first: int, count: int, total: int) -> Int[Tensor, "B count T"]:
        """For each head and token, its index in N · `total` heads of the real tokens.

        At padding any valid index.

        Args:
            first, count: the heads, of `total` of a token.
        """
        rows = self._all if self._rows is None else self._rows.source
        heads = torch.arange(first, first + count, device=rows.device)[:, None]
        return rows.view(self.shape)[:, None] * total + heads

    def rows_of_heads(self, counts: Sequence[int], start: int = 0) -> Int[Tensor, "N H"]:
        """For each real token and head, its row in matrices (B, count, T), one after the other.

        Args:
            counts: the number of heads of each matrix; their sum is H.
            start: the row at which the first matrix begins.
        """
        tokens = self._all if self._rows is None else self._rows.real
        return self._rows_in_heads(tokens, counts, start)

    def padding_rows_of_heads(self, count: int) -> Int[Tensor, "P count"] | None:
        """`rows_of_heads` of the tokens that are padding; None: no token is."""
        return None if self._rows is None else self._rows_in_heads(self._rows.padding, [count], 0)

    def _rows_in_heads(
        self, tokens: Int[Tensor, "N"], counts: Sequence[int], start: int
    ) -> Int[Tensor, "N H"]:
        batch, width = self.shape
        steps, firsts = [], []  # of each head: from one row of the batch to the next, and the first
        for count in counts:
            steps += [(count - 1) * width] * count
            firsts += [start + head * width for head in range(count)]
            start += batch * count * width
        row = torch.div(tokens, width, rounding_mode="floor")
        # The row of token (b, t) of head h is first + b · count · T + t, and tokens are b · T + t.
        in_rows = row[:, None] * row.new_tensor(steps)
        return in_rows.add_(tokens[:, None]).add_(row.new_tensor(firsts))


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

    def take(self, x: Shaped[Tensor, "M D"]) -> Shaped[Tensor, "N D"]:
        """The rows at `real`."""
        return x.index_select(0, self.real)

    def put(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "M D"]:
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
