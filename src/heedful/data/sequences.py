"""Single sequences: stored, put into batches with or without a label, and packed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from heedful.data.batches import padded_rows, plan_epoch, round_up
from heedful.data.documents import TextReport
from heedful.data.labelled import LabelledStore, over_long
from heedful.data.store import CHUNK, IdStore, joined, offsets_of, open_ids, pack_ids, write_store
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError


def encode_sequences(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    path: Path,
    *,
    max_length: int,
    too_long: Literal["error", "drop", "truncate"],
    report: TextReport,
) -> tuple[IdStore, TextReport]:
    """Tokenise texts, as `tokenizer.wrap` frames them, into a store at `path`; open it.

    A text of nothing but special and unknown tokens is left out, and counted with the empty ones:
    no model has anything to learn from it.

    Args:
        max_length: tokens of a sequence at most, marks counted.
        too_long: what becomes of a longer one: an error, left out, or cut before its last marks.
        report: of the reading, for line numbers and to count on from.

    Returns:
        The store, and the report with over-long texts, tokens and unknown tokens filled in.

    Raises:
        UserError: an over-long text under "error"; no room between the marks; nothing left; the
            files not writable.
    """
    num_marks = len(tokenizer.wrap([]))
    if max_length <= num_marks:
        raise UserError(
            f"max_length {max_length} leaves no room for text beside {num_marks} marks; raise it"
        )
    chunks: list[IdStore] = []
    num_over = num_bare = num_unknown = 0
    for start in range(0, len(texts), CHUNK):
        sequences = []
        encoded = tokenizer.encode_batch(list(texts[start : start + CHUNK]))
        for index, ids in enumerate(encoded, start):
            length = num_marks + len(ids)
            if length > max_length:
                num_over += 1
                if too_long == "error":
                    raise over_long(report.place(index), length, max_length)
                if too_long == "drop":
                    continue
                ids = ids[: max_length - num_marks]
            if tokenizer.special_ids.issuperset(ids):
                num_bare += 1
                continue
            num_unknown += ids.count(tokenizer.unk_id)
            sequences.append(tokenizer.wrap(ids))
        chunks.append(pack_ids(sequences, tokenizer.vocab_size))
    store = joined(chunks)
    if not len(store):
        raise UserError(
            f"no text is left: of {len(texts)}, {num_over} are longer than max_length {max_length}"
            f" and {num_bare} hold nothing that the tokenizer knows; raise max_length, set"
            " too_long to truncate, or give other text"
        )
    write_store(path, store)
    return open_ids(path), replace(
        report,
        num_kept=len(store),
        num_empty=report.num_empty + num_bare,
        num_dropped=num_over if too_long == "drop" else 0,
        num_truncated=num_over if too_long == "truncate" else 0,
        num_tokens=len(store.ids) - num_marks * len(store),
        num_unknown=num_unknown,
        origins=None,  # they name the texts as they were before any was left out
    )


def plan_sequences(
    lengths: Integer[np.ndarray, " N"],
    *,
    max_tokens: int | None,
    max_sentences: int | None,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    pad_multiple: int = 1,
) -> list[Int64[np.ndarray, " n"]]:
    """Which sequences make each batch of an epoch: `plan_epoch` where there is one side alone.

    Args:
        max_tokens: a batch of n sequences has n x longest at most, padding counted.

    Raises:
        UserError: a sequence that alone is above `max_tokens`; no limit at all.
    """
    padded = round_up(lengths, pad_multiple)
    if len(padded) and max_tokens is not None and 1 <= max_tokens < padded.max():
        longest = int(padded.argmax())
        raise UserError(
            f"sequence {longest + 1} alone takes {padded[longest]} tokens (padded), more than"
            f" max_tokens {max_tokens}; raise it or lower max_length"
        )
    return plan_epoch(
        lengths,
        np.zeros_like(lengths),
        max_tokens=max_tokens,
        max_sentences=max_sentences,
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        pad_multiple=pad_multiple,
    )


@dataclass
class SequenceBatch:
    """Sequences padded on the right. What is padding is told by the lengths, never by the ids."""

    ids: Int64[Tensor, "B T"]
    lengths: Int64[Tensor, " B"]
    indices: Int64[np.ndarray, " B"]
    num_tokens: int  # that are not padding


@dataclass
class LabelledBatch(SequenceBatch):
    """Sequences with a label each, and for pairs the segment of each token.

    Segments are 0 up to the second text and 1 from there on, as in BERT; `None` without pairs.
    Padding has segment 0.
    """

    labels: Int64[Tensor, " B"]
    segments: Int64[Tensor, "B T"] | None

    @property
    def num_targets(self) -> int:
        """What a loss sums over: one label a sequence."""
        return self.labels.numel()


def collate_sequences(
    store: IdStore,
    indices: Integer[np.ndarray, " B"],
    *,
    pad_id: int,
    device: torch.device | str | None = None,
    pad_multiple: int = 1,
) -> SequenceBatch:
    """The tensors of the sequences at `indices`, in that order, on `device`."""
    ids, real = padded_rows(store, indices, pad_id, pad_multiple)
    return SequenceBatch(
        ids=torch.from_numpy(ids).to(device),
        lengths=torch.from_numpy(real.sum(axis=1)).to(device),
        indices=indices.astype(np.int64),
        num_tokens=int(real.sum()),
    )


def collate_labelled(
    store: LabelledStore,
    indices: Integer[np.ndarray, " B"],
    *,
    pad_id: int,
    device: torch.device | str | None = None,
    pad_multiple: int = 1,
) -> LabelledBatch:
    """The tensors of the labelled texts at `indices`, in that order, on `device`."""
    batch = collate_sequences(
        store.ids, indices, pad_id=pad_id, device=device, pad_multiple=pad_multiple
    )
    segments = None
    if store.seconds is not None:
        columns = np.arange(batch.ids.size(1))
        second = columns >= store.seconds[indices][:, None]
        real = columns < store.ids.lengths[indices][:, None]
        segments = torch.from_numpy((second & real).astype(np.int64)).to(device)
    return LabelledBatch(
        ids=batch.ids,
        lengths=batch.lengths,
        indices=batch.indices,
        num_tokens=batch.num_tokens,
        labels=torch.from_numpy(store.labels[indices]).to(device),
        segments=segments,
    )


def pack_sentences(lengths: Integer[np.ndarray, " N"], max_length: int) -> Int64[np.ndarray, " G1"]:
    """Consecutive whole sentences in groups of up to `max_length` tokens.

    Each group takes sentences, in their order, while they fit (FULL-SENTENCES of Liu et al. 2019,
    section 4.2, but that no sentence is ever cut).

    Returns:
        Borders b: group g holds sentences b[g] to b[g + 1], the last not included. So
        `IdStore(store.ids, store.offsets[b])` is the store of the groups, on the same ids.

    Raises:
        UserError: a sentence is longer than `max_length`.
    """
    if len(lengths) and lengths.max() > max_length:
        longest = int(lengths.argmax())
        raise UserError(
            f"sentence {longest + 1} has {lengths[longest]} tokens, more than max_length"
            f" {max_length}; raise it, or cut the sentence"
        )
    ends = offsets_of(lengths.astype(np.int64))
    borders = [0]
    while borders[-1] < len(lengths):
        full = ends[borders[-1]] + max_length
        borders.append(int(np.searchsorted(ends, full, side="right")) - 1)
    return np.array(borders, dtype=np.int64)
