"""Language-model batches: windows over documents laid end to end, and strided ones to evaluate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from torch import Tensor

from heedful.data.store import IdStore, offsets_of
from heedful.errors import UserError


@dataclass(frozen=True, eq=False)
class Stream:
    """The documents of a store that are not empty, laid end to end in some order."""

    order: Int64[np.ndarray, " N"]  # which document stands where
    offsets: Int64[np.ndarray, " N1"]  # where each begins in the stream, and where the last ends


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """The windows of one batch: `context` tokens of the stream and the one after them, each."""

    stream: Stream
    starts: Int64[np.ndarray, " B"]  # where each begins in the stream
    context: int


def packed_plan(
    lengths: Integer[np.ndarray, " N"],
    *,
    context: int,
    batch_size: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
) -> list[PackedWindows]:
    """Which windows make each batch of an epoch. A pure function of its arguments.

    The documents, in an order drawn from (seed, epoch), are one stream of M tokens. From a phase
    p, drawn below `context`, it is cut into as many windows as fit: window k has the inputs
    p + k x context and on, `context` of them, and as targets the tokens one place later. So every
    token after the p + 1 first is a target exactly once, up to those at the end, fewer than
    `context`, that fill no window. The phase moves the borders from epoch to epoch, also those of
    a single long document, and what one epoch leaves out at the ends another takes in. The windows
    are then dealt to batches in an order that is drawn too.

    Every batch but the last has `batch_size` windows; the last one is kept with those left. With
    `shuffle` off the documents and the windows stand in their own order, from phase 0.

    Args:
        lengths: of the documents, in tokens.
        context: inputs in a window.

    Raises:
        UserError: fewer tokens than one window needs; a size below 1.
    """
    if min(context, batch_size) < 1:
        raise UserError("context and batch_size must be at least 1; raise them")
    rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    order = rng.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    order = order[lengths[order] > 0]
    stream = Stream(order, offsets_of(lengths[order].astype(np.int64)))
    spare = int(stream.offsets[-1]) - 1 - context  # tokens beyond what one window needs
    if spare < 0:
        raise UserError(
            f"the text has {spare + 1 + context} tokens, but a window of context {context} needs"
            f" {context + 1}; lower context, or give more text"
        )
    phase = int(rng.integers(min(context, spare + 1))) if shuffle else 0
    starts = phase + context * np.arange(1 + (spare - phase) // context)
    if shuffle:
        starts = rng.permutation(starts)
    return [
        PackedWindows(stream, starts[first : first + batch_size], context)
        for first in range(0, len(starts), batch_size)
    ]


@dataclass
class PackedBatch:
    """Inputs, and for each the token that comes next. Padding is told by `lengths` alone.

    `documents` numbers the documents of a row from 0: an input may attend to its own one only.
    `scored` says which targets count. In a batch for evaluation `indices` tells the document of
    each row.
    """

    ids: Int64[Tensor, "B T"]
    targets: Int64[Tensor, "B T"]
    scored: Bool[Tensor, "B T"]
    num_targets: int  # scored ones
    num_tokens: int  # inputs that are not padding
    documents: Int64[Tensor, "B T"] | None = None  # None: no row needs a mask between documents
    lengths: Int64[Tensor, " B"] | None = None  # None: no row is padded
    indices: Int64[np.ndarray, " B"] | None = None


def load_windows(
    store: IdStore,
    windows: PackedWindows,
    *,
    isolate: bool,
    device: torch.device | str | None = None,
) -> PackedBatch:
    """The tensors of some windows of `packed_plan(store.lengths, ...)`, on `device`.

    Args:
        isolate: keep documents apart: `documents` tells them, and a target that is the first
            token of the next document is not scored. Without it a window is text like any other,
            as in Radford et al. (2019): no document mask, every target scored.
    """
    stream = windows.stream
    assert stream.offsets[-1] == len(store.ids), "the plan is of another store"
    places = windows.starts[:, None] + np.arange(windows.context + 1)
    standing = np.searchsorted(stream.offsets, places, side="right") - 1
    inside = places - stream.offsets[standing]
    tokens = store.ids[store.offsets[stream.order[standing]] + inside].astype(np.int64)
    scored = np.ones(tokens[:, 1:].shape, dtype=bool)
    documents = None
    if isolate:
        scored = standing[:, 1:] == standing[:, :-1]
        if (standing[:, 0] != standing[:, -2]).any():
            documents = _tensor(standing[:, :-1] - standing[:, :1], device)
    return PackedBatch(
        ids=_tensor(tokens[:, :-1], device),
        targets=_tensor(tokens[:, 1:], device),
        scored=_tensor(scored, device),
        num_targets=int(scored.sum()),
        num_tokens=scored.size,
        documents=documents,
    )


class Window(NamedTuple):
    """The tokens `start` to `end` (not included) of a text, those from `first_scored` on scored.

    All but the last are inputs, all but the first are targets.
    """

    start: int
    end: int
    first_scored: int


def stride_windows(length: int, *, context: int, stride: int) -> list[Window]:
    """Windows over a text of `length` tokens that score each but the first exactly once.

    Window k has up to `context` inputs from token k x `stride` on. The first scores all its
    targets, a later one those that none before it did: `stride` of them at most, each with
    `context - stride + 1` tokens before it at least. With `stride` 1 every token is told from as
    many tokens as there are, or as fit; with `stride` equal to `context` no token is an input
    twice. A text that begins with BOS has BOS for the first token, which is context alone.

    Raises:
        UserError: `stride` is not from 1 to `context`.
    """
    cut = _cut(np.array([length]), context, stride)
    columns = (cut.starts.tolist(), cut.ends.tolist(), cut.first_scored.tolist())
    return [Window(*row) for row in zip(*columns, strict=True)]


def evaluation_batches(
    store: IdStore,
    *,
    context: int,
    stride: int,
    batch_size: int,
    pad_id: int,
    device: torch.device | str | None = None,
) -> Iterator[PackedBatch]:
    """The `stride_windows` of every document, long ones first, in batches padded on the right.

    Every token of the store that is not the first of its document is scored in exactly one batch.
    To score a corpus as one text, its documents running on into each other, pass
    `IdStore(store.ids, store.offsets[[0, -1]])`.

    Raises:
        UserError: a size below 1, or `stride` above `context`.
    """
    if batch_size < 1:
        raise UserError("batch_size must be at least 1; raise it")
    cut = _cut(store.lengths, context, stride)
    order = np.argsort(cut.starts - cut.ends, kind="stable")
    return (
        _load_cut(store, cut.select(order[first : first + batch_size]), pad_id, device)
        for first in range(0, len(order), batch_size)
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """Windows of many documents, as columns; what they mean is said at `Window`."""

    indices: Int64[np.ndarray, " W"]  # the document of each
    starts: Int64[np.ndarray, " W"]
    ends: Int64[np.ndarray, " W"]
    first_scored: Int64[np.ndarray, " W"]

    def select(self, rows: Int64[np.ndarray, " w"]) -> "_Cut":
        return _Cut(self.indices[rows], self.starts[rows], self.ends[rows], self.first_scored[rows])


def _cut(lengths: Integer[np.ndarray, " N"], context: int, stride: int) -> _Cut:
    if not 1 <= stride <= context:
        raise UserError(f"stride {stride} must be from 1 to context {context}; change one of them")
    lengths = lengths.astype(np.int64)
    beyond_first = np.maximum(lengths - 1 - context, 0)  # targets that the first window leaves
    counts = np.where(lengths > 1, 1 - (-beyond_first // stride), 0)
    indices = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(indices)) - offsets_of(counts)[indices]  # of a window in its document
    starts = number * stride
    return _Cut(
        indices=indices,
        starts=starts,
        ends=np.minimum(starts + context + 1, lengths[indices]),
        first_scored=np.where(number == 0, 1, starts + context + 1 - stride),
    )


def _load_cut(
    store: IdStore, cut: _Cut, pad_id: int, device: torch.device | str | None
) -> PackedBatch:
    lengths = cut.ends - cut.starts - 1
    columns = np.arange(int(lengths.max()))
    real = columns < lengths[:, None]
    sources = ((store.offsets[cut.indices] + cut.starts)[:, None] + columns)[real]
    ids, targets = (np.full(real.shape, pad_id, dtype=np.int64) for _ in range(2))
    ids[real], targets[real] = store.ids[sources], store.ids[sources + 1]
    scored = real & (cut.starts[:, None] + columns + 1 >= cut.first_scored[:, None])
    return PackedBatch(
        ids=_tensor(ids, device),
        targets=_tensor(targets, device),
        scored=_tensor(scored, device),
        num_targets=int(scored.sum()),
        num_tokens=int(lengths.sum()),
        lengths=_tensor(lengths, device),
        indices=cut.indices,
    )


def _tensor(array: np.ndarray, device: torch.device | str | None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
