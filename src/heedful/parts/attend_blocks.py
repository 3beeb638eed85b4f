"""Attention in blocks along the diagonal, where a window or short segments hide most keys.

Each block of queries is computed with the keys that it can reach, so that the work is linear in the
length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.parts.attend_options import Attend
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec

# Least number of queries in a block: with fewer, the loop dominates.
_LOCAL_QUERIES = 128


def diagonal_blocks(mask: MaskSpec, window: int | None) -> list[tuple[range, range] | None]:
    """Columns of the queries of each block and of the keys that they reach; None: all columns."""
    reach = window
    if (longest := mask.queries.longest_text) is not None:
        reach = longest if reach is None else min(reach, longest)
    total = mask.queries.positions.size(1)
    # An exported graph has a variable length, but a fixed number of blocks.
    if reach is None or not mask.is_self_attention or torch.compiler.is_exporting():
        return [None]
    size = max(reach, _LOCAL_QUERIES)
    if total <= size:
        return [None]
    parts: list[tuple[range, range] | None] = []
    for start in range(0, total, size):
        queries = range(start, min(start + size, total))
        stop = queries.stop if mask.causal else min(total, queries.stop + reach - 1)
        parts.append((queries, range(max(0, start - reach + 1), stop)))
    return parts


@dataclass(frozen=True)
class Blocks:
    """Several attentions, one after the other.

    Args:
        size: queries of each block but the last one.
        keys: columns of the keys of each block.
        attends: the attention of each block, with the mask of its columns.
    """

    size: int
    keys: tuple[range, ...]
    attends: tuple[Attend, ...]

    def __call__(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B G T E"],
        value: Float[Tensor, "B G T E"],
        dropout: Dropout,
    ) -> tuple[Float[Tensor, "B H T E"], None]:
        keys, values = key.split(self.size, dim=2), value.split(self.size, dim=2)
        heads = []
        for part, columns, attend in zip(
            query.split(self.size, dim=2), self.keys, self.attends, strict=True
        ):
            reached = slice_pieces(keys, columns), slice_pieces(values, columns)
            heads.append(attend(part, *reached, dropout=dropout)[0])
        return torch.cat(heads, dim=2), None


def join_blocks(parts: Sequence[tuple[range, range] | None], attends: Sequence[Attend]) -> Attend:
    """The attention whose `diagonal_blocks` are computed by `attends`."""
    blocks = [part for part in parts if part is not None]
    if not blocks:
        return attends[0]
    return Blocks(len(blocks[0][0]), tuple(keys for _, keys in blocks), tuple(attends))


def slice_pieces(pieces: Sequence[Tensor], columns: range) -> Tensor:
    """Columns of a (B, G, K, E) tensor that was split along K into pieces of one size.

    Only the pieces that hold them are sliced: the gradient of a slice is as large as the tensor
    that it was cut from, so slices of the whole would make the backward pass quadratic.
    """
    size = pieces[0].size(2)
    slices = [
        pieces[index][:, :, max(columns.start - index * size, 0) : columns.stop - index * size]
        for index in range(columns.start // size, -(-columns.stop // size))
    ]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=2)
