"""Token ids on disk: memory-mapped, with their dtype in the header, one store a side."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, Integer

from heedful.errors import UserError
from heedful.files import replacing
from heedful.text.corpus import CorpusReport, Pair
from heedful.text.tokenizer import Tokenizer

_CHUNK = 8192  # pairs that are tokenised at a time


class IdStore:
    """Sequences of token ids, one after the other in one array; `store[i]` is a view.

    Args:
        ids: all ids, uint16 or uint32.
        offsets: where each sequence begins in `ids`, and at the end where the last one ends.
    """

    def __init__(self, ids: Integer[np.ndarray, " M"], offsets: Int64[np.ndarray, " N1"]) -> None:
        self.ids = ids
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integer[np.ndarray, " n"]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """The length of each sequence, in tokens."""
        return np.diff(self.offsets)


class PairStore:
    """The source and target sides of a corpus, of equal length; every sequence ends in EOS."""

    def __init__(self, src: IdStore, tgt: IdStore) -> None:
        assert len(src) == len(tgt), (len(src), len(tgt))
        self.src = src
        self.tgt = tgt

    def __len__(self) -> int:
        return len(self.src)

    @property
    def src_lengths(self) -> Int64[np.ndarray, " N"]:
        """Source lengths in tokens, EOS counted."""
        return self.src.lengths

    @property
    def tgt_lengths(self) -> Int64[np.ndarray, " N"]:
        """Target lengths in tokens, EOS counted; the decoder's input is as long."""
        return self.tgt.lengths


def pack_ids(sequences: Iterable[Sequence[int]], vocab_size: int) -> IdStore:
    """A store in memory, in the smallest dtype that holds the vocabulary: uint16 or uint32."""
    listed = list(sequences)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    lengths = np.fromiter(map(len, listed), np.int64, len(listed))
    ids = np.fromiter(chain.from_iterable(listed), np.int64, int(lengths.sum()))
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size), vocab_size
    return IdStore(ids.astype(dtype), _offsets(lengths))


