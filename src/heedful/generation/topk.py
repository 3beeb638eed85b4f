"""The k best entries of long rows, exactly and with ties in a fixed order."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def top_k(rows: Float[Tensor, "N V"], k: int) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """Values and indices of the `min(k, V)` largest entries of each row, largest first.

    Of equal entries the one with the lower index comes first and is the one that is taken;
    `torch.topk` leaves both open. Only entries of minus infinity come in any order. NaN counts
    as largest.
    """
    if k == 1:
        best = rows.max(dim=1, keepdim=True)  # documented to return the first of equal maxima
        return best.values, best.indices
    values, indices = rows.topk(min(k + 1, rows.shape[1]), dim=1)
    if values.shape[1] > k:
        edge = values[:, k - 1]
        tied = (edge == values[:, k]) & (edge > -torch.inf) & ~values[:, 0].isnan()
        values, indices = values[:, :k], indices[:, :k]
        if tied.any():
            indices[tied] = _first_of_equals(rows[tied], edge[tied, None], k)
    indices = indices.sort(dim=1).values
    values, places = rows.gather(1, indices).sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, places)


def _first_of_equals(
    rows: Float[Tensor, "M V"], edge: Float[Tensor, "M 1"], k: int
) -> Int[Tensor, "M k"]:
    """Indices of the k largest entries where the k-th, `edge`, has equals beyond the k."""
    above, level = rows > edge, rows == edge
    room = k - above.sum(dim=1, keepdim=True)
    return (above | (level & (level.cumsum(dim=1) <= room))).nonzero()[:, 1].view(-1, k)
