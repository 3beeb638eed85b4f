"""Training pairs with noise in their texts (`training.noise`), added when rows are taken."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64
from numpy.typing import NDArray

from heedful.config.training import TextNoise
from heedful.data.columns import Columns, Sequences, offsets_from_lengths, rows_of
from heedful.data.tokenizer import Tokenizer
from heedful.data.word_sampling import uniform_hash
from heedful.errors import UserError
from heedful.tasks.text_noise import title_case, upper_case, with_typos, without_stops

SIDES = ("src", "tgt")
Languages = tuple[str | None, str | None]
Pair = tuple[list[int], list[int]]
_PART = 1 << 14  # rows whose lengths are computed at once
_CASE, _STOP, _TYPOS = range(1 << 16, (1 << 16) + 3)  # of `uniform_hash`, beside those of columns


class RowNoise:
    """Noise of a run: the choice of its rows, and their ids with noise.

    It is determined by seed, epoch and row. A row keeps its ids where a text with noise would be
    longer than the limits, or has a character without a token.

    Args:
        languages: of source and target, by corpus; "" is that of rows without one.
        max_length: of a side; None: no limit.
        max_tokens: of both sides together.

    Raises:
        UserError: capitals for a tokenizer that has none.
    """

    def __init__(
        self,
        settings: TextNoise,
        tokenizers: Mapping[str, Tokenizer],
        languages: Mapping[str, Languages],
        *,
        seed: int,
        max_length: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._settings, self._seed, self._languages = settings, seed, languages
        self._tokenizers = [tokenizers[side] for side in SIDES]
        self._max_length, self._max_tokens = max_length, max_tokens
        if settings.upper + settings.title and any(t.lowercases for t in self._tokenizers):
            raise UserError(
                "training.noise: upper and title have no effect with tokenizer.lowercase; leave "
                "them out"
            )

    def epoch(self, epoch: int, columns: Columns) -> Columns:
        """The rows of an epoch, given as they are without noise."""
        rows = _NoisyRows(self, epoch, columns)
        noisy = {side: NoisySequences(rows, number) for number, side in enumerate(SIDES)}
        return Columns({**columns.columns, **noisy}, columns.report, columns.info)

    def draws(self, epoch: int, rows: NDArray[np.integer[Any]]) -> "_Draws":
        """For each kind of noise the rows that have it."""
        numbers = [
            uniform_hash(self._seed, epoch, kind, rows, np.zeros(len(rows), np.int64))
            for kind in (_CASE, _STOP, _TYPOS)
        ]
        case, stop, typos = ((values >> np.uint64(11)) / 2.0**53 for values in numbers)
        settings = self._settings
        return _Draws(
            case < settings.upper,
            (case >= settings.upper) & (case < settings.upper + settings.title),
            stop < settings.no_stop,
            typos < settings.typos,
            numbers[2],
        )

    def noisy(
        self, epoch: int, columns: Columns, rows: NDArray[np.integer[Any]]
    ) -> dict[int, Pair]:
        """The ids of those of some rows that have noise, by their index in `rows`."""
        draws = self.draws(epoch, rows)
        chosen = np.flatnonzero(draws.upper | draws.title | draws.no_stop | draws.typos)
        if not len(chosen):
            return {}
        stored = [columns.sequences(side).take(rows[chosen]) for side in SIDES]
        split = [
            [_split(ids[n].tolist(), tokenizer) for n in range(len(chosen))]
            for ids, tokenizer in zip(stored, self._tokenizers, strict=True)
        ]
        texts = [
            tokenizer.decode_batch([ids for _, ids, _ in parts])
            for parts, tokenizer in zip(split, self._tokenizers, strict=True)
        ]
        languages = self._languages_of(columns, rows[chosen])
        changed = [
            self._changed(src, tgt, draws, index, tags)
            for src, tgt, index, tags in zip(*texts, chosen.tolist(), languages, strict=True)
        ]
        new = [
            tokenizer.encode_batch([pair[side] for pair in changed])
            for side, tokenizer in enumerate(self._tokenizers)
        ]
        noisy: dict[int, Pair] = {}
        for n, index in enumerate(chosen.tolist()):
            parts = split[0][n], split[1][n]
            sides = [
                [*head, *ids[n], *tail] for ids, (head, _, tail) in zip(new, parts, strict=True)
            ]
            is_changed = changed[n] != (texts[0][n], texts[1][n])
            if is_changed and self._fits(sides, [ids for _, ids, _ in parts]):
                noisy[index] = sides[0], sides[1]
        return noisy

    def _changed(
        self, src: str, tgt: str, draws: "_Draws", index: int, languages: Languages
    ) -> tuple[str, str]:
        """A pair with the noise that was drawn for it."""
        if draws.no_stop[index]:
            src, tgt = without_stops(src, tgt)
        if draws.typos[index]:
            src = with_typos(src, random.Random(int(draws.seeds[index])))
        if draws.upper[index]:
            return upper_case(src, languages[0]), upper_case(tgt, languages[1])
        if draws.title[index]:
            return title_case(src, languages[0]), title_case(tgt, languages[1])
        return src, tgt

    def _fits(self, sides: Sequence[list[int]], texts: Sequence[list[int]]) -> bool:
        """True for a pair of ids within the limits whose characters all have tokens.

        Args:
            texts: its ids before, without special tokens at the ends; one inside has no text.
        """
        for ids, text, tokenizer in zip(sides, texts, self._tokenizers, strict=True):
            if tokenizer.unk_id in ids or not tokenizer.special_ids.isdisjoint(text):
                return False
            if self._max_length is not None and len(ids) > self._max_length:
                return False
        return self._max_tokens is None or sum(map(len, sides)) <= self._max_tokens

    def _languages_of(self, columns: Columns, rows: NDArray[np.integer[Any]]) -> list[Languages]:
        """The languages of some rows."""
        corpora = columns.corpora
        if not corpora:
            return [self._languages[""]] * len(rows)
        ends = np.array([corpus.end for corpus in corpora])
        numbers = np.searchsorted(ends, rows_of(rows), side="right")
        return [self._languages[corpora[number].name] for number in numbers.tolist()]


class _Draws(NamedTuple):
    """For each row, whether it has a noise.

    Attributes:
        seeds: of the typing errors.
    """

    upper: NDArray[np.bool_]
    title: NDArray[np.bool_]
    no_stop: NDArray[np.bool_]
    typos: NDArray[np.bool_]
    seeds: UInt64[np.ndarray, " n"]


class _NoisyRows:
    """The rows of an epoch; the noise of the last rows that were asked for is kept."""

    def __init__(self, noise: RowNoise, epoch: int, columns: Columns) -> None:
        self.noise, self.epoch, self.columns = noise, epoch, columns
        self._last: tuple[bytes, dict[int, Pair]] | None = None
        self._last_lengths: tuple[bytes, list[Int64[np.ndarray, " n"]]] | None = None

    def noisy(self, rows: NDArray[np.integer[Any]]) -> dict[int, Pair]:
        """See `RowNoise.noisy`."""
        key = np.asarray(rows, np.int64).tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self.noise.noisy(self.epoch, self.columns, rows)
        return self._last[1]

    def lengths(self, rows: NDArray[np.integer[Any]]) -> list[Int64[np.ndarray, " n"]]:
        """The lengths of some rows on both sides."""
        key = np.asarray(rows, np.int64).tobytes()
        if self._last_lengths is None or self._last_lengths[0] != key:
            lengths = [self.columns.sequences(side).lengths_of(rows).copy() for side in SIDES]
            for first in range(0, len(rows), _PART):
                part = self.noise.noisy(self.epoch, self.columns, rows[first : first + _PART])
                for index, pair in part.items():
                    for of_side, ids in zip(lengths, pair, strict=True):
                        of_side[first + index] = len(ids)
            self._last_lengths = key, lengths
        return self._last_lengths[1]


class NoisySequences(Sequences):
    """The sequences of a side in an epoch; `ids` and `offsets` are the stored ones."""

    def __init__(self, rows: _NoisyRows, number: int) -> None:
        self._rows, self._number = rows, number
        self._plain = rows.columns.sequences(SIDES[number])
        super().__init__(self._plain.ids, self._plain.offsets)

    def __getitem__(self, index: int) -> NDArray[np.integer[Any]]:
        return self.take(np.array([index])).ids

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """(N,), the length of each sequence with its noise."""
        return self.lengths_of(slice(None))

    def lengths_of(self, rows: NDArray[np.integer[Any]] | slice) -> Int64[np.ndarray, " n"]:
        """The lengths of some sequences with their noise."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        return self._rows.lengths(rows)[self._number]

    def take(self, indices: NDArray[np.integer[Any]]) -> Sequences:
        """The sequences at `indices` with their noise, in that order."""
        plain, noisy = self._plain.take(indices), self._rows.noisy(indices)
        if not noisy:
            return plain
        parts = [
            np.array(noisy[n][self._number], plain.ids.dtype) if n in noisy else plain[n]
            for n in range(len(plain))
        ]
        lengths = np.array([len(part) for part in parts], np.int64)
        return Sequences(np.concatenate(parts), offsets_from_lengths(lengths))


def _split(ids: list[int], tokenizer: Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Special tokens at the start (a language tag), the text, and those at the end (EOS)."""
    special = tokenizer.special_ids
    start, stop = 0, len(ids)
    while start < stop and ids[start] in special and ids[start] != tokenizer.unk_id:
        start += 1
    while stop > start and ids[stop - 1] in special and ids[stop - 1] != tokenizer.unk_id:
        stop -= 1
    return ids[:start], ids[start:stop], ids[stop:]
