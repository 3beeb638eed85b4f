"""Rows of text, in memory or read in chunks from files."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from heedful.data.columns import DataReport
from heedful.data.headers import LABEL, OtherLabel, Problem
from heedful.data.row_formats import (
    CORPUS,
    MESSAGES,
    Field,
    ParsedRows,
    RawChunk,
    TextOf,
    Unit,
    read_chunks,
    read_parallel_chunks,
    read_record_chunks,
)
from heedful.data.text_files import BlockPlace
from heedful.errors import UserError

SourcePlaces: TypeAlias = Mapping[int, Sequence[BlockPlace]]  # of the chunks of sources
ReadFile: TypeAlias = Callable[..., Iterator[RawChunk]]  # with the argument `places`

_CHUNK_ROWS = 4_096  # of rows in memory


class Rows:
    """Columns of text of equal length: `rows["src"]` is a list of strings.

    Args:
        report: counts of the rows that were read and left out.
        sources: names of the files that the rows were read from.
        locations: (2, N), for each row the index of its source, and its line in it, from 1.
    """

    def __init__(
        self,
        columns: Mapping[str, list[str]],
        report: DataReport | None = None,
        sources: Sequence[str] = (),
        locations: NDArray[np.int64] | None = None,
    ) -> None:
        self.columns = dict(columns)
        count = len(next(iter(self.columns.values())))
        assert all(len(texts) == count for texts in self.columns.values())
        noun = _noun(self.columns)
        self.report = DataReport(count, count, noun=noun) if report is None else report
        self.sources = tuple(sources)
        self.locations = locations

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> list[str]:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def location(self, index: int) -> str:
        """The file and line of row `index` (from 0), for messages."""
        if self.locations is None:
            return f"{self.report.noun.removesuffix('s')} {index + 1}"
        source, line = self.locations[:, index]
        return f"{self.sources[source]}, line {line}"

    def select(self, indices: NDArray[np.integer[Any]]) -> "Rows":
        """The rows at `indices`, in that order."""
        selected = indices.tolist()
        columns = {name: [texts[i] for i in selected] for name, texts in self.columns.items()}
        locations = None if self.locations is None else self.locations[:, indices]
        return Rows(columns, None, self.sources, locations)

    def hashes(self, columns: Sequence[str] | None = None) -> NDArray[np.uint64]:
        """(N,), a hash of some columns of each row; None: all but the name of the corpus."""
        names = [n for n in self.columns if n != CORPUS] if columns is None else columns
        return hash_cells([self.columns[name] for name in names])

    def of_corpus(self, name: str) -> "Rows":
        """The rows with the name of their corpus in the column `CORPUS`."""
        columns = {**self.columns, CORPUS: [name] * len(self)}
        return Rows(columns, self.report, self.sources, self.locations)

    @classmethod
    def concatenate(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of parts with the same columns, in order."""
        columns = {name: [t for part in parts for t in part[name]] for name in parts[0].columns}
        report = reduce(DataReport.plus, (part.report for part in parts))
        if any(part.locations is None for part in parts):
            return cls(columns, report)
        numbers: dict[str, int] = {}  # of the sources
        locations = []
        for part in parts:
            assert part.locations is not None
            of_part = [numbers.setdefault(name, len(numbers)) for name in part.sources]
            shifted = np.array(of_part or [0], dtype=np.int64)[part.locations[0]]
            locations.append(np.stack([shifted, part.locations[1]]))
        return cls(columns, report, list(numbers), np.concatenate(locations, axis=1))

    def total_bytes(self) -> int:
        """The size of the texts in characters: what progress counts for rows in memory."""
        return sum(len(text) for texts in self.columns.values() for text in texts)

    def chunks(self, places: SourcePlaces | None = None) -> Iterator["RowChunk"]:
        """The rows in parts, as those of a `RowSource`."""
        for start in range(0, max(1, len(self)), _CHUNK_ROWS):
            part = self.select(np.arange(start, min(start + _CHUNK_ROWS, len(self))))
            yield RowChunk(0, part.total_bytes(), partial(_identity, part))


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of a `RowSource`, read but not parsed.

    Attributes:
        source: the index of the file, or of the group of line-parallel files, among those read.
        num_bytes: what progress advances by after it.
        corpus: the name of the rows' corpus; "": none.
        parse: returns the rows, with the counts of those read in `report`; raises UserError for a
            wrong row. It can be sent to another process for rows of files.
        place: of its lines in plain files, for `RowSource.chunks`; None: it has none.
    """

    source: int
    num_bytes: int
    parse: Callable[[], Rows]
    corpus: str = ""
    place: BlockPlace | None = None


@runtime_checkable
class RowSource(Protocol):
    """Rows of text that are read in chunks, as often as needed and the same each time."""

    def total_bytes(self) -> int:
        """The sum of the `num_bytes` of all chunks, about."""

    def chunks(self, places: SourcePlaces | None = None) -> Iterator[RowChunk]:
        """The rows in order, in chunks that depend on the content alone; at least one a file.

        Args:
            places: by the index of a source, those of all its chunks, which an earlier call has
                found: its files are then read by `RowChunk.parse` alone.
        """


@dataclass(frozen=True)
class FileRows:
    """The rows of files; made by `open_rows`.

    Attributes:
        files: for each file, or group of line-parallel files, its name, its paths, and the function
            that reads it.
        as_texts: make each text of labeled texts, or of labeled pairs, a row with the one column
            `text`.
        corpus: the name of the rows' corpus, which becomes a column; "": none.
        problem: what labels are: a cell of several may be empty, or a list.
    """

    columns: tuple[str, ...]
    files: tuple[tuple[str, tuple[Path, ...], ReadFile], ...]
    keep_empty: bool = False
    as_texts: bool = False
    corpus: str = ""
    problem: Problem = "single_label"

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the rows."""
        columns = ("text",) if self.as_texts else self.columns
        return (*columns, CORPUS) if self.corpus else columns

    def total_bytes(self) -> int:
        paths = (path for _, paths, _ in self.files for path in paths)
        return sum(_size(path) for path in paths)

    def chunks(self, places: SourcePlaces | None = None) -> Iterator[RowChunk]:
        parser = replace(self, files=())  # each chunk is sent with it
        for index, (name, _, read) in enumerate(self.files):
            for chunk in read(places=(places or {}).get(index)):
                parse = partial(parser.parse, name, chunk)
                yield RowChunk(index, chunk.num_bytes, parse, self.corpus, chunk.place)

    def parse(self, name: str, chunk: RawChunk) -> Rows:
        """The rows of a chunk of a file without empty ones, which are counted."""
        # Labels that are not read may be of any kind.
        problem: Problem = "multi_label" if self.as_texts else self.problem
        rows = _without_empty(self.columns, name, chunk.rows(), self.keep_empty, problem)
        if self.as_texts:
            rows = _as_texts(rows)
        return rows.of_corpus(self.corpus) if self.corpus else rows


