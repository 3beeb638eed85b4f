"""Batches of pairs: which go together in an epoch, and their tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from torch import Tensor

from heedful.data.pair_store import PairStore
from heedful.data.store import IdStore
from heedful.errors import UserError

_BAND = 2  # source lengths that are mixed, in tokens


def plan_epoch(
    src_lengths: Integer[np.ndarray, " N"],
    tgt_lengths: Integer[np.ndarray, " N"],
    *,
    max_tokens: int | None,
    max_sentences: int | None,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    pad_multiple: int = 1,
) -> list[Int64[np.ndarray, " n"]]:
    """Which pairs make each batch of an epoch: arrays of indices, every index in one of them.

    A pure function of its arguments. Pairs of similar lengths go together: bands of source
    lengths, and inside a band by target length, up in one band and down in the next so that no
    step is large. With `shuffle` the bands' borders, the order of equal lengths and the order of
    the batches are drawn from (seed, epoch); without it the longest batch comes first.

    Args:
        src_lengths, tgt_lengths: in tokens, EOS counted.
        max_tokens: a batch of n pairs has n x (longest source + longest target) at most, padding
            counted.
        max_sentences: pairs in a batch at most. One of the two limits may be `None`.
        pad_multiple: lengths are padded to a multiple of this (see `collate`).

    Raises:
        UserError: a pair that alone is above `max_tokens`; no limit at all.
    """
    if max_tokens is None and max_sentences is None:
        raise UserError("batches have no limit; set max_tokens or max_sentences")
    if min(limit for limit in (max_tokens, max_sentences) if limit is not None) < 1:
        raise UserError("max_tokens and max_sentences must be at least 1; raise them")
    src, tgt = (round_up(side, pad_multiple) for side in (src_lengths, tgt_lengths))
    num_pairs = len(src)
    if num_pairs == 0:
        return []
    if max_tokens is not None and int((src + tgt).max()) > max_tokens:
        longest = int((src + tgt).argmax())
        raise UserError(
            f"pair {longest + 1} alone takes {src[longest] + tgt[longest]} tokens"
            f" ({src[longest]} source + {tgt[longest]} target, padded), more than max_tokens"
            f" {max_tokens}; raise it or lower max_length"
        )
    rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    ties = rng.random(num_pairs) if shuffle else np.arange(num_pairs)
    phase = int(rng.integers(_BAND)) if shuffle else 0
    band = -((src + phase) // _BAND)
    order = np.lexsort((ties, np.where(band % 2 == 0, -tgt, tgt), band))
    batches = _cut(order, src[order], tgt[order], max_tokens, max_sentences)
    return [batches[i] for i in rng.permutation(len(batches))] if shuffle else batches


@dataclass
class PairBatch:
    """Padded tensors of some pairs. What is padding is told by the lengths, never by the ids.

    `tgt_out` is what the decoder must say, ending in EOS; `tgt_in` is what it hears, the same one
    place later behind BOS. Padding is on the right.
    """

    src: Int64[Tensor, "B S"]
    src_lengths: Int64[Tensor, " B"]
    tgt_in: Int64[Tensor, "B T"]
    tgt_out: Int64[Tensor, "B T"]
    tgt_lengths: Int64[Tensor, " B"]
    indices: Int64[np.ndarray, " B"]
    num_targets: int  # tokens of tgt_out that are not padding
    num_tokens: int  # real tokens of both sides


def collate(
    store: PairStore,
    indices: Integer[np.ndarray, " B"],
    *,
    bos_id: int,
    pad_id: int,
    device: torch.device | str | None = None,
    pad_multiple: int = 1,
) -> PairBatch:
    """The tensors of the pairs at `indices`, in that order, on `device`."""
    src, src_real = padded_rows(store.src, indices, pad_id, pad_multiple)
    tgt_out, tgt_real = padded_rows(store.tgt, indices, pad_id, pad_multiple)
    tgt_in = np.full_like(tgt_out, bos_id)
    tgt_in[:, 1:] = tgt_out[:, :-1]
    tgt_in[~tgt_real] = pad_id
    tgt_lengths = tgt_real.sum(axis=1)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PairBatch(
        src=tensor(src),
        src_lengths=tensor(src_real.sum(axis=1)),
        tgt_in=tensor(tgt_in),
        tgt_out=tensor(tgt_out),
        tgt_lengths=tensor(tgt_lengths),
        indices=indices.astype(np.int64),
        num_targets=int(tgt_lengths.sum()),
        num_tokens=int(src_real.sum() + tgt_lengths.sum()),
    )


def round_up(lengths: Integer[np.ndarray, " N"], multiple: int) -> Int64[np.ndarray, " N"]:
    """The next multiple of each."""
    return -(-lengths.astype(np.int64) // multiple) * multiple


def _cut(
    order: Int64[np.ndarray, " N"],
    src: Int64[np.ndarray, " N"],
    tgt: Int64[np.ndarray, " N"],
    max_tokens: int | None,
    max_sentences: int | None,
) -> list[Int64[np.ndarray, " n"]]:
    """Cut pairs that stand in order, each batch as long as the limits let it be."""
    batches = []
    start = 0
    while start < len(order):
        most = len(order) - start if max_sentences is None else max_sentences
        if max_tokens is not None:
            # The first pair alone bounds the number, so only that many need a look.
            most = min(most, max_tokens // max(1, int(src[start] + tgt[start])))
        window = slice(start, start + most)
        width = np.maximum.accumulate(src[window]) + np.maximum.accumulate(tgt[window])
        size = len(width)
        if max_tokens is not None:
            tokens = width * np.arange(1, size + 1)
            size = int(np.searchsorted(tokens, max_tokens, side="right"))
        batches.append(order[start : start + size])
        start += size
    return batches


def padded_rows(
    store: IdStore, indices: Integer[np.ndarray, " B"], pad_id: int, multiple: int
) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """The sequences as rows padded on the right, and which places are not padding."""
    starts, lengths = store.offsets[indices], store.lengths[indices]
    width = int(round_up(lengths, multiple).max())
    real = np.arange(width) < lengths[:, None]
    padded = np.full((len(indices), width), pad_id, dtype=np.int64)
    padded[real] = store.ids[(starts[:, None] + np.arange(width))[real]]
    return padded, real
