"""Batches of few fixed shapes, so that a compiled training step is compiled once for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer
from torch import Tensor
from torch.nn import functional as F

from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.parts.tokens import Tokens

MAX_SHAPES = 8
# Number of distinct lengths that are considered when widths are selected.
_MAX_LENGTHS = 256
_UNLIMITED = 2**62


class BatchShape(NamedTuple):
    """Rows B and width T of padded `Batch.tokens`; width S of `Batch.source`, None without one."""

    rows: int
    width: int
    source_width: int | None = None


def batch_shapes(
    *lengths: Integer[np.ndarray, " N"],
    counts: Integer[np.ndarray, " N"] | None = None,
    max_tokens: int | None,
    max_sentences: int | None,
) -> list[BatchShape]:
    """At most `MAX_SHAPES` shapes for the batches of some texts or pairs, narrow ones first.

    Each is as wide as the longest texts that are in its bucket or a narrower one. The buckets are
    those with the least padding of the longer side.

    Args:
        lengths: tokens of each text; of pairs those of the sources and those of the targets.
        counts: the number of texts or pairs of each of these lengths; None: one each.
        max_tokens, max_sentences: of a batch, as in `plan_batches`.

    Raises:
        UserError: a padded row has more than `max_tokens` tokens.
    """
    longer = np.max(lengths, axis=0)
    counts = np.ones(len(longer), np.int64) if counts is None else counts
    shapes: list[BatchShape] = []
    for width in _least_padded_widths(longer, counts, MAX_SHAPES):
        widths = [int(side[longer <= width].max()) for side in lengths]
        rows = min(
            int(counts.sum()),
            max_sentences or _UNLIMITED,
            (max_tokens or _UNLIMITED) // max(1, sum(widths)),
        )
        if not rows:
            raise UserError(
                f"training.compile pads rows to {sum(widths)} tokens, more than "
                f"training.batch_tokens {max_tokens}; raise it or lower data.max_length"
            )
        shapes.append(BatchShape(rows, widths[-1], widths[0] if len(widths) > 1 else None))
    return shapes


def padded_lengths(
    shapes: Sequence[BatchShape], *lengths: Integer[np.ndarray, " N"]
) -> list[Int64[np.ndarray, " N"]]:
    """The widths of the shape that each text or pair is padded to: what a batch is planned by."""
    sides = [[shape.width for shape in shapes]]
    if len(lengths) > 1:
        sides.insert(0, [shape.source_width or 0 for shape in shapes])
    widths = np.array(sides, dtype=np.int64)
    bucket = np.max([np.searchsorted(*side) for side in zip(widths, lengths, strict=True)], axis=0)
    return list(widths[:, bucket])


def pad_batch(batch: Batch, shapes: Sequence[BatchShape]) -> Batch:
    """The batch in the first of the shapes that holds it; its targets stay as they are.

    Added rows are padding alone. Padding is always marked, and the length of the longest text of
    packed rows is left out, so that equal shapes are equal in all that a graph depends on.

    Raises:
        UserError: none of the shapes holds it, because it was not planned by the same lengths.
    """
    rows, width = batch.tokens.ids.shape
    source_width = 0 if batch.source is None else batch.source.ids.size(1)
    fitting = (
        shape
        for shape in shapes
        if rows <= shape.rows and width <= shape.width and source_width <= (shape.source_width or 0)
    )
    shape = next(fitting, None)
    if shape is None:
        raise UserError(
            f"training.compile: a batch of {rows} rows of {width} tokens fits none of the task's "
            "shapes; plan batches by its row_lengths, or leave training.compile out"
        )
    source = batch.source
    if source is not None:
        assert shape.source_width is not None
        source = _pad_tokens(source, shape.rows, shape.source_width)
    row, column = batch.target_positions // max(1, width), batch.target_positions % max(1, width)
    return replace(
        batch,
        tokens=_pad_tokens(batch.tokens, shape.rows, shape.width),
        target_positions=row * shape.width + column,
        source=source,
        types=None if batch.types is None else _pad(batch.types, shape.rows, shape.width),
    )


def _pad_tokens(tokens: Tokens, rows: int, width: int) -> Tokens:
    segments = tokens.segments
    return Tokens.from_ids(
        _pad(tokens.ids, rows, width),
        F.pad(tokens.lengths, (0, rows - len(tokens.ids))),
        segments=None if segments is None else _pad(segments, rows, width),
    )


def _pad(x: Tensor, rows: int, width: int) -> Tensor:
    return F.pad(x, (0, width - x.size(1), 0, rows - x.size(0)))


def _least_padded_widths(
    lengths: Integer[np.ndarray, " N"], texts: Integer[np.ndarray, " N"], most: int
) -> list[int]:
    """At most `most` widths of buckets, the last one the greatest length.

    By dynamic programming over lengths, which are rounded up to a multiple if there are many: the
    padded tokens of all texts up to a length in k buckets are those up to a shorter length in
    k - 1, and the texts between at this length.
    """
    longest = int(lengths.max())
    step = -(-longest // _MAX_LENGTHS)
    sizes, index = np.unique(-(-lengths // step) * step, return_inverse=True)
    counts = np.bincount(index, weights=texts).astype(np.int64)
    sizes[-1] = longest
    below = np.cumsum(counts)
    is_shorter = np.triu(np.ones((len(sizes), len(sizes)), dtype=bool), k=1)
    # Row i, column j: texts longer than size i, at size j.
    added = np.where(is_shorter, sizes * (below - below[:, None]), np.inf)
    padded = sizes * below.astype(float)
    previous: list[Int64[np.ndarray, " U"]] = []
    for _ in range(min(most, len(sizes)) - 1):
        padded_before = padded[:, None] + added
        previous.append(padded_before.argmin(0))
        padded = padded_before.min(0)
    last = len(sizes) - 1
    widths = [int(sizes[last])]
    for best in reversed(previous):
        last = int(best[last])
        widths.insert(0, int(sizes[last]))
    return widths