@dataclass(frozen=True)
class JoinedRows:
    """The rows of several sources with the same columns, one after the other."""

    sources: tuple[FileRows, ...]

    def total_bytes(self) -> int:
        return sum(source.total_bytes() for source in self.sources)

    def chunks(self, places: SourcePlaces | None = None) -> Iterator[RowChunk]:
        first = 0
        for source in self.sources:
            known = {index - first: found for index, found in (places or {}).items()}
            for chunk in source.chunks(known):
                yield replace(chunk, source=first + chunk.source)
            first += len(source.files)


def open_rows(
    files: Sequence[Path] | Mapping[str, Sequence[Path]],
    fields: Mapping[str, Field | None] | None = None,
    *,
    unit: Unit = "line",
    header: bool | None = None,
    languages: Mapping[str, str] | None = None,
    keep_empty: bool = False,
) -> FileRows:
    """The rows of files, to be read in chunks; arguments and errors as in `read_rows`.

    Args:
        header: a .tsv file has a line with names of columns, or not; None: it is recognized.
        languages: by column; a recognized header must not contradict them.
    """
    groups: list[tuple[str, tuple[Path, ...], ReadFile]]
    if isinstance(files, Mapping):
        columns = tuple(files)
        if len(set(map(len, files.values()))) > 1:
            counts = " but ".join(f"{len(paths)} {column} files" for column, paths in files.items())
            raise UserError(f"{counts} are given; line-parallel files must be given in pairs")
        groups = [
            (" and ".join(map(str, paths)), paths, partial(read_parallel_chunks, paths))
            for paths in zip(*files.values(), strict=True)
        ]
    else:
        fields = {"text": None} if fields is None else fields
        columns = tuple(fields)
        groups = [
            (str(path), (path,), partial(read_chunks, path, fields, unit, header, languages))
            for path in files
        ]
    if not groups:
        raise UserError("no files are given; name at least one")
    return FileRows(columns, tuple(groups), keep_empty)


