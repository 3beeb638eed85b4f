"""The k largest entries of long rows, with a fixed order of ties and without a host sync."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 64  # entries, of which the maximum is computed first


def top_k(
    rows: Float[Tensor, "N V"], k: int, *, exact: bool = True
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"], Bool[Tensor, ""]]:
    """Values and indices of the `min(k, V)` largest entries of each row, in order of index.

    Of equal entries those with the lower indices are returned, unlike by `torch.topk`; entries of
    -inf may be any. NaN counts as largest.

    Args:
        exact: False: of equal entries any may be returned. The third result is then True if a row
            has a tie between an entry that is returned and one that is not.
    """
    if exact and k < rows.shape[1]:
        rows = rows.masked_fill(~in_top_k(rows, k) & ~rows.isnan(), -torch.inf)
    values, indices = _largest(rows, min(k + 1, rows.shape[1]))
    if exact or values.shape[1] <= k:
        tied = torch.zeros((), dtype=torch.bool, device=rows.device)
    else:
        tied = (values[:, k - 1] - values[:, k] == 0).any()  # -inf - -inf is NaN
    indices = indices[:, :k].sort(dim=1).values
    return rows.gather(1, indices), indices, tied


def _largest(rows: Float[Tensor, "N V"], k: int) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """`rows.topk(k)`, computed on a CPU from the k blocks with the largest maxima.

    A maximum reads each entry once, while `torch.topk` sorts.
    """
    num_blocks = rows.shape[1] // _BLOCK
    if num_blocks < 2 * k or len(rows) < 16 or rows.device.type != "cpu":
        return rows.topk(k, dim=1)
    whole = num_blocks * _BLOCK
    blocks = rows[:, :whole].unflatten(1, (num_blocks, _BLOCK))
    best = blocks.amax(dim=2).topk(k, dim=1).indices
    columns = (best[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(whole, rows.shape[1]).expand(len(rows), -1)
    columns = torch.cat([columns, rest], dim=1)
    values, indices = rows.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, indices)


def first_largest(
    rows: Float[Tensor, "N V"],
) -> tuple[Float[Tensor, "N 1"], Int[Tensor, "N 1"]]:
    """The largest entry of each row and its first index; NaN counts as largest."""
    num_blocks = rows.shape[1] // _BLOCK
    if num_blocks < 4 or rows.device.type != "cpu":
        values, indices = rows.max(dim=1, keepdim=True)  # documented to return the first
        return values, indices
    whole = num_blocks * _BLOCK
    blocks = rows[:, :whole].unflatten(1, (num_blocks, _BLOCK))
    block = blocks.amax(dim=2).argmax(dim=1, keepdim=True)
    values, indices = blocks[torch.arange(len(rows)), block[:, 0]].max(dim=1, keepdim=True)
    indices += block * _BLOCK
    if whole == rows.shape[1]:
        return values, indices
    rest = rows[:, whole:].max(dim=1, keepdim=True)
    best = torch.cat([values, rest.values], dim=1).max(dim=1, keepdim=True)
    return best.values, torch.cat([indices, rest.indices + whole], dim=1).gather(1, best.indices)


def in_top_k(rows: Float[Tensor, "N V"], k: int) -> Bool[Tensor, "N V"]:
    """True for the `k` largest entries of each row; of equal entries, for the first ones."""
    edge = _largest(rows, k)[0][:, -1:]
    is_above, is_equal = rows > edge, rows == edge
    remaining = k - is_above.sum(dim=1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(dim=1) <= remaining))
