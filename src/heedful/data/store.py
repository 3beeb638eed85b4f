"""Token ids on disk: memory-mapped, with their dtype in the header, one store a side."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from heedful.errors import UserError
from heedful.files import replacing

CHUNK = 8192  # texts that are tokenised at a time


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


def pack_ids(sequences: Iterable[Sequence[int]], vocab_size: int) -> IdStore:
    """A store in memory, in the smallest dtype that holds the vocabulary: uint16 or uint32."""
    listed = list(sequences)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    lengths = np.fromiter(map(len, listed), np.int64, len(listed))
    ids = np.fromiter(chain.from_iterable(listed), np.int64, int(lengths.sum()))
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size), vocab_size
    return IdStore(ids.astype(dtype), offsets_of(lengths))


def write_ids(path: Path, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Write sequences of ids as a store (`write_store`)."""
    write_store(path, pack_ids(sequences, vocab_size))


def open_ids(path: Path) -> IdStore:
    """Open what `write_ids(path, ...)` wrote; the ids stay on disk until they are looked at.

    Raises:
        UserError: a file is missing, cut short, or not of a store.
    """
    ids, offsets = map_array(_ids_path(path)), map_array(_offsets_path(path))
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


def joined(stores: list[IdStore]) -> IdStore:
    """One store of all sequences of several, which have one dtype."""
    if not stores:
        return pack_ids([], 0)
    lengths = np.concatenate([store.lengths for store in stores])
    return IdStore(np.concatenate([store.ids for store in stores]), offsets_of(lengths))


def offsets_of(lengths: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N1"]:
    """Where sequences of these lengths begin, laid end to end, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ids_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.ids.npy")


def _offsets_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.offsets.npy")


def write_store(path: Path, store: IdStore) -> None:
    """Write a store as `<path>.ids.npy` and `<path>.offsets.npy`, both plain NumPy files.

    Raises:
        UserError: the files cannot be written.
    """
    with replacing(_ids_path(path)) as file:
        np.save(file, store.ids, allow_pickle=False)
        # Gone before new ids have their name: should the machine stop here, the store is
        # incomplete, and never new ids under old offsets.
        _offsets_path(path).unlink(missing_ok=True)
    with replacing(_offsets_path(path)) as file:
        np.save(file, store.offsets, allow_pickle=False)


def map_array(path: Path) -> np.ndarray:
    """A NumPy file as an array that stays on disk until it is looked at.

    Raises:
        UserError: the file is missing, cut short or of another kind.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; encode again") from error
    except (ValueError, EOFError, SyntaxError) as error:  # no NumPy file, or cut short
        raise UserError(f"{path} is damaged or not an array of ids; encode again") from error
    if not isinstance(array, np.ndarray):  # an .npz under this name
        raise UserError(f"{path} is not an array of ids; encode again")
    return array
