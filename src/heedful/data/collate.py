"""Batches of tensors, built on the CPU so that a training step never waits for the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, Integer
from torch import Tensor

from heedful.data.columns import Sequences, rows_of
from heedful.data.plans import Windows
from heedful.parts.helpers import move
from heedful.parts.tokens import Tokens

# `Tokens.longest_text` is rounded up to a multiple of this: a compiled training step is
# compiled again for each value.
_TEXT_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of a model for a batch of rows.

    Args:
        tokens: (B, T), inputs of a model with one stack, or of the decoder of an encoder-decoder.
        targets: (M,), ids of tokens or of labels; (M, C) bool, the labels of M texts that are true;
            (M, C) float, the values of a regression.
        target_positions: (M,), for each target the index of its state in the flattened B·T states
            of `tokens`.
        source: (B, S), inputs of the encoder of an encoder-decoder; else None.
        types: (B, T), BERT's token types: 0 for the first text of a pair, 1 for the second; None
            for single texts.
        indices: (B,), the index in the data set of each row.
        num_tokens: tokens of `source` and `tokens` that are not padding.
        corpora: tokens by corpus, for training data of several corpora.
    """

    tokens: Tokens
    targets: Int64[Tensor, " M"] | Bool[Tensor, "M C"] | Float32[Tensor, "M C"]
    target_positions: Int64[Tensor, " M"]
    source: Tokens | None = None
    types: Int64[Tensor, "B T"] | None = None
    indices: Int64[np.ndarray, " B"]
    num_tokens: int
    corpora: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """The number of targets that a loss sums over."""
        return self.targets.size(0)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch with its tensors on `device`; `indices` stay on the CPU."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tokens) else move(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Tokens)
        }
        return replace(self, **moved)

    def part(self, index: int, count: int) -> "Batch | None":
        """Part `index` of `count` parts with nearly equal numbers of rows; of a batch on the CPU.

        Rows keep their padded width. None: the part has no rows, which is never so for the last.
        """
        if count == 1:
            return self
        num_rows, width = self.tokens.ids.shape
        first, last = num_rows * index // count, num_rows * (index + 1) // count
        if first == last:
            return None
        has_target = self.target_positions >= first * width
        has_target &= self.target_positions < last * width
        tokens = self.tokens.rows(first, last)
        source = None if self.source is None else self.source.rows(first, last)
        sides = [side for side in (tokens, source) if side is not None]
        return Batch(
            tokens=tokens,
            targets=self.targets[has_target],
            target_positions=self.target_positions[has_target] - first * width,
            source=source,
            types=None if self.types is None else self.types[first:last],
            indices=self.indices[first:last],
            num_tokens=sum(int(side.lengths.sum()) for side in sides),
            # Token counts of the whole batch, counted once: with the last part, which has rows.
            corpora={
                name: tokens if index == count - 1 else 0 for name, tokens in self.corpora.items()
            },
        )


def collate_pairs(
    src: Sequences,
    tgt: Sequences,
    indices: Integer[np.ndarray, " B"],
    *,
    start_ids: Sequence[int],
    pad_id: int,
) -> Batch:
    """The pairs at `indices`, in that order, padded on the right.

    The decoder's inputs are `start_ids` (at least one) and the target without its last token.
    """
    src_ids, src_real = pad_rows(src, indices, pad_id)
    tgt_ids, tgt_real = pad_rows(tgt, indices, pad_id)
    start = np.tile(np.array(start_ids, dtype=np.int64), (len(indices), 1))
    inputs = np.concatenate([start, tgt_ids[:, :-1]], axis=1)
    # The last start id predicts the first target; the ids before it are context.
    unscored = np.ones((len(indices), len(start_ids) - 1), dtype=bool)
    real = np.concatenate([unscored, tgt_real], axis=1)
    scored = np.concatenate([~unscored, tgt_real], axis=1)
    return Batch(
        source=make_tokens(src_ids, src_real),
        tokens=make_tokens(np.where(real, inputs, pad_id), real),
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
    labels: Int64[np.ndarray, " B"]
    | Bool[np.ndarray, "B C"]
    | Float32[np.ndarray, "B C"]
    | None = None,
    second: Int64[np.ndarray, " B"] | None = None,
) -> Batch:
    """The texts at `indices`, in that order, padded on the right.

    Args:
        labels: the label of each of these texts, the target at its first token, as
            `Batch.targets`; None: no targets.
        second: for pairs of texts, the index in each row at which the second text begins.
    """
    ids, real = pad_rows(texts, indices, pad_id)
    types = None
    if second is not None:
        columns = np.arange(ids.shape[1])
        types = torch.from_numpy(((columns >= second[:, None]) & real).astype(np.int64))
    targets = np.zeros(0, dtype=np.int64) if labels is None else labels
    return Batch(
        tokens=make_tokens(ids, real),
        targets=torch.from_numpy(targets),
        target_positions=torch.arange(len(targets)) * ids.shape[1],
        types=types,
        indices=indices.astype(np.int64),
        num_tokens=int(real.sum()),
    )


