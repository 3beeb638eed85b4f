"""The k best entries of long rows, exactly, with ties in a fixed order, without a host sync."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def top_k(
    rows: Float[Tensor, "N V"], k: int, *, exact: bool = True
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"], Bool[Tensor, ""]]:
    """Values and indices of the `min(k, V)` largest entries of each row, by rising index.

    Of equal entries those with the lower indices are taken; `torch.topk` leaves that open. With
    `exact` False this is left to the caller: the third result says whether any row had such a tie
    at its edge. Only entries of minus infinity are taken as they come. NaN counts as largest.
    """
    if exact and k < rows.shape[1]:
        rows = rows.masked_fill(~in_top_k(rows, k) & ~rows.isnan(), -torch.inf)
    values, indices = rows.topk(min(k + 1, rows.shape[1]), dim=1)
    tied = torch.zeros((), dtype=torch.bool, device=rows.device)
    if values.shape[1] > k:
        edge = values[:, k - 1]
        if not exact:
            tied = ((edge == values[:, k]) & (edge > -torch.inf)).any()
        indices = indices[:, :k]
    indices = indices.sort(dim=1).values
    return rows.gather(1, indices), indices, tied


def in_top_k(rows: Float[Tensor, "N V"], k: int) -> Bool[Tensor, "N V"]:
    """Which entries are among the `k` largest of their row: exactly k, the first of equals."""
    edge = rows.topk(k, dim=1).values[:, -1:]
    above, level = rows > edge, rows == edge
    room = k - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= room))
