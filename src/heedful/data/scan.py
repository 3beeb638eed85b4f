"""The first pass over training rows: check, filter and count them, and sample texts."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, compress, groupby, islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from heedful.data.columns import DataReport
from heedful.data.filter_report import FilterReport
from heedful.data.filters import Filter, FilterChain, Unique, UniqueChain
from heedful.data.headers import LABEL, Problem
from heedful.data.labels import count_labels
from heedful.data.row_formats import CORPUS, Unit
from heedful.data.row_samples import RowSample, SampledRows
from heedful.data.rows import ReadCounter, RowChunk, Rows, RowSource, hash_cells
from heedful.data.splits import KnownRows, Split, Tail, sources_of, split_tail
from heedful.data.text_files import BlockPlace
from heedful.data.workers import map_in_order
from heedful.progress import track

_BATCH = 8  # chunks that are sent to a worker at once: to scan one takes about a millisecond
_MB = 1_000_000
_CHUNKS_A_WORKER = 8  # that hold out rows; fewer are parsed sooner than a process starts


@dataclass
class ChunkFacts:
    """Facts about each of C chunks.

    Attributes:
        num_rows: the rows that filters keep.
        num_characters: the characters of their texts.
        corpora: the name of the corpus; "" without corpora.
        kept: `ScannedChunk.kept_bits` of each chunk.
        sources, places: `RowChunk.source` and `RowChunk.place` of each chunk.
    """

    num_rows: list[int] = field(default_factory=list)
    num_characters: list[int] = field(default_factory=list)
    corpora: list[str] = field(default_factory=list)
    kept: list[bytes | None] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    places: list[BlockPlace | None] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        """The index of the first row of each chunk, and the number of all rows."""
        return [*accumulate(self.num_rows, initial=0)]

    @property
    def known_places(self) -> dict[int, list[BlockPlace]]:
        """The places of the chunks of each source of which all are known."""
        found: dict[int, list[BlockPlace | None]] = {}
        for source, place in zip(self.sources, self.places, strict=True):
            found.setdefault(source, []).append(place)
        known = {source: [p for p in places if p is not None] for source, places in found.items()}
        return {
            source: known[source] for source in found if len(known[source]) == len(found[source])
        }

    def add(self, part: "_ScannedPart", place: BlockPlace | None) -> None:
        """Add the next chunk."""
        self.num_rows.append(part.num_rows)
        self.num_characters.append(part.num_characters)
        self.corpora.append(part.corpus)
        self.kept.append(part.bits)
        self.sources.append(part.source)
        self.places.append(place)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON, which `from_json` reads."""
        bitmaps = [None if bits is None else bits.hex() for bits in self.kept]
        return {**asdict(self), "kept": bitmaps}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ChunkFacts":
        """The facts that `to_json` made."""
        bitmaps = [None if bits is None else bytes.fromhex(bits) for bits in content["kept"]]
        places = [place and BlockPlace.from_json(place) for place in content["places"]]
        return cls(**{**content, "kept": bitmaps, "places": places})


@dataclass(frozen=True)
class Scan:
    """Facts about the rows of a source. Rows that filters drop are not counted, nor have indices.

    Attributes:
        reports: of the rows that were read, by corpus ("" without corpora).
        filters: the rows that filters dropped.
        labels: the rows of each label (`count_labels`), before filters of class `Unique`.
        sample: rows chosen at random, in their order; all of them if they are few.
        sample_indices: the index of each row of `sample` among all rows.
        sources: (N,), the hash of the source of each row (`sources_of`), if they were asked for.
    """

    reports: dict[str, DataReport]
    filters: FilterReport
    chunks: ChunkFacts
    labels: Counter[str]
    sample: Rows
    sample_indices: Int64[np.ndarray, " S"]
    sources: UInt64[np.ndarray, " N"] | None = None

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return sum(self.chunks.num_rows)

    @property
    def noun(self) -> str:
        """The word for a row in messages."""
        return next(iter(self.reports.values())).noun