def collate_windows(texts: Sequences, windows: Windows, *, isolate: bool, pad_id: int) -> Batch:
    """Windows of `plan_windows` or `plan_evaluation_windows`, one a row.

    `indices` holds the index of the text in which each window begins.

    Args:
        isolate: mask attention between the texts of a window, by `tokens.segments` (None where
            no row has two texts), and leave out targets that are the first token of a text.
            Without it attention and targets cross the borders of texts, as in Radford et al.
            (2019).
    """
    last = np.diff(windows.offsets[-2:])
    assert (texts.lengths_of(windows.order[-1:]) == last).all(), "the plan is for other texts"
    # All arrays are (B, T + 1): the inputs of each window and the token after them, then padding.
    columns = np.arange(int(windows.sizes.max()) + 1)
    inside = columns <= windows.sizes[:, None]
    stream_indices = windows.starts[:, None] + np.where(inside, columns, 0)
    text = np.searchsorted(windows.offsets, stream_indices, side="right") - 1  # as in the stream
    starts = texts.offsets[rows_of(windows.order)[text]]
    ids = texts.ids[starts + stream_indices - windows.offsets[text]].astype(np.int64)
    real = inside[:, 1:]
    scored = real & (columns[1:] >= windows.first_scored[:, None])
    segments, longest = None, None
    if isolate:
        scored &= text[:, 1:] == text[:, :-1]
        if (real & (text[:, :-1] != text[:, :1])).any():
            numbers = text[:, :-1] - text[:, :1]  # of the texts of a window, from 0
            segments = torch.from_numpy(np.where(real, numbers, 0))
            rows = np.arange(len(numbers))[:, None] * (int(numbers.max()) + 1)
            longest = _longest_text(np.bincount((rows + numbers)[real]))
    return Batch(
        tokens=make_tokens(np.where(real, ids[:, :-1], pad_id), real, segments, longest),
        targets=torch.from_numpy(ids[:, 1:][scored]),
        target_positions=torch.from_numpy(np.flatnonzero(scored)),
        indices=windows.order[text[:, 0]],
        num_tokens=int(real.sum()),
    )


def collate_chats(
    chats: Sequences, rows: Sequence[Int64[np.ndarray, " n"]], *, pad_id: int
) -> Batch:
    """Rows of conversations, whose attention is masked between the conversations of a row.

    `indices` holds the first conversation of each row.

    Args:
        chats: ids as in `heedful.data.chats.ChatColumn`: the double of the id of a token, plus 1
            for tokens of answers, which are the targets.
        rows: indices of the conversations of each row; each has at least one token.
    """
    batch_chats = chats.take(np.concatenate(rows))
    ids, is_target = (batch_chats.ids >> 1).astype(np.int64), (batch_chats.ids & 1).astype(bool)
    # The last token of a conversation is no input, and the first one no target.
    is_input, is_next = np.ones((2, len(ids)), dtype=bool)
    is_input[batch_chats.offsets[1:] - 1] = False
    is_next[batch_chats.offsets[:-1]] = False
    lengths, counts = batch_chats.lengths - 1, np.array([len(row) for row in rows])
    row_of_chat = np.repeat(np.arange(len(rows)), counts)
    sizes = np.bincount(row_of_chat, weights=lengths, minlength=len(rows)).astype(np.int64)
    real = np.arange(sizes.max()) < sizes[:, None]
    padded = np.full(real.shape, pad_id, dtype=np.int64)
    padded[real] = ids[is_input]
    segments, longest = None, None
    if counts.max() > 1:
        numbers = np.arange(len(row_of_chat)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.zeros(real.shape, dtype=np.int64)
        table[real] = np.repeat(numbers, lengths)
        segments, longest = torch.from_numpy(table), _longest_text(lengths)
    return Batch(
        tokens=make_tokens(padded, real, segments, longest),
        targets=torch.from_numpy(ids[is_next & is_target]),
        target_positions=torch.from_numpy(np.flatnonzero(real)[is_target[is_next]]),
        indices=np.array([row[0] for row in rows], dtype=np.int64),
        num_tokens=int(sizes.sum()),
    )


def _longest_text(lengths: Integer[np.ndarray, " N"]) -> int:
    """`Tokens.longest_text` for texts of these lengths."""
    return -(-int(lengths.max()) // _TEXT_MULTIPLE) * _TEXT_MULTIPLE


def pad_rows(
    sequences: Sequences, indices: Integer[np.ndarray, " B"], pad_id: int
) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """The sequences at `indices`, padded on the right, and a mask that is True for real tokens."""
    rows = sequences.take(indices)
    real = np.arange(rows.lengths.max()) < rows.lengths[:, None]
    padded = np.full(real.shape, pad_id, dtype=np.int64)
    padded[real] = rows.ids
    return padded, real


def make_tokens(
    ids: Int64[np.ndarray, "B T"],
    real: Bool[np.ndarray, "B T"],
    segments: Int64[Tensor, "B T"] | None = None,
    longest_text: int | None = None,
) -> Tokens:
    """`Tokens` of rows padded on the right; without lengths where no row is padded."""
    lengths = None if real.all() else torch.from_numpy(real.sum(axis=1))
    tokens = Tokens.from_ids(
        torch.from_numpy(ids), lengths, segments=segments, longest_text=longest_text
    )
    index = None if lengths is None else torch.from_numpy(np.flatnonzero(real))
    return replace(tokens, real_index=index)
