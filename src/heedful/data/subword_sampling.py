"""Training rows with random subword splits, which are sampled when rows are taken for a batch."""

import random
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64
from numpy.typing import NDArray

from heedful.data.columns import Columns, Sequences, offsets_from_lengths
from heedful.data.subwords import make_splitter
from heedful.data.tokenizer import Tokenizer

# Samples per distinct word and epoch. Further occurrences of a word reuse them, so that the cost of
# an epoch depends on the number of distinct words.
_MAX_SPLITS = 16
_CACHED_SPLITS = 1 << 17  # of a tokenizer, about 40 MB
# By which the growth of lengths is measured: spans of some tokens, sampled in some epochs.
_PROBED_SPANS, _PROBED_TOKENS, _PROBED_EPOCHS = 500, 64, 4
_DEVIATIONS = 3.0  # between the expected length and the planned one


class StoredTokens(NamedTuple):
    """M stored tokens of G groups: rows, or windows.

    Attributes:
        ids: (M,).
        rows, places: (M,), the row of each token and its index in the row.
        groups: (M,), the number of its group, ascending.
        is_fixed: (M,), True for tokens that are not split; None: all may be.
    """

    ids: NDArray[np.integer]
    rows: Int64[np.ndarray, " M"]
    places: Int64[np.ndarray, " M"]
    groups: Int64[np.ndarray, " M"]
    is_fixed: Bool[np.ndarray, " M"] | None = None


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
        starts, is_fixed = self._word_starts(tokens)
        chosen = _hash(self._seed, epoch, column, tokens.rows[starts], tokens.places[starts])
        numbers = (chosen % np.uint64(_MAX_SPLITS)).astype(np.int64)
        content, dtype, size = ids.tobytes(), ids.dtype.str, ids.itemsize
        borders = [*(starts * size).tolist(), len(content)]
        stored = [content[a:b] for a, b in pairwise(borders)]
        parts = [
            word if fixed else self._sample(epoch, number, word, dtype)
            for word, number, fixed in zip(stored, numbers.tolist(), is_fixed, strict=True)
        ]
        groups = tokens.groups[starts]
        if limits is not None:
            lengths = np.bincount(groups, [len(part) // size for part in parts], len(limits))
            for index in np.flatnonzero((lengths > limits)[groups]).tolist():
                parts[index] = stored[index]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts)) // size
        words = Sequences(np.frombuffer(b"".join(parts), dtype), offsets_from_lengths(lengths))
        return SampledWords(starts, words, groups)

    def _word_starts(self, tokens: StoredTokens) -> tuple[Int64[np.ndarray, " W"], list[bool]]:
        """(W,), the index of the first token of each word, and True for words that are fixed."""
        ids, is_fixed = tokens.ids, tokens.is_fixed
        is_start = self._begins[ids]
        is_start[:1] = True
        is_start[1:] |= self._special[ids[:-1]]
        is_start[1:] |= tokens.groups[1:] != tokens.groups[:-1]
        is_start[1:] |= tokens.places[1:] != tokens.places[:-1] + 1  # another row
        if is_fixed is None:
            starts = np.flatnonzero(is_start)
            return starts, [False] * len(starts)
        is_start |= is_fixed
        is_start[1:] |= is_fixed[:-1]
        starts = np.flatnonzero(is_start)
        return starts, is_fixed[starts].tolist()


class _Growth(NamedTuple):
    """L stored tokens become L · mean tokens, with a standard deviation of spread · √L."""

    mean: float
    spread: float

    def bounds(self, lengths: NDArray[np.integer]) -> Int64[np.ndarray, " n"]:
        """Lengths that few samples exceed; at least the stored lengths."""
        expected = self.mean * lengths + _DEVIATIONS * self.spread * np.sqrt(lengths)
        return np.maximum(lengths, np.ceil(expected - 1e-9).astype(np.int64))


