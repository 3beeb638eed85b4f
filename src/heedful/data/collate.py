"""Batches as tensors, made on the CPU so that nothing in a training step waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from torch import Tensor

from heedful.data.columns import Sequences
from heedful.data.plans import Windows
from heedful.parts.tokens import Tokens

# `Tokens.longest_text` is rounded up to these: a compiled step then meets few of its values.
_TEXT_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a model reads of some rows, and what it learns to say.

    Args:
        tokens: (B, T), what is read; with an encoder and a decoder what the decoder reads.
        targets: (M,), ids of tokens or of labels.
        places: (M,), for each target the index of its state among the B·T of `tokens`.
        source: (B, S), what the encoder reads, where there is a decoder too.
        types: (B, T), 0 for the first text of a pair and 1 for the second (BERT's token types).
        indices: (B,), which row of the data each row is.
        num_tokens: that are not padding, of source and tokens.
    """

    tokens: Tokens
    targets: Int64[Tensor, " M"]
    target_positions: Int64[Tensor, " M"]
    source: Tokens | None = None
    types: Int64[Tensor, "B T"] | None = None
    indices: Int64[np.ndarray, " B"]
    num_tokens: int

    @property
    def num_targets(self) -> int:
        """The number of targets that a loss sums over."""
        return self.targets.size(0)

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device; the indices stay."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Tokens)
        }
        return replace(self, **moved)


def collate_pairs(
    src: Sequences,
    tgt: Sequences,
    indices: Integer[np.ndarray, " B"],
    *,
    start_ids: Sequence[int],
    pad_id: int,
) -> Batch:
    """Pairs at `indices`, in that order: the decoder reads the start ids (at least one) and the
    target without its last token."""
    src_ids, src_real = pad_rows(src, indices, pad_id)
    tgt_ids, tgt_real = pad_rows(tgt, indices, pad_id)
    first_scored = len(start_ids) - 1
    start = np.tile(np.array(start_ids, dtype=np.int64), (len(indices), 1))
    read = np.concatenate([start, tgt_ids[:, :-1]], axis=1)
    before = np.ones((len(indices), first_scored), dtype=bool)
    real = np.concatenate([before, tgt_real], axis=1)
    scored = np.concatenate([~before, tgt_real], axis=1)
    return Batch(
        source=make_tokens(src_ids, src_real),
        tokens=make_tokens(np.where(real, read, pad_id), real),
        targets=torch.from_numpy(tgt_ids[tgt_real]),
        target_positions=torch.from_numpy(np.flatnonzero(scored)),
        indices=indices.astype(np.int64),
        num_tokens=int(src_real.sum() + real.sum()),
    )


def collate_texts(
    texts: Sequences,
    indices: Integer[np.ndarray, " B"],
    *,
    pad_id: int,
    labels: Int64[np.ndarray, " N"] | None = None,
    second: Int64[np.ndarray, " N"] | None = None,
) -> Batch:
    """Texts at `indices`, in that order, with a label each at their first token, or without any.

    Args:
        second: for pairs of texts, where in its sequence each second one begins.
    """
    ids, real = pad_rows(texts, indices, pad_id)
    types = None
    if second is not None:
        columns = np.arange(ids.shape[1])
        types = torch.from_numpy(((columns >= second[indices][:, None]) & real).astype(np.int64))
    targets = np.zeros(0, dtype=np.int64) if labels is None else labels[indices]
    return Batch(
        tokens=make_tokens(ids, real),
        targets=torch.from_numpy(targets),
        target_positions=torch.arange(len(targets)) * ids.shape[1],
        types=types,
        indices=indices.astype(np.int64),
        num_tokens=int(real.sum()),
    )


def collate_windows(texts: Sequences, windows: Windows, *, isolate: bool, pad_id: int) -> Batch:
    """Windows of `plan_windows` or `plan_evaluation_windows`, as rows.

    `indices` holds the text in which each window begins.

    Args:
        isolate: keep texts apart: `tokens.segments` tell them (but where no row has two), and a
            target that is the first token of the next text does not count. Without it a window
            is text like any other, as in Radford et al. (2019).
    """
    assert windows.offsets[-1] == len(texts.ids), "the plan is of other texts"
    columns = np.arange(int(windows.sizes.max()) + 1)
    inside = columns <= windows.sizes[:, None]  # the inputs and the token after them
    places = windows.starts[:, None] + np.where(inside, columns, 0)
    text = np.searchsorted(windows.offsets, places, side="right") - 1
    found = texts.offsets[windows.order[text]] + places - windows.offsets[text]
    ids = texts.ids[found].astype(np.int64)
    real = inside[:, 1:]
    scored = real & (columns[1:] >= windows.first_scored[:, None])
    segments, longest = None, None
    if isolate:
        scored &= text[:, 1:] == text[:, :-1]
        if (real & (text[:, :-1] != text[:, :1])).any():
            numbers = text[:, :-1] - text[:, :1]
            segments = torch.from_numpy(np.where(real, numbers, 0))
            rows = np.arange(len(numbers))[:, None] * (int(numbers.max()) + 1)
            counts = np.bincount((rows + numbers)[real])
            longest = -(-int(counts.max()) // _TEXT_MULTIPLE) * _TEXT_MULTIPLE
    return Batch(
        tokens=make_tokens(np.where(real, ids[:, :-1], pad_id), real, segments, longest),
        targets=torch.from_numpy(ids[:, 1:][scored]),
        target_positions=torch.from_numpy(np.flatnonzero(scored)),
        indices=windows.order[text[:, 0]],
        num_tokens=int(real.sum()),
    )


def pad_rows(
    sequences: Sequences, indices: Integer[np.ndarray, " B"], pad_id: int
) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Sequences as rows padded on the right, and which places are not padding."""
    chosen = sequences.take(indices)
    real = np.arange(chosen.lengths.max()) < chosen.lengths[:, None]
    padded = np.full(real.shape, pad_id, dtype=np.int64)
    padded[real] = chosen.ids
    return padded, real


def make_tokens(
    ids: Int64[np.ndarray, "B T"],
    real: Bool[np.ndarray, "B T"],
    segments: Int64[Tensor, "B T"] | None = None,
    longest_text: int | None = None,
) -> Tokens:
    """Rows that are padded on the right; padding is told only where there is any."""
    lengths = None if real.all() else torch.from_numpy(real.sum(axis=1))
    given = torch.from_numpy(ids)
    return Tokens.from_ids(given, lengths, segments=segments, longest_text=longest_text)
