"""Training rows with random subword splits, which are sampled when rows are taken for a batch."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from heedful.data.columns import Columns, Sequences, offsets_from_lengths
from heedful.data.tokenizer import Tokenizer
from heedful.data.word_sampling import SampledWords, StoredTokens, WordSampler, tokens_of

_MEASURED_ROWS = 1 << 14  # whose lengths are computed at once


class RowLengths(NamedTuple):
    """Lengths of n rows in an epoch.

    Attributes:
        fits: (n,), True for rows whose samples are within the limits; the others keep their ids.
        by_column: (n,), the length of each row by column.
    """

    fits: Bool[np.ndarray, " n"]
    by_column: dict[str, Int64[np.ndarray, " n"]]


class SubwordSampler:
    """Training rows by epoch with other splits of their words; determined by seed and epoch.

    No epoch is in memory: rows are sampled when they are taken, and their lengths when they are
    asked for. Special tokens are unchanged.

    Args:
        tokenizers: the tokenizer of each column of sequences to resample.
        strength: as in `make_splitter`.
        max_length: rows in which a column would get longer keep their stored ids in all columns.
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
        nothing = RowLengths(np.zeros(0, bool), {})
        self._last: tuple[int, NDArray[np.integer], RowLengths] = (-1, np.zeros(0, int), nothing)

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

    def lengths(self, epoch: int, rows: NDArray[np.integer]) -> RowLengths:
        """The lengths of some rows; the last result is kept for the other columns of the rows."""
        last_epoch, last_rows, result = self._last
        if epoch == last_epoch and np.array_equal(rows, last_rows):
            return result
        parts = [
            self._lengths_of_part(epoch, rows[first : first + _MEASURED_ROWS])
            for first in range(0, max(1, len(rows)), _MEASURED_ROWS)
        ]
        fits = np.concatenate([part.fits for part in parts])
        result = RowLengths(
            fits,
            {n: np.concatenate([part.by_column[n] for part in parts]) for n in self._samplers},
        )
        self._last = epoch, rows, result
        return result

    def _lengths_of_part(self, epoch: int, rows: NDArray[np.integer]) -> RowLengths:
        """`lengths` of few rows."""
        stored, sampled = {}, {}
        for name, sampler in self._samplers.items():
            sequences, number = self.columns.sequences(name), self._numbers[name]
            stored[name] = sequences.lengths_of(rows)
            sampled[name] = sampler.lengths(tokens_of(sequences, rows), number, epoch, len(rows))
        lengths, fits = np.stack([*sampled.values()]), np.ones(len(rows), bool)
        if self._max_length is not None:
            fits &= lengths.max(axis=0) <= self._max_length
        if self._max_tokens is not None:
            fits &= lengths.sum(axis=0) <= self._max_tokens
        kept = {name: np.where(fits, sampled[name], stored[name]) for name in sampled}
        return RowLengths(fits, kept)


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
        """(N,), the length of each sampled sequence."""
        return self.lengths_of(slice(None))

    def lengths_of(self, rows: NDArray[np.integer] | slice) -> Int64[np.ndarray, " n"]:
        """The lengths of some sampled sequences."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        return self._sampler.lengths(self._epoch, rows).by_column[self._name]

    def take(self, indices: NDArray[np.integer]) -> Sequences:
        """The sampled sequences at `indices`, in that order."""
        _, sampled = self._sample(indices)
        lengths = sampled.lengths(len(indices))
        return Sequences(sampled.words.ids, offsets_from_lengths(lengths))

    def joined(self, borders: NDArray[np.integer]) -> Sequences:
        """See `Sequences.joined`: the texts of a row are sampled when it is taken."""
        return _JoinedSamples(self, borders)

    def moved(
        self, indices: NDArray[np.integer], places: Int64[np.ndarray, " B"]
    ) -> Int64[np.ndarray, " B"]:
        """(B,), the sampled place of the word that begins at a stored place of each row."""
        offsets, sampled = self._sample(indices)
        words = np.searchsorted(sampled.starts, offsets[:-1] + places)
        begins = offsets_from_lengths(sampled.lengths(len(indices)))[:-1]
        return np.asarray(sampled.words.offsets[words] - begins)

    def _sample(
        self, indices: NDArray[np.integer]
    ) -> tuple[Int64[np.ndarray, " B1"], SampledWords]:
        """The offsets of the stored rows at `indices`, and their samples; the last are kept."""
        key = np.asarray(indices, np.int64).tobytes()
        if self._last is None or self._last[0] != key:
            tokens = tokens_of(self.stored, indices)
            offsets = offsets_from_lengths(self.stored.lengths_of(indices))
            fits = self._sampler.lengths(self._epoch, indices).fits
            limits = np.where(fits, np.inf, -1)  # rows that do not fit keep their stored ids
            sampled = self._sampler.sample(self._name, self._epoch, tokens, limits)
            self._last = key, offsets, sampled
        return self._last[1], self._last[2]


class _JoinedSamples(Sequences):
    """Consecutive sampled texts as one row each; `offsets` are those of the sampled tokens."""

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