def scan_rows(
    source: RowSource,
    filters: Sequence[Filter],
    sample_size: int,
    num_workers: int,
    *,
    with_sources: bool = False,
    problem: Problem = "single_label",
) -> Scan:
    """Read all rows once.

    Args:
        filters: those of class `Unique`, which need all rows in order, come last: the workers
            compute hashes, which are compared here. The workers apply the other filters.
        sample_size: maximum number of sampled rows. With `SAMPLE_CHARACTERS` as a second limit the
            rows with the smallest keys are chosen, random numbers of their chunk and index: the
            choice is independent of the number of workers.
        with_sources: compute `Scan.sources`.
        problem: what the labels are.

    Raises:
        UserError: wrong rows, files without rows, a filter that drops all rows.
    """
    unique = UniqueChain([filter for filter in filters if isinstance(filter, Unique)])
    by_row = [filter for filter in filters if not isinstance(filter, Unique)]
    assert [*by_row, *unique.filters] == [*filters]
    report = FilterChain(by_row).report
    reports: dict[str, DataReport] = {}
    labels, counter, sample = Counter[str](), ReadCounter(), RowSample(sample_size)
    chunks, waiting = ChunkFacts(), deque[RowChunk]()
    sources = [np.zeros(0, np.uint64)]

    def items() -> Iterator[tuple[int, RowChunk, float]]:
        for number, chunk in enumerate(_tracked(source)):
            waiting.append(chunk)
            yield number, chunk, sample.threshold

    scan_chunk = _ChunkScanner(tuple(by_row), tuple(unique.filters), with_sources, problem)
    for part in map_in_order(scan_chunk, items(), num_workers, batch=_BATCH):
        chunk = waiting.popleft()
        counter.add(part.source, part.read, part.name)
        report = report.plus(part.filters)
        if unique.filters:
            is_unique = unique.keep(part.hashes, partial(_kept_by_row, by_row, chunk))
            part = part.with_kept(is_unique)
        labels.update(part.labels)
        known = reports.get(part.corpus)
        reports[part.corpus] = part.report if known is None else known.plus(part.report)
        chunks.add(part, chunk.place)
        sample.add(part.sampled)
        if part.sources is not None:
            sources.append(part.sources)
    counter.checked_total()
    report = FilterReport([*report.filters, *unique.report.filters])
    report.check()
    rows, indices = sample.rows(chunks.starts)
    hashes = np.concatenate(sources) if with_sources else None
    return Scan(reports, report, chunks, labels, rows, indices, hashes)


class ScannedChunk(NamedTuple):
    """A chunk of rows with the results of the first pass.

    Attributes:
        first: the index of its first row among all rows.
        kept_bits: the rows that filters keep, as bits; None: all.
    """

    first: int
    kept_bits: bytes | None
    chunk: RowChunk

    def parse(self) -> tuple[Rows, Int64[np.ndarray, " N"]]:
        """The rows, and their indices among all rows."""
        rows = self.chunk.parse()
        if self.kept_bits is not None:
            bits = np.unpackbits(np.frombuffer(self.kept_bits, np.uint8), count=len(rows))
            report, rows = rows.report, rows.select(np.flatnonzero(bits))
            num_filtered = report.num_kept - len(rows)
            rows.report = replace(report, num_kept=len(rows), num_filtered=num_filtered)
        return rows, np.arange(self.first, self.first + len(rows))


def scanned_chunks(source: RowSource, chunks: ChunkFacts, start: int = 0) -> Iterator[ScannedChunk]:
    """The chunks of a source from number `start` on, after its first pass."""
    facts = zip(chunks.starts[:-1], chunks.kept, strict=True)
    pairs = zip(source.chunks(chunks.known_places), facts, strict=True)
    for chunk, (first, kept_bits) in islice(pairs, start, None):
        yield ScannedChunk(first, kept_bits, chunk)


def training_rows(chunk: ScannedChunk, split: Split, known: KnownRows) -> Rows:
    """The training rows of a chunk: not held out, and not known."""
    rows, indices = chunk.parse()
    return known.drop_from(split.train(rows, indices))


@dataclass(frozen=True)
class _HeldOutRows:
    """`Split.valid` of a chunk, in a worker process."""

    split: Split

    def __call__(self, chunk: ScannedChunk) -> Rows:
        return self.split.valid(*chunk.parse())