def write_ids(path: Path, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Write a store as `<path>.ids.npy` and `<path>.offsets.npy`, both plain NumPy files.

    Raises:
        UserError: the files cannot be written.
    """
    _write(path, pack_ids(sequences, vocab_size))


def open_ids(path: Path) -> IdStore:
    """Open what `write_ids(path, ...)` wrote; the ids stay on disk until they are looked at.

    Raises:
        UserError: a file is missing, cut short, or not of a store.
    """
    ids, offsets = _map(_ids_path(path)), _map(_offsets_path(path))
    sound = (
        ids.ndim == offsets.ndim == 1
        and ids.dtype in (np.uint16, np.uint32)
        and offsets.dtype == np.int64
        and len(offsets) > 0
        and offsets[0] == 0
        and offsets[-1] == len(ids)
        and bool((np.diff(offsets) >= 0).all())
    )
    if not sound:
        raise UserError(f"{path}.ids.npy and .offsets.npy are not a store of ids; encode again")
    return IdStore(ids, offsets)


def open_pairs(directory: Path) -> PairStore:
    """Open what `encode_pairs` wrote into a directory.

    Raises:
        UserError: a file is missing or damaged, or the sides differ in length.
    """
    src, tgt = open_ids(directory / "src"), open_ids(directory / "tgt")
    if len(src) != len(tgt):
        raise UserError(
            f"{directory} holds {len(src)} sources but {len(tgt)} targets; encode the corpus again"
        )
    return PairStore(src, tgt)


def encode_pairs(
    pairs: Sequence[Pair],
    src_tokenizer: Tokenizer,
    tgt_tokenizer: Tokenizer,
    directory: Path,
    *,
    max_length: int,
    too_long: Literal["error", "drop", "truncate"],
    report: CorpusReport | None = None,
) -> tuple[PairStore, CorpusReport]:
    """Tokenise a corpus into `directory` and open it.

    Both sides are stored as their tokens and EOS; BOS is put before the target when a batch is
    made. Lengths and `max_length` count the EOS.

    Args:
        too_long: what becomes of a pair with a side above `max_length`: an error, left out, or
            cut so that EOS is still its last token.
        report: the one of `read_pairs`, for line numbers and to count on from.

    Returns:
        The store, and the report with over-long pairs, tokens (EOS not counted) and unknown
        tokens filled in.

    Raises:
        UserError: an over-long pair under "error"; nothing left; the directory not writable.
    """
    if report is None:
        report = CorpusReport(num_lines=len(pairs), num_kept=len(pairs))
    tokenizers = (src_tokenizer, tgt_tokenizer)
    chunks: list[tuple[IdStore, IdStore]] = []
    num_over = 0
    for start in range(0, len(pairs), _CHUNK):
        encoded = _encode(pairs[start : start + _CHUNK], tokenizers)
        kept = []
        for index, pair in enumerate(encoded, start):
            if max(map(len, pair)) > max_length:
                num_over += 1
                if too_long == "error":
                    raise _over_long(report.place(index), pair, max_length)
                if too_long == "drop":
                    continue
                for ids in pair:
                    ids[:] = [*ids[: max_length - 1], ids[-1]] if len(ids) > max_length else ids
            kept.append(pair)
        src_ids, tgt_ids = [pair[0] for pair in kept], [pair[1] for pair in kept]
        chunks.append(
            (
                pack_ids(src_ids, src_tokenizer.vocab_size),
                pack_ids(tgt_ids, tgt_tokenizer.vocab_size),
            )
        )
    src, tgt = _joined([chunk[0] for chunk in chunks]), _joined([chunk[1] for chunk in chunks])
    if len(src) == 0:
        raise UserError(
            f"no pair is left: all {len(pairs)} are longer than max_length {max_length}; raise it"
        )
    _write(directory / "src", src)
    _write(directory / "tgt", tgt)
    return open_pairs(directory), replace(
        report,
        num_kept=len(src),
        num_dropped=num_over if too_long == "drop" else 0,
        num_truncated=num_over if too_long == "truncate" else 0,
        num_src_tokens=len(src.ids) - len(src),
        num_tgt_tokens=len(tgt.ids) - len(tgt),
        num_src_unknown=int((src.ids == src_tokenizer.unk_id).sum()),
        num_tgt_unknown=int((tgt.ids == tgt_tokenizer.unk_id).sum()),
        origins=(),  # they name the pairs as they were before any was dropped
    )


def _encode(
    pairs: Sequence[Pair], tokenizers: tuple[Tokenizer, Tokenizer]
) -> list[tuple[list[int], list[int]]]:
    src, tgt = (
        [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch([pair[side] for pair in pairs])]
        for side, tokenizer in enumerate(tokenizers)
    )
    return list(zip(src, tgt, strict=True))


def _over_long(place: str, pair: tuple[list[int], list[int]], max_length: int) -> UserError:
    return UserError(
        f"{place}: {len(pair[0])} source and {len(pair[1])} target tokens (end mark counted),"
        f" more than max_length {max_length}; raise it, or set too_long to drop or truncate"
    )


def _joined(stores: list[IdStore]) -> IdStore:
    """One store of all sequences of several, which have one dtype."""
    if not stores:
        return pack_ids([], 0)
    lengths = np.concatenate([store.lengths for store in stores])
    return IdStore(np.concatenate([store.ids for store in stores]), _offsets(lengths))


def _offsets(lengths: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N1"]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ids_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.ids.npy")


def _offsets_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.offsets.npy")


def _write(path: Path, store: IdStore) -> None:
    with replacing(_ids_path(path)) as file:
        np.save(file, store.ids, allow_pickle=False)
        # Gone before new ids have their name: should the machine stop here, the store is
        # incomplete, and never new ids under old offsets.
        _offsets_path(path).unlink(missing_ok=True)
    with replacing(_offsets_path(path)) as file:
        np.save(file, store.offsets, allow_pickle=False)


def _map(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; encode again") from error
    except (ValueError, EOFError, SyntaxError) as error:  # no NumPy file, or cut short
        raise UserError(f"{path} is damaged or not an array of ids; encode again") from error
    if not isinstance(array, np.ndarray):  # an .npz under this name
        raise UserError(f"{path} is not an array of ids; encode again")
    return array