def read_rows(
    files: Sequence[Path] | Mapping[str, Sequence[Path]],
    fields: Mapping[str, Field | None] | None = None,
    *,
    unit: Unit = "line",
    keep_empty: bool = False,
) -> Rows:
    r"""Read the rows of one or more files, in order, into memory.

    The format of a file is determined by its name, without a final .gz or .zst:

    * line-parallel files, if `files` maps each column to its files;
    * .tsv (unless one column is read and no field is given): columns separated by tabs, without
      quoting, the same number in every line. Fields are numbers, or names in the first line; all
      `None`: the file has exactly these columns, in order. Without names, a first line that is
      recognized as a header (`heedful.data.headers`) is left out and counted;
    * .jsonl: one object per line. A field is a key; `None` means the name of the column;
    * .parquet, and folders of `Dataset.save_to_disk`: a field is a column, `a.b` a field of a
      struct; `None` means the name of the column; missing values are empty texts;
    * other names are plain text, for one column: a row is a line, a paragraph (lines between blank
      lines, joined by "\n") or a file, by `unit`, which the other formats ignore.

    Rows with an empty column (only whitespace) are left out and counted, unless `keep_empty`. The
    column "label" is stripped, must not be empty, and may be an integer or boolean in JSONL and
    tables. Lines, byte order marks and compression are as in `read_lines`.

    Args:
        fields: the field of each column; default: {"text": None}.

    Raises:
        UserError: no file; a file that cannot be read, is damaged or not UTF-8 (with its line);
            parallel files of different lengths; a line with a syntax error, or without a field or
            label (with its number); a file without rows.
    """
    return collect(open_rows(files, fields, unit=unit, keep_empty=keep_empty))


def open_records(files: Sequence[Path], column: str, text_of: TextOf) -> FileRows:
    """Rows of one column, each made of a whole object of JSONL or row of a table.

    Args:
        text_of: returns the text of a record, whose second argument is the file and line; a row
            with an empty text is left out and counted. It is sent to other processes.

    Raises:
        UserError: when rows are read: a file of another format, or as `read_rows`; errors of
            `text_of`.
    """
    read = partial(read_record_chunks, text_of=text_of)
    return FileRows((column,), tuple((str(path), (path,), partial(read, path)) for path in files))


def collect(source: RowSource) -> Rows:
    """All rows of a source in memory; raises UserError as `read_rows`."""
    counter, parts = ReadCounter(), []
    for chunk in source.chunks():
        rows = chunk.parse()
        counter.add(chunk.source, rows.report, *rows.sources[:1])
        parts.append(rows)
    rows = Rows.concatenate(parts)
    rows.report = counter.checked_total()
    return rows