class SubwordSampler:
    """Training rows by epoch with other splits of their words; determined by seed and epoch.

    No epoch is in memory: rows are sampled when they are taken. Batches are planned by lengths that
    few samples exceed, as measured on some rows; a row whose sample is longer keeps its stored
    ids, so that a batch never has more tokens than planned. Special tokens are unchanged.

    Args:
        tokenizers: the tokenizer of each column of sequences to resample.
        strength: as in `make_splitter`.
        max_length: maximum of the planned length of a column, unless the stored row is longer.
        max_tokens: the same for the total length of a row.

    Raises:
        UserError: a tokenizer's kind has only one split for each word.
    """

    def __init__(
        self,
        columns: Columns,
        tokenizers: Mapping[str, Tokenizer],
        strength: float,
        *,
        seed: int,
        max_length: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.columns, self._max_length, self._max_tokens = columns, max_length, max_tokens
        distinct = {id(tokenizer): tokenizer for tokenizer in tokenizers.values()}
        samplers = {key: WordSampler(t, strength, seed) for key, t in distinct.items()}
        self._samplers = {name: samplers[id(t)] for name, t in tokenizers.items()}
        self._numbers = {name: number for number, name in enumerate(self._samplers)}
        self._growth = {name: self._measure_growth(name) for name in self._samplers}

    @property
    def names(self) -> list[str]:
        """The columns that are sampled."""
        return [*self._samplers]

    def epoch(self, epoch: int) -> "SampledColumns":
        """The rows of an epoch."""
        return SampledColumns(self, epoch)

    def sample(
        self, name: str, epoch: int, tokens: StoredTokens, limits: NDArray[np.number] | None = None
    ) -> SampledWords:
        """Sampled splits of tokens of a column, by `WordSampler`."""
        return self._samplers[name](tokens, self._numbers[name], epoch, limits)

    def planned_lengths(
        self, name: str, rows: NDArray[np.integer] | slice
    ) -> Int64[np.ndarray, " n"]:
        """Lengths by which rows are planned, which no sample exceeds."""
        stored = {key: self.columns.sequences(key).lengths_of(rows) for key in self._samplers}
        bounds = self._growth[name].bounds(stored[name])
        if self._max_length is not None:
            bounds = np.minimum(bounds, self._max_length)
        if self._max_tokens is not None:  # what the stored row leaves is divided among the columns
            left = self._max_tokens - np.sum([*stored.values()], axis=0)
            bounds = np.minimum(bounds, stored[name] + left // len(stored))
        return np.maximum(bounds, stored[name])

    def window_size(self, name: str, context: int) -> int:
        """The inputs of windows of stored tokens whose samples mostly fit `context` inputs."""
        bounds = self._growth[name].bounds(np.arange(1, context + 2))
        return max(1, int(np.searchsorted(bounds, context + 1, side="right")) - 1)

    def _measure_growth(self, name: str) -> _Growth:
        """The growth of some spans of tokens in the first epochs."""
        stored = self.columns.sequences(name)
        total = int(stored.offsets[-1])
        begins = np.unique(np.linspace(0, max(total - 1, 0), _PROBED_SPANS).astype(np.int64))
        # Of one type with the offsets, which are mapped: another one would copy them.
        keys = begins.astype(stored.offsets.dtype)
        rows = np.searchsorted(stored.offsets, keys, side="right") - 1
        ends = np.minimum(stored.offsets[rows + 1].astype(np.int64), begins + _PROBED_TOKENS)
        lengths = ends - begins
        groups = np.repeat(np.arange(len(begins)), lengths)
        indices = begins[groups] + np.arange(len(groups)) - (np.cumsum(lengths) - lengths)[groups]
        token_rows = rows[groups]
        places = indices - stored.offsets[token_rows].astype(np.int64)
        tokens = StoredTokens(stored.ids[indices], token_rows, places, groups)
        sampled = np.stack(
            [self.sample(name, e, tokens).lengths(len(lengths)) for e in range(_PROBED_EPOCHS)]
        )
        mean = float(sampled.mean(axis=0).sum() / max(1, lengths.sum()))
        spread = float(np.sqrt(np.mean((sampled - mean * lengths) ** 2 / np.maximum(lengths, 1))))
        return _Growth(mean, spread)


class SampledSequences(Sequences):
    """The sequences of a column in an epoch; `ids` and `offsets` are the stored ones.

    Attributes:
        stored: the sequences without sampling.
    """

    def __init__(self, sampler: SubwordSampler, name: str, epoch: int) -> None:
        self.stored = sampler.columns.sequences(name)
        super().__init__(self.stored.ids, self.stored.offsets)
        self._sampler, self._name, self._epoch = sampler, name, epoch
        self._last: tuple[bytes, Int64[np.ndarray, " B"], SampledWords] | None = None

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        return self.take(np.array([index])).ids

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """(N,), the planned lengths."""
        return self.lengths_of(slice(None))

    def lengths_of(self, rows: NDArray[np.integer] | slice) -> Int64[np.ndarray, " n"]:
        """The planned lengths of some rows, which no sample exceeds."""
        return self._sampler.planned_lengths(self._name, rows)

    def take(self, indices: NDArray[np.integer]) -> Sequences:
        """The sampled sequences at `indices`, in that order."""
        _, sampled = self._sample(indices)
        lengths = sampled.lengths(len(indices))
        return Sequences(sampled.words.ids, offsets_from_lengths(lengths))

    def joined(self, borders: NDArray[np.integer]) -> Sequences:
        """See `Sequences.joined`: rows by planned lengths, whose texts are sampled when taken."""
        return _JoinedSamples(self, borders)

    def moved(
        self, indices: NDArray[np.integer], places: Int64[np.ndarray, " B"]
    ) -> Int64[np.ndarray, " B"]:
        """(B,), the sampled place of the word that begins at a stored place of each row."""
        offsets, sampled = self._sample(indices)
        words = np.searchsorted(sampled.starts, offsets[:-1] + places)
        begins = offsets_from_lengths(sampled.lengths(len(indices)))[:-1]
        return np.asarray(sampled.words.offsets[words] - begins)

    def window_size(self, context: int) -> int:
        """The inputs of planned windows of stored tokens, for windows of `context` inputs."""
        return self._sampler.window_size(self._name, context)

    def sample_windows(
        self,
        ids: Integer[np.ndarray, "B T"],
        texts: Int64[np.ndarray, "B T"],
        places: Int64[np.ndarray, "B T"],
        inside: Bool[np.ndarray, "B T"],
        *,
        rows: Int64[np.ndarray, " N"],
        context: int,
    ) -> tuple[Int64[np.ndarray, "B W"], Int64[np.ndarray, "B W"], Bool[np.ndarray, "B W"]]:
        """Windows of stored tokens with other splits, padded on the right.

        The first and the last token of a window, which it shares with others, are not split. A
        window whose sample has more than `context` inputs keeps its stored tokens.

        Args:
            texts, places: the number of each token's text in the stream, and its index in the text.
            inside: True for tokens, False for padding.
            rows: the row of each text of the stream.

        Returns:
            Token ids, the numbers of their texts, and True for tokens, False for padding.
        """
        num_windows = len(ids)
        is_fixed = np.zeros_like(inside)
        is_fixed[:, 0] = True
        is_fixed[np.arange(num_windows), inside.sum(axis=1) - 1] = True
        groups = np.nonzero(inside)[0]
        tokens = StoredTokens(
            ids[inside].astype(self.stored.ids.dtype),
            rows[texts[inside]],
            places[inside],
            groups,
            is_fixed[inside],
        )
        limits = np.full(num_windows, context + 1)
        sampled = self._sampler.sample(self._name, self._epoch, tokens, limits)
        lengths = sampled.lengths(num_windows)
        is_token = np.arange(lengths.max()) < lengths[:, None]
        padded = np.zeros(is_token.shape, np.int64)
        padded[is_token] = sampled.words.ids
        text_of = np.repeat(texts[:, :1], is_token.shape[1], axis=1)
        text_of[is_token] = np.repeat(texts[inside][sampled.starts], sampled.words.lengths)
        return padded, text_of, is_token

    def _sample(
        self, indices: NDArray[np.integer]
    ) -> tuple[Int64[np.ndarray, " B1"], SampledWords]:
        """The offsets of the stored rows at `indices`, and their samples; the last are kept."""
        key = np.asarray(indices, np.int64).tobytes()
        if self._last is None or self._last[0] != key:
            rows = self.stored.take(indices)
            offsets = rows.offsets.astype(np.int64)
            groups = np.repeat(np.arange(len(indices)), rows.lengths)
            places = np.arange(len(rows.ids)) - offsets[:-1][groups]
            tokens = StoredTokens(rows.ids, indices.astype(np.int64)[groups], places, groups)
            limits = self.lengths_of(indices)
            sampled = self._sampler.sample(self._name, self._epoch, tokens, limits)
            self._last = key, offsets, sampled
        return self._last[1], self._last[2]


class _JoinedSamples(Sequences):
    """Consecutive sampled texts as one row each; `offsets` are by their planned lengths."""

    def __init__(self, texts: SampledSequences, borders: NDArray[np.integer]) -> None:
        super().__init__(texts.ids, offsets_from_lengths(texts.lengths)[borders])
        self._texts, self._borders = texts, borders

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        return self.take(np.array([index])).ids

    def take(self, indices: NDArray[np.integer]) -> Sequences:
        """The sampled rows at `indices`, in that order."""
        firsts, counts = self._borders[indices], np.diff(self._borders)[indices]
        borders = offsets_from_lengths(counts)
        texts = np.repeat(firsts - borders[:-1], counts) + np.arange(borders[-1])
        sampled = self._texts.take(texts)
        return Sequences(sampled.ids, sampled.offsets[borders])


class SampledColumns(Columns):
    """The columns of an epoch, by `SubwordSampler`."""

    def __init__(self, sampler: SubwordSampler, epoch: int) -> None:
        stored = sampler.columns
        sampled = {name: SampledSequences(sampler, name, epoch) for name in sampler.names}
        super().__init__({**stored.columns, **sampled}, stored.report, stored.info)

    def numbers_of(self, name: str, rows: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        """(B,), numbers of some rows; the place of a second text is that in the sample."""
        numbers, column = super().numbers_of(name, rows), name.removesuffix(".second")
        sequences = self.columns.get(column) if column != name else None
        return (
            sequences.moved(rows, numbers) if isinstance(sequences, SampledSequences) else numbers
        )


def _hash(
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
