"""Rows that an epoch reads of each corpus: whole passes and a part of one, by weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from heedful.data.columns import COPY, CorpusRange
from heedful.data.plans import BLOCK_ROWS
from heedful.errors import UserError


@dataclass(frozen=True)
class CorpusShare:
    """A corpus and the passes over its rows in an epoch.

    Attributes:
        passes: (first epoch, passes in each epoch from it on), ascending, the first epoch is 0.
    """

    corpus: CorpusRange
    passes: Sequence[tuple[int, Fraction]]

    def passes_in(self, epoch: int) -> Fraction:
        """The passes in an epoch."""
        return [passes for first, passes in self.passes if first <= epoch][-1]

    def passes_before(self, epoch: int) -> Fraction:
        """The passes in all epochs before `epoch`."""
        total = Fraction(0)
        ends = [first for first, _ in self.passes[1:]] + [epoch]
        for (first, passes), end in zip(self.passes, ends, strict=True):
            total += passes * max(0, min(end, epoch) - min(first, epoch))
        return total


class EpochDraw:
    """The indices of the rows that an epoch reads, with one for each copy of a row (`COPY`).

    The rows of a corpus are read in passes; a pass has each row once. Epoch e reads passes W(e) to
    W(e + 1), where W(e) is the sum of its weights in all epochs before e: whole passes are all
    rows, and a part of a pass is a part of a permutation, which the next epochs continue. So each
    row of a corpus is read ⌊W⌋ or ⌈W⌉ times after W passes, whatever the weights. With one corpus
    of weight 1 these are all rows in their order.

    The permutation of pass p of corpus c is determined by (seed, c, p). It takes turns between
    blocks of at most `BLOCK_ROWS` consecutive rows, each of which has a permutation of its own: the
    rows of a part of a pass are computed block by block, and none are in memory.

    Raises:
        UserError: an epoch without rows.
    """

    def __init__(self, shares: Sequence[CorpusShare], *, seed: int, epoch: int) -> None:
        self._segments: list[_Passes | _BlockSegment] = []
        for number, share in enumerate(shares):
            size = share.corpus.size
            first, last = (int(share.passes_before(e) * size) for e in (epoch, epoch + 1))
            first_pass = first // size  # has copy 0 of its rows
            first_whole, end_whole = -(-first // size), last // size
            head_end = min(first_whole * size, last)
            key = (seed, number)
            self._segments += _segments_of_pass(share.corpus, first, head_end, key, first_pass)
            if first_whole < end_whole:
                passes = range(first_whole - first_pass, end_whole - first_pass)
                self._segments.append(_Passes(share.corpus.start, size, passes))
            tail_start = max(head_end, end_whole * size)
            self._segments += _segments_of_pass(share.corpus, tail_start, last, key, first_pass)
        self._ends = np.cumsum([len(segment) for segment in self._segments], dtype=np.int64)
        if not len(self):
            raise UserError(
                f"epoch {epoch} reads no row, by the weights of data.corpora; raise them"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, start: int, end: int) -> Int64[np.ndarray, " n"]:
        """The indices of the rows at the positions from `start` up to `end` of the epoch."""
        rows = [np.zeros(0, np.int64)]
        first_segment = int(np.searchsorted(self._ends, start, side="right"))
        for index in range(first_segment, len(self._segments)):
            segment, segment_end = self._segments[index], int(self._ends[index])
            segment_start = segment_end - len(segment)
            if segment_start >= end:
                break
            first, last = max(start - segment_start, 0), min(end, segment_end) - segment_start
            rows.append(segment.rows(first, last))
        return np.concatenate(rows)


@dataclass(frozen=True)
class _Passes:
    """Whole passes over the rows from `start` on, in their order; `copies`: that of each pass."""

    start: int
    size: int
    copies: range

    def __len__(self) -> int:
        return self.size * len(self.copies)

    def rows(self, start: int, end: int) -> Int64[np.ndarray, " n"]:
        """The indices of the rows at the positions from `start` up to `end`."""
        passes, rows = np.divmod(np.arange(start, end), self.size)
        return self.start + rows + (self.copies.start + passes) * COPY


@dataclass(frozen=True)
class _BlockSegment:
    """A part of a permutation of a block of rows, in the order of the rows.

    Attributes:
        start, size: the first row of the block, and its number of rows.
        begin, end: positions in the permutation.
        seed, key: determine the permutation.
        copy: that of all of these rows.
    """

    start: int
    size: int
    begin: int
    end: int
    seed: int
    key: tuple[int, ...]
    copy: int

    def __len__(self) -> int:
        return self.end - self.begin

    def rows(self, start: int, end: int) -> Int64[np.ndarray, " n"]:
        """The indices of the rows at the positions from `start` up to `end`."""
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=self.key))
        permuted = rng.permutation(self.size)[self.begin : self.end]
        return self.start + np.sort(permuted)[start:end] + self.copy * COPY


def _segments_of_pass(
    corpus: CorpusRange, begin: int, end: int, key: tuple[int, int], first_pass: int
) -> Iterator[_BlockSegment]:
    """A part of one pass, from row `begin` up to row `end` of all passes, by blocks.

    Position j of the pass belongs to block j mod b of the b blocks, whose sizes differ by at most
    one; so a block has ⌈(j - block) / b⌉ of the first j positions.

    Args:
        key: the seed, and the number of the corpus.
        first_pass: the number of the pass that has copy 0 of its rows.
    """
    number_of_pass = begin // corpus.size
    first, last = begin - number_of_pass * corpus.size, end - number_of_pass * corpus.size
    seed, number = key
    num_blocks = -(-corpus.size // BLOCK_ROWS)
    start = corpus.start
    for block in range(num_blocks):
        size, own_first, own_last = (
            max(0, -(-(position - block) // num_blocks)) for position in (corpus.size, first, last)
        )
        if own_first < own_last:
            spawn_key = (number, number_of_pass, *([block] if block else []))
            copy = number_of_pass - first_pass
            yield _BlockSegment(start, size, own_first, own_last, seed, spawn_key, copy)
        start += size
