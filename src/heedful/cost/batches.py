"""Batches for plans: of the longest inputs where there are no data, and parts of batches."""

from dataclasses import replace

import numpy as np
import torch

from heedful.data.collate import Batch
from heedful.parts.tokens import Tokens


def full_batch(rows: int, width: int, *, source_width: int | None, targets_per_row: float) -> Batch:
    """A batch without padding; all ids are 0.

    Args:
        width: tokens of each row, of the decoder if there are two sides.
        source_width: tokens of each source; None: one side.
        targets_per_row: mean number of targets.
    """
    size = rows * width
    count = max(1, round(rows * targets_per_row))
    return Batch(
        tokens=Tokens.from_ids(torch.zeros(rows, width, dtype=torch.long)),
        source=None
        if source_width is None
        else Tokens.from_ids(torch.zeros(rows, source_width, dtype=torch.long)),
        targets=torch.zeros(count, dtype=torch.long),
        target_positions=torch.linspace(0, size - 1, count).long(),
        indices=np.arange(rows),
        num_tokens=size + rows * (source_width or 0),
    )


def first_rows(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch, at their padded widths."""
    width = batch.tokens.ids.size(1)
    is_kept = batch.target_positions < rows * width
    share = rows / batch.tokens.ids.size(0)
    return replace(
        batch,
        tokens=batch.tokens.rows(0, rows),
        source=None if batch.source is None else batch.source.rows(0, rows),
        types=None if batch.types is None else batch.types[:rows],
        targets=batch.targets[is_kept],
        target_positions=batch.target_positions[is_kept],
        indices=batch.indices[:rows],
        num_tokens=round(batch.num_tokens * share),
    )


def padded_tokens(batch: Batch) -> int:
    """Tokens of all sides with padding."""
    return batch.tokens.ids.numel() + (0 if batch.source is None else batch.source.ids.numel())
