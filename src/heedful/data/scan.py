"""The first pass over training rows: check, filter and count them, and sample texts."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import compress, groupby, islice
from math import inf
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64

from heedful.data.filters import Filter, Unique, apply_filters, keep_unique
from heedful.data.labels import ProblemType, count_labels
from heedful.data.reports import DataReport, FilterCount, FilterReport
from heedful.data.rows import (
    CORPUS,
    LABEL,
    Chunk,
    ReadCounter,
    Rows,
    RowSource,
    TextUnit,
    hash_cells,
)
from heedful.data.splits import Split, Tail, source_columns, split_tail
from heedful.data.text_files import BlockPlace
from heedful.data.workers import map_in_order
from heedful.progress import track

_BATCH = 8  # chunks that are sent to a worker at once: to scan one takes about a millisecond
_MB = 1_000_000
_CHUNKS_A_WORKER = 8  # that hold out rows; fewer are parsed sooner than a process starts
SAMPLE_CHARACTERS = 1 << 28  # of the texts that a tokenizer is trained on
_SLACK = 1.25  # a sample is cut to its size when it is larger by this factor


@dataclass(frozen=True)
class SampledRows:
    """Rows of a chunk that may belong to the sample, in their order.

    Attributes:
        keys: (n,), random numbers by which rows are sampled.
        sizes: (n,), in characters.
        indices: (n,), of the rows among those of the chunk that filters keep.
    """

    keys: Float64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    indices: Int64[np.ndarray, " n"]
    rows: Rows

    def select(self, is_chosen: Bool[np.ndarray, " n"]) -> "SampledRows":
        """The rows at which `is_chosen` is True."""
        if is_chosen.all():
            return self
        rows = self.rows.select(np.flatnonzero(is_chosen))
        return SampledRows(
            self.keys[is_chosen], self.sizes[is_chosen], self.indices[is_chosen], rows
        )

    def filtered(self, is_kept: Bool[np.ndarray, " N"]) -> "SampledRows":
        """The rows after further filters, which keep the rows of the chunk where it is True."""
        left = self.select(is_kept[self.indices])
        return replace(left, indices=np.searchsorted(np.flatnonzero(is_kept), left.indices))


class RowSample:
    """The rows with the smallest keys so far, within two limits.

    Args:
        size: the maximum number of rows; `SAMPLE_CHARACTERS` is the other limit. None: all rows.

    Attributes:
        threshold: all rows of the sample have smaller keys.
    """

    def __init__(self, size: int | None) -> None:
        self.threshold = 0.0 if size == 0 else 1.0
        self._most_rows = inf if size is None else size
        self._most_characters = inf if size is None else SAMPLE_CHARACTERS
        self._chunks: list[SampledRows] = []
        self._num_rows = self._num_characters = 0

    def add(self, rows: SampledRows) -> None:
        """Add the rows of the next chunk."""
        self._chunks.append(rows)
        self._num_rows += len(rows.keys)
        self._num_characters += int(rows.sizes.sum())
        if (
            self._num_rows > _SLACK * self._most_rows
            or self._num_characters > _SLACK * self._most_characters
        ):
            self._cut()

    def rows(self, starts: Sequence[int]) -> tuple[Rows, Int64[np.ndarray, " S"]]:
        """The sample, in the order of the rows, and the indices of its rows among all.

        Args:
            starts: the index of the first row of each chunk.
        """
        self._cut()
        pairs = zip(starts, self._chunks, strict=False)
        indices = np.concatenate([start + chunk.indices for start, chunk in pairs])
        return Rows.concatenate([chunk.rows for chunk in self._chunks]), indices

    def _cut(self) -> None:
        """Keep the rows with the smallest keys, at least one unless the size is 0."""
        keys = np.concatenate([chunk.keys for chunk in self._chunks])
        sizes = np.concatenate([chunk.sizes for chunk in self._chunks])
        order = np.argsort(keys, kind="stable")
        num_fitting = np.searchsorted(np.cumsum(sizes[order]), self._most_characters, side="right")
        num_kept = int(min(self._most_rows, max(1, int(num_fitting))))
        if num_kept < len(order):
            # The threshold never rises: rows of earlier chunks with larger keys were not kept.
            self.threshold = min(self.threshold, float(keys[order[num_kept]]))
        self._chunks = [chunk.select(chunk.keys < self.threshold) for chunk in self._chunks]
        self._num_rows = sum(len(chunk.keys) for chunk in self._chunks)
        self._num_characters = sum(int(chunk.sizes.sum()) for chunk in self._chunks)


class ChunkFacts(NamedTuple):
    """Facts about a chunk of which a first pass has kept some rows.

    Attributes:
        first: the index of the first of these rows among all that are kept.
        num_characters: of their texts.
        corpus: its name; "" without corpora.
        kept, file_index, place: of the `Chunk`.
    """

    first: int
    num_rows: int
    num_characters: int
    corpus: str
    kept: str | None
    file_index: int
    place: BlockPlace | None


@dataclass(frozen=True)
class Scan:
    """Facts about the rows of a `RowSource`; rows that filters drop have no counts and no indices.

    Attributes:
        reports: of the rows that were read, by corpus ("" without corpora).
        filters: the rows that filters dropped.
        labels: the rows of each label (`count_labels`), before filters of class `Unique`.
        sample: rows chosen at random, in their order, or all rows, with their report.
        sample_indices: the index of each row of `sample` among all rows.
        source_hashes: (N,), of each row the hash of its `source_columns`; None: not asked for.
    """

    reports: dict[str, DataReport]
    filters: FilterReport
    chunks: list[ChunkFacts]
    labels: Counter[str]
    sample: Rows
    sample_indices: Int64[np.ndarray, " S"]
    source_hashes: UInt64[np.ndarray, " N"] | None = None

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def noun(self) -> str:
        """The word for a row in messages."""
        return next(iter(self.reports.values())).noun


def scan_rows(
    source: RowSource,
    filters: Sequence[Filter] = (),
    sample_size: int | None = None,
    num_workers: int = 1,
    *,
    with_source_hashes: bool = False,
    problem: ProblemType = "single_label",
) -> Scan:
    """Read all rows once.

    Args:
        filters: those of class `Unique`, which need all rows in order, come last: the workers
            compute hashes, which are compared here. The workers apply the other filters.
        sample_size: maximum number of sampled rows. With `SAMPLE_CHARACTERS` as a second limit the
            rows with the smallest keys are chosen, random numbers of their chunk and index: the
            choice is independent of the number of workers. None: all rows.
        with_source_hashes: compute `Scan.source_hashes`.
        problem: the kind of the labels.

    Raises:
        UserError: wrong rows, files without rows, a filter that drops all rows.
    """
    unique = [filter for filter in filters if isinstance(filter, Unique)]
    by_row = [filter for filter in filters if not isinstance(filter, Unique)]
    assert [*by_row, *unique] == [*filters]
    filtered: FilterReport | None = None  # by row
    repeated = [FilterCount(filter.name, filter.setting) for filter in unique]
    reports: dict[str, DataReport] = {}
    labels, counter, sample = Counter[str](), ReadCounter(), RowSample(sample_size)
    chunks, waiting, num_rows = list[ChunkFacts](), deque[Chunk](), 0
    source_hashes = [np.zeros(0, np.uint64)]
    items = _numbered_chunks(source, waiting, sample)
    scan_chunk = partial(_scan_chunk, by_row, unique, with_source_hashes, problem)
    for found in map_in_order(scan_chunk, items, num_workers, batch=_BATCH):
        chunk = waiting.popleft()
        counter.add(chunk.file_index, found.read, *found.sampled.rows.file_names[:1])
        filtered = found.filters if filtered is None else filtered.plus(found.filters)
        if unique:
            rows_of = partial(_kept_by_row, by_row, chunk)
            is_unique = keep_unique(unique, repeated, found.hashes, rows_of)
            found = found.filtered(is_unique)
        labels.update(found.labels)
        known = reports.get(chunk.corpus)
        reports[chunk.corpus] = found.report if known is None else known.plus(found.report)
        is_kept = np.zeros(found.read.num_kept, bool)
        is_kept[found.indices] = True
        kept = None if is_kept.all() else np.packbits(is_kept).tobytes().hex()
        sizes = len(found.indices), int(found.sizes.sum())
        chunks.append(
            ChunkFacts(num_rows, *sizes, chunk.corpus, kept, chunk.file_index, chunk.place)
        )
        num_rows += len(found.indices)
        sample.add(found.sampled)
        if found.source_hashes is not None:
            source_hashes.append(found.source_hashes)
    counter.check()
    assert filtered is not None, "a row source has at least one chunk"
    report = FilterReport([*filtered.filters, *repeated])
    report.check()
    rows, indices = sample.rows([chunk.first for chunk in chunks])
    if sample_size is None:
        rows.report = reduce(DataReport.plus, reports.values())
    hashes = np.concatenate(source_hashes) if with_source_hashes else None
    return Scan(reports, report, chunks, labels, rows, indices, hashes)


def scanned_chunks(
    source: RowSource, facts: Sequence[ChunkFacts], start: int = 0
) -> Iterator[Chunk]:
    """The chunks of a source from number `start` on, after its first pass."""
    places: dict[int, list[BlockPlace | None]] = {}  # by file index
    for of_chunk in facts:
        places.setdefault(of_chunk.file_index, []).append(of_chunk.place)
    known = {
        index: [place for place in found if place is not None]
        for index, found in places.items()
        if None not in found
    }
    for chunk, of_chunk in islice(zip(source.chunks(known), facts, strict=True), start, None):
        yield replace(chunk, first=of_chunk.first, kept=of_chunk.kept)


def take_held_out(
    source: RowSource, facts: Sequence[ChunkFacts], split: Split, num_workers: int
) -> Rows:
    """The rows that a split holds out, in memory."""
    is_needed = [split.holds_out_some(chunk.first, chunk.first + chunk.num_rows) for chunk in facts]
    needed = compress(scanned_chunks(source, facts), is_needed)
    count = min(num_workers, max(1, sum(is_needed) // _CHUNKS_A_WORKER))
    held_out_of = partial(split.take_from, held_out=True)
    return Rows.concatenate([*map_in_order(held_out_of, needed, count)])


def corpus_tails(
    source: RowSource, facts: Sequence[ChunkFacts], size: int | float, unit: TextUnit
) -> Iterator[Tail]:
    """The last texts of each corpus, by `split_tail`."""
    number = 0  # of the first chunk of the corpus
    for _, group in groupby(facts, key=lambda chunk: chunk.corpus):
        corpus = [*group]

        def lengths_of(index: int, start: int = number) -> list[int]:
            rows = next(scanned_chunks(source, facts, start + index)).parse()
            return [len(text) for text in rows["text"]]

        num_rows = [chunk.num_rows for chunk in corpus]
        num_characters = [chunk.num_characters for chunk in corpus]
        first = corpus[0].first
        yield split_tail(num_rows, num_characters, lengths_of, size, unit, first=first)
        number += len(corpus)


@dataclass(frozen=True)
class _ChunkScan:
    """The results of the first pass over one chunk.

    Attributes:
        read, report: of the rows before and after the filters.
        indices: (N,), of the rows that filters keep, among all rows of the chunk.
        sizes: (N,), of these rows, in characters.
        hashes: (N,), of these rows, for each filter `Unique`.
        source_hashes: (N,), as `Scan.source_hashes`, or None.
    """

    labels: Counter[str]
    read: DataReport
    report: DataReport
    filters: FilterReport
    sampled: SampledRows
    indices: Int64[np.ndarray, " N"]
    sizes: Int64[np.ndarray, " N"]
    hashes: tuple[UInt64[np.ndarray, " N"], ...]
    source_hashes: UInt64[np.ndarray, " N"] | None

    def filtered(self, is_kept: Bool[np.ndarray, " N"]) -> "_ChunkScan":
        """The same after further filters, which keep the rows at which `is_kept` is True."""
        if is_kept.all():
            return self
        indices = self.indices[is_kept]
        num_filtered = self.read.num_kept - len(indices)
        return replace(
            self,
            report=replace(self.report, num_kept=len(indices), num_filtered=num_filtered),
            sampled=self.sampled.filtered(is_kept),
            indices=indices,
            sizes=self.sizes[is_kept],
            hashes=tuple(values[is_kept] for values in self.hashes),
            source_hashes=None if self.source_hashes is None else self.source_hashes[is_kept],
        )


def _scan_chunk(
    filters: Sequence[Filter],
    unique: Sequence[Unique],
    with_source_hashes: bool,
    problem: ProblemType,
    item: tuple[int, Chunk, float],
) -> _ChunkScan:
    """Read and filter a chunk, given with its number and a bound of the keys to be sampled."""
    number, chunk, threshold = item
    read = chunk.parse()
    rows, indices, report = apply_filters(filters, read)
    texts = [cells for name, cells in rows.columns.items() if name not in (LABEL, CORPUS)]
    lengths = [np.fromiter(map(len, cells), np.int64, len(rows)) for cells in texts]
    sizes = np.asarray(np.sum(lengths, axis=0))
    # A spawn key, as trailing zeros of a seed sequence are ignored.
    rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(number,)))
    keys = rng.random(len(read))[indices]
    return _ChunkScan(
        labels=count_labels(rows, problem) if LABEL in rows else Counter(),
        read=read.report,
        report=rows.report,
        filters=report,
        sampled=SampledRows(keys, sizes, np.arange(len(rows)), rows).select(keys < threshold),
        indices=indices,
        sizes=sizes,
        hashes=tuple(filter.hashes(rows) for filter in unique),
        source_hashes=hash_cells(source_columns(rows)) if with_source_hashes else None,
    )


def _kept_by_row(filters: Sequence[Filter], chunk: Chunk) -> Rows:
    """The rows of a chunk that the filters keep."""
    return apply_filters(filters, chunk.parse())[0]


def _numbered_chunks(
    source: RowSource, waiting: deque[Chunk], sample: RowSample
) -> Iterator[tuple[int, Chunk, float]]:
    """The arguments of `_scan_chunk` for all chunks, which also join `waiting`, with progress."""
    done = reported = 0
    total = max(1, source.num_bytes // _MB)
    with track("reading, MB", total) as advance:
        for number, chunk in enumerate(source.chunks()):
            waiting.append(chunk)
            yield number, chunk, sample.threshold
            done += chunk.num_bytes
            advance(min(done // _MB, total) - reported)
            reported = min(done // _MB, total)
        advance(total - reported)
