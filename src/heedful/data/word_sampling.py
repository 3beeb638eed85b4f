"""Random subword splits of the words in rows of ids, a function of seed, epoch, row and place."""

import random
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64
from numpy.typing import NDArray

from heedful.data.columns import Sequences, offsets_from_lengths
from heedful.data.subwords import make_splitter
from heedful.data.tokenizer import Tokenizer

# Samples per distinct word and epoch. Further occurrences of a word reuse them, so that the cost of
# an epoch depends on the number of distinct words.
_MAX_SPLITS = 16
_CACHED_SPLITS = 1 << 17  # of a tokenizer, about 40 MB


class StoredTokens(NamedTuple):
    """M stored tokens of G rows.

    Attributes:
        ids: (M,).
        rows, places: (M,), the row of each token and its index in the row.
        groups: (M,), the number of its group, ascending.
    """

    ids: NDArray[np.integer]
    rows: Int64[np.ndarray, " M"]
    places: Int64[np.ndarray, " M"]
    groups: Int64[np.ndarray, " M"]


class SampledWords(NamedTuple):
    """W words with sampled splits.

    Attributes:
        starts: (W,), the index of the first stored token of each word.
        words: the sampled ids of each word.
        groups: (W,), the group of each word.
    """

    starts: Int64[np.ndarray, " W"]
    words: Sequences
    groups: Int64[np.ndarray, " W"]

    def lengths(self, num_groups: int) -> Int64[np.ndarray, " G"]:
        """(G,), the sampled tokens of each group."""
        sums = np.bincount(self.groups, self.words.lengths, num_groups)
        return np.asarray(sums.astype(np.int64))


class WordSampler:
    """Random splits of the words in rows of ids, a pure function of (seed, epoch, row, place).

    Words begin at special tokens, after them, and as in `Tokenizer.word_starts`. Of each word
    `_MAX_SPLITS` splits are sampled in an epoch, when they are needed; each occurrence has one of
    them, by a hash of its row and place. The most recent ones are in memory.

    Args:
        strength: as in `make_splitter`.

    Raises:
        UserError: the tokenizer's kind has only one split for each word.
    """

    def __init__(self, tokenizer: Tokenizer, strength: float, seed: int) -> None:
        split, self._seed = make_splitter(tokenizer, strength), seed
        self._special = np.zeros(tokenizer.vocab_size, np.bool_)
        self._special[[*tokenizer.special_ids]] = True
        # A piece begins a word whatever piece is before it: here it is the piece itself.
        self._begins = self._special | [
            tokenizer.word_starts([i, i])[1] for i in range(tokenizer.vocab_size)
        ]

        @lru_cache(maxsize=_CACHED_SPLITS)
        def sample(epoch: int, number: int, word: bytes, dtype: str) -> bytes:
            """Split `number` of a word in an epoch; ids as bytes."""
            rng = random.Random(f"{seed} {epoch} {number} {word.hex()}")
            ids = split(tuple(np.frombuffer(word, dtype).tolist()), 1, rng)[0]
            return np.array(ids, dtype).tobytes()

        self._sample = sample

    def __call__(
        self,
        tokens: StoredTokens,
        column: int,
        epoch: int,
        limits: NDArray[np.number] | None = None,
    ) -> SampledWords:
        """Sample splits of all words of some groups.

        Args:
            column: number of the column, by which equal rows of columns differ.
            limits: (G,), the largest number of tokens of each group: groups whose sample is longer
                keep their stored tokens.
        """
        ids = np.ascontiguousarray(tokens.ids)
        starts = self._word_starts(tokens)
        numbers = self._numbers(tokens, starts, column, epoch)
        content, dtype, size = ids.tobytes(), ids.dtype.str, ids.itemsize
        borders = [*(starts * size).tolist(), len(content)]
        stored = [content[a:b] for a, b in pairwise(borders)]
        parts = [
            self._sample(epoch, number, word, dtype)
            for word, number in zip(stored, numbers.tolist(), strict=True)
        ]
        groups = tokens.groups[starts]
        if limits is not None:
            lengths = np.bincount(groups, [len(part) // size for part in parts], len(limits))
            for index in np.flatnonzero((lengths > limits)[groups]).tolist():
                parts[index] = stored[index]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts)) // size
        words = Sequences(np.frombuffer(b"".join(parts), dtype), offsets_from_lengths(lengths))
        return SampledWords(starts, words, groups)

    def lengths(
        self, tokens: StoredTokens, column: int, epoch: int, num_groups: int
    ) -> Int64[np.ndarray, " G"]:
        """(G,), the sampled tokens of each group, which are those of `__call__` without limits.

        Words are compared by 64-bit hashes, so that Python reads each distinct one once.
        """
        ids = np.ascontiguousarray(tokens.ids)
        starts = self._word_starts(tokens)
        if not len(starts):
            return np.zeros(num_groups, np.int64)
        numbers = self._numbers(tokens, starts, column, epoch)
        ends = np.append(starts[1:], len(ids))
        places = np.arange(len(ids)) - np.repeat(starts, ends - starts)
        mixed = _mix(_mix(ids.astype(np.uint64)) + places.astype(np.uint64))
        hashes = _mix(np.add.reduceat(mixed, starts)) + numbers.astype(np.uint64)
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        content, dtype, size = ids.tobytes(), ids.dtype.str, ids.itemsize
        columns = (values[firsts].tolist() for values in (numbers, starts, ends))
        distinct = [
            len(self._sample(epoch, number, content[a * size : b * size], dtype)) // size
            for number, a, b in zip(*columns, strict=True)
        ]
        sums = np.bincount(tokens.groups[starts], np.array(distinct)[inverse], num_groups)
        return np.asarray(sums.astype(np.int64))

    def _numbers(
        self, tokens: StoredTokens, starts: Int64[np.ndarray, " W"], column: int, epoch: int
    ) -> Int64[np.ndarray, " W"]:
        """(W,), the number of the split of each word."""
        chosen = uniform_hash(self._seed, epoch, column, tokens.rows[starts], tokens.places[starts])
        return np.asarray((chosen % np.uint64(_MAX_SPLITS)).astype(np.int64))

    def _word_starts(self, tokens: StoredTokens) -> Int64[np.ndarray, " W"]:
        """(W,), the index of the first token of each word."""
        ids = tokens.ids
        is_start = self._begins[ids]
        is_start[:1] = True
        is_start[1:] |= self._special[ids[:-1]]
        is_start[1:] |= tokens.groups[1:] != tokens.groups[:-1]
        is_start[1:] |= tokens.places[1:] != tokens.places[:-1] + 1  # another row
        return np.flatnonzero(is_start)


def tokens_of(stored: Sequences, rows: NDArray[np.integer]) -> StoredTokens:
    """The stored tokens of some rows, one group each."""
    taken = stored.take(rows)
    groups = np.repeat(np.arange(len(rows)), taken.lengths)
    places = np.arange(len(taken.ids)) - taken.offsets[groups]
    return StoredTokens(taken.ids, rows.astype(np.int64)[groups], places, groups)


def uniform_hash(
    seed: int,
    epoch: int,
    column: int,
    rows: Int64[np.ndarray, " W"],
    places: Int64[np.ndarray, " W"],
) -> UInt64[np.ndarray, " W"]:
    """Uniform 64-bit numbers, by the mixing function of SplitMix64 (Steele et al. 2014)."""
    base = np.random.SeedSequence([seed, epoch, column]).generate_state(1, np.uint64)
    return _mix(_mix(base + rows.astype(np.uint64)) + places.astype(np.uint64))


def _mix(values: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