class ReadCounter:
    """Sums the reports of chunks, in order.

    Raises:
        UserError: a file has no rows.
    """

    def __init__(self) -> None:
        self._source = -1
        self._name = ""
        self._of_source = DataReport(0, 0)
        self._total: DataReport | None = None

    def add(self, source: int, report: DataReport, name: str = "") -> None:
        """Count a chunk of the file with this index and name."""
        if source == self._source:
            self._of_source = self._of_source.plus(report)
        else:
            self._check_source()
            self._source, self._name, self._of_source = source, name, report
        self._total = report if self._total is None else self._total.plus(report)

    def checked_total(self) -> DataReport:
        """The report of all chunks; raises UserError if a file has no rows."""
        self._check_source()
        assert self._total is not None
        return self._total

    def _check_source(self) -> None:
        report = self._of_source
        if self._source < 0 or report.num_kept or not self._name:
            return
        noun = report.noun
        kind = {"pairs": "pair with text on both sides"}.get(noun, noun.removesuffix("s"))
        labeled = "labeled " * (LABEL in report.empty)
        raise UserError(
            f"{self._name} is empty: it holds no {labeled}{kind} in {report.num_lines} lines; leave"
            " it out, or name another file"
        )


def hash_cells(columns: Sequence[list[str]]) -> NDArray[np.uint64]:
    """(N,), a hash of the N cells of all columns at each index."""
    digests = (
        hashlib.blake2b(json.dumps(cells).encode(), digest_size=8).digest()
        for cells in zip(*columns, strict=True)
    )
    return np.frombuffer(b"".join(digests), np.uint64)


def _noun(columns: Iterable[str]) -> str:
    """The word for rows with these columns in messages."""
    return "pairs" if "tgt" in columns else "chats" if MESSAGES in columns else "texts"


def _identity(rows: Rows) -> Rows:
    return rows


def _as_texts(rows: Rows) -> Rows:
    """One row for each text of labeled texts or pairs, without labels."""
    sides = [rows[column] for column in ("text", "pair") if column in rows]
    texts = [text for row in zip(*sides, strict=True) for text in row]
    assert rows.locations is not None
    locations = np.repeat(rows.locations, len(sides), axis=1)
    return Rows({"text": texts}, replace(rows.report, num_kept=len(texts)), rows.sources, locations)


def _without_empty(
    columns: Sequence[str], name: str, parsed: ParsedRows, keep_empty: bool, problem: Problem
) -> Rows:
    cells, lines = dict(zip(columns, parsed.columns, strict=True)), parsed.lines
    is_empty = np.zeros(len(lines), bool)
    empty = dict.fromkeys(columns, 0)
    for column, texts in cells.items():
        if column != LABEL and not keep_empty:
            blank = [i for i, text in enumerate(texts) if not text or text.isspace()]
            empty[column] = len(blank)
            is_empty[blank] = True
    if is_empty.any():
        non_empty = np.flatnonzero(~is_empty)
        cells = {column: [texts[i] for i in non_empty.tolist()] for column, texts in cells.items()}
        lines = lines[non_empty]
    if LABEL in cells:
        cells[LABEL] = _checked_labels(cells[LABEL], name, lines, problem)
    num_empty = int(is_empty.sum())
    report = DataReport(
        parsed.num_lines + parsed.num_headers,
        len(lines),
        num_empty,
        num_headers=parsed.num_headers,
        noun=_noun(columns),
        empty=empty,
    )
    return Rows(cells, report, (name,), np.stack([np.zeros_like(lines), lines]))


def _checked_labels(
    labels: Sequence[str], name: str, lines: NDArray[np.int64], problem: Problem
) -> list[str]:
    """Labels without spaces around them; raises UserError for one that is not of the problem."""
    if problem == "single_label":
        for label, line in zip(labels, lines, strict=True):
            if isinstance(label, OtherLabel):
                raise UserError(
                    f"{name}, line {line}: the label {str(label)!r} is not a text; name another "
                    "field, or set objective.problem: multi_label for lists, regression for numbers"
                )
    stripped = [label.strip() for label in labels]
    if problem != "multi_label" and "" in stripped:
        line = lines[stripped.index("")]
        raise UserError(f"{name}, line {line}: no label; add it, or drop the line")
    return stripped


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