def take_held_out(source: RowSource, chunks: ChunkFacts, split: Split, num_workers: int) -> Rows:
    """The rows that a split holds out, in memory."""
    ends = zip(chunks.starts[:-1], chunks.starts[1:], strict=True)
    is_needed = [split.holds_out_some(first, end) for first, end in ends]
    needed = compress(scanned_chunks(source, chunks), is_needed)
    count = min(num_workers, max(1, sum(is_needed) // _CHUNKS_A_WORKER))
    return Rows.concatenate([*map_in_order(_HeldOutRows(split), needed, count)])


def corpus_tails(
    source: RowSource, chunks: ChunkFacts, size: int | float, unit: Unit
) -> Iterator[Tail]:
    """The last texts of each corpus, by `split_tail`."""
    first = 0
    for _, group in groupby(range(len(chunks.corpora)), key=chunks.corpora.__getitem__):
        numbers = [*group]

        def lengths_of(index: int, start: int = numbers[0]) -> list[int]:
            rows, _ = next(scanned_chunks(source, chunks, start + index)).parse()
            return [len(text) for text in rows["text"]]

        part = slice(numbers[0], numbers[-1] + 1)
        num_rows = chunks.num_rows[part]
        yield split_tail(num_rows, chunks.num_characters[part], lengths_of, size, unit, first=first)
        first += sum(num_rows)


@dataclass(frozen=True)
class _ScannedPart:
    """The result of `_ChunkScanner`.

    Attributes:
        read, report: of the rows before and after the filters.
        indices: (N,), of the rows that filters keep, among all rows of the chunk.
        sizes: (N,), of these rows, in characters.
        hashes: (N,), of these rows, for each filter `Unique`.
        sources: (N,), as `Scan.sources`, or None.
    """

    source: int
    name: str
    corpus: str
    labels: Counter[str]
    read: DataReport
    report: DataReport
    filters: FilterReport
    sampled: SampledRows
    indices: Int64[np.ndarray, " N"]
    sizes: Int64[np.ndarray, " N"]
    hashes: tuple[UInt64[np.ndarray, " N"], ...]
    sources: UInt64[np.ndarray, " N"] | None

    @property
    def num_rows(self) -> int:
        """The rows that filters keep."""
        return len(self.indices)

    @property
    def num_characters(self) -> int:
        """The characters of these rows."""
        return int(self.sizes.sum())

    @property
    def bits(self) -> bytes | None:
        """One bit for each row read, see `ScannedChunk.kept_bits`."""
        if len(self.indices) == self.read.num_kept:
            return None
        is_kept = np.zeros(self.read.num_kept, bool)
        is_kept[self.indices] = True
        return np.packbits(is_kept).tobytes()

    def with_kept(self, kept: Bool[np.ndarray, " N"]) -> "_ScannedPart":
        """The part after further filters, which keep the rows at which `kept` is True."""
        if kept.all():
            return self
        kept_rows, places = np.flatnonzero(kept), self.sampled.places
        sampled = self.sampled.select(np.flatnonzero(kept[places]))
        sampled = replace(sampled, places=np.searchsorted(kept_rows, sampled.places))
        num_filtered = self.read.num_kept - len(kept_rows)
        report = replace(self.report, num_kept=len(kept_rows), num_filtered=num_filtered)
        indices, sizes = self.indices[kept_rows], self.sizes[kept_rows]
        hashes = tuple(values[kept_rows] for values in self.hashes)
        return replace(
            self,
            sampled=sampled,
            report=report,
            indices=indices,
            sizes=sizes,
            hashes=hashes,
            sources=None if self.sources is None else self.sources[kept_rows],
        )


@dataclass(frozen=True)
class _ChunkScanner:
    """Reads and filters a chunk, given with its number and a bound of the keys to be sampled."""

    filters: tuple[Filter, ...]
    unique: tuple[Unique, ...]
    with_sources: bool
    problem: Problem

    def __call__(self, item: tuple[int, RowChunk, float]) -> _ScannedPart:
        number, chunk, threshold = item
        read = chunk.parse()
        chain = FilterChain(self.filters)
        rows, indices = chain.apply(read)
        texts = [cells for name, cells in rows.columns.items() if name not in (LABEL, CORPUS)]
        lengths = [np.fromiter(map(len, cells), np.int64, len(rows)) for cells in texts]
        sizes = np.asarray(np.sum(lengths, axis=0))
        # A spawn key, as trailing zeros of a seed sequence are ignored.
        rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(number,)))
        keys = rng.random(len(read))[indices]
        return _ScannedPart(
            source=chunk.source,
            name=next(iter(read.sources), ""),
            corpus=chunk.corpus,
            labels=count_labels(rows, self.problem) if LABEL in rows else Counter(),
            read=read.report,
            report=rows.report,
            filters=chain.report,
            sampled=SampledRows.choose(rows, keys, sizes, threshold),
            indices=indices,
            sizes=sizes,
            hashes=tuple(filter.hashes(rows) for filter in self.unique),
            sources=hash_cells(sources_of(rows)) if self.with_sources else None,
        )


def _kept_by_row(filters: Sequence[Filter], chunk: RowChunk) -> Rows:
    """The rows of a chunk that the filters keep."""
    return FilterChain(filters).apply(chunk.parse())[0]


def _tracked(source: RowSource) -> Iterator[RowChunk]:
    """The chunks of a source, with their bytes as progress."""
    done = reported = 0
    total = max(1, source.total_bytes() // _MB)
    with track("reading, MB", total) as advance:
        for chunk in source.chunks():
            yield chunk
            done += chunk.num_bytes
            advance(min(done // _MB, total) - reported)
            reported = min(done // _MB, total)
        advance(total - reported)
