"""Formats of rows: a file is read in chunks, which can be parsed in another process."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from jaxtyping import Int64

from heedful.data.documents import check_no_document
from heedful.data.headers import LABEL, has_names, label_text
from heedful.data.tables import TableBatch, is_table, read_table
from heedful.data.text_files import (
    BLOCK_BYTES,
    BLOCK_LINES,
    COMPRESSED,
    BlockPlace,
    LineBlock,
    decode_lines,
    read_line_blocks,
    read_lines,
)
from heedful.errors import UserError, format_names
from heedful.files import parse_json

Field: TypeAlias = int | str  # the number of a column, from 1, or the name of a column or key
Unit: TypeAlias = Literal["line", "paragraph", "file"]

MESSAGES = "messages"  # the column with conversations as JSON
CORPUS = "corpus"  # the column with the name of each row's corpus (`data.corpora`)
TextOf: TypeAlias = Callable[[Mapping[str, Any], str], str]

_BLANK_LINES = re.compile(rb"\s*\n")


class ParsedRows(NamedTuple):
    """Rows of a file, before empty ones are left out.

    Attributes:
        columns: the cells of each column.
        lines: (N,), the number of the first line of each row.
        num_lines: the lines that were read, with blank ones between paragraphs.
        num_headers: lines with names of columns that were left out: 0 or 1.
    """

    columns: Sequence[list[str]]
    lines: Int64[np.ndarray, " N"]
    num_lines: int
    num_headers: int = 0

    @classmethod
    def consecutive(cls, columns: Sequence[list[str]], first: int) -> "ParsedRows":
        """Rows of one line each, the first of which has the number `first`."""
        count = len(columns[0])
        return cls(columns, np.arange(first, first + count), count)


class Block(Protocol):
    """Consecutive rows of a file, not parsed: lines, a batch of a table, or parts of a text."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that the block ends after the block before it, about."""

    @property
    def num_rows(self) -> int:
        """The number of rows, or of lines."""

    @property
    def first(self) -> int:
        """The number of the first row or line in the file, from 1."""

    def part(self, start: int, stop: int) -> "Block":
        """The rows from `start` to before `stop`."""


class TextPart(NamedTuple):
    """Lines of a text file that are one row, or, with an empty text, none."""

    line: int
    num_lines: int
    text: str


@dataclass(frozen=True)
class PartsBlock:
    """Parts that only reading the file as a whole can separate."""

    parts: Sequence[TextPart]
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return len(self.parts)

    @property
    def first(self) -> int:
        return self.parts[0].line if self.parts else 1

    def part(self, start: int, stop: int) -> "PartsBlock":
        parts = self.parts[start:stop]
        return PartsBlock(parts, self.num_bytes * len(parts) // self.num_rows)


@dataclass(frozen=True)
class RawChunk:
    """Consecutive rows of a file, read but not parsed; it can be pickled.

    Args:
        parse: returns the rows of a block; raises UserError for a wrong line.
        place: of its lines in plain files; None: they are found by reading the file.
    """

    parse: Callable[[Any], ParsedRows]
    block: Block
    place: BlockPlace | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that the chunk ends after the chunk before it, about."""
        return self.block.num_bytes

    @property
    def num_rows(self) -> int:
        """The number of rows, or of lines."""
        return self.block.num_rows

    def rows(self) -> ParsedRows:
        """The rows; raises UserError for a wrong line."""
        return self.parse(self.block)

    def part(self, start: int, stop: int) -> "RawChunk":
        """The rows from `start` to before `stop`."""
        return RawChunk(self.parse, self.block.part(start, stop))


def format_of(path: Path) -> str:
    """The format of a file by its name: table, jsonl, tsv or text."""
    if is_table(path):
        return "table"
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix[1:] if path.suffix in (".jsonl", ".tsv") else "text"


def read_chunks(
    path: Path,
    fields: Mapping[str, Field | None],
    unit: Unit,
    header: bool | None = None,
    languages: Mapping[str, str] | None = None,
    places: Sequence[BlockPlace] | None = None,
) -> Iterator[RawChunk]:
    """The rows of a file in chunks, at least one; arguments as in `open_rows`.

    Args:
        places: those of all chunks, if an earlier call has found them; they are read by `rows`.
    """
    kind = format_of(path)
    has_columns = kind == "tsv" and [*fields.values()] != [None]
    if header and not has_columns:
        raise UserError(
            f"{path} has no line of column names to leave out, so header=true has no effect; it is "
            "for .tsv files, in which the columns of text are given by number"
        )
    if kind == "table":
        return _table_chunks(path, fields)
    if kind == "jsonl":
        parse = partial(_parse_jsonl, str(path), _names(path, "JSONL", fields))
        return _line_chunks([path], parse, places)
    if has_columns:
        return _tsv_chunks(path, fields, header, languages or {}, places)
    if len(fields) > 1:
        check_no_document(path)
        raise UserError(
            f"{path} must be a .tsv, .jsonl or .parquet file to hold {len(fields)} columns"
            f" ({', '.join(fields)}); convert it"
        )
    _check_lines(path)
    if unit == "line":
        return _line_chunks([path], partial(_parse_lines, [str(path)]), places)
    return _part_chunks({"paragraph": _paragraphs, "file": _whole_file}[unit](path))


def read_parallel_chunks(
    paths: Sequence[Path], places: Sequence[BlockPlace] | None = None
) -> Iterator[RawChunk]:
    """The rows of line-parallel files in chunks, at least one; `places`: as in `read_chunks`."""
    for path in paths:
        _check_lines(path)
    return _line_chunks(paths, partial(_parse_lines, [str(path) for path in paths]), places)


def _check_lines(path: Path) -> None:
    """Raise UserError for a file whose name is that of a table."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    kind = format_of(path)
    if (kind == "table" and path.is_file()) or kind == "jsonl":
        raise UserError(f"{path} is a table, not lines of text; in a recipe, give it as file")
    if name.suffix.lower() in (".csv", ".json"):
        raise UserError(
            f"{path} is not lines of text, by its name; convert it to .tsv or .jsonl and give it "
            "as file, or rename it to .txt if it is text"
        )


def read_record_chunks(
    path: Path, text_of: TextOf, places: Sequence[BlockPlace] | None = None
) -> Iterator[RawChunk]:
    """Rows of one text, each made by `text_of` of a whole object of JSONL or row of a table.

    Args:
        places: as in `read_chunks`.

    Raises:
        UserError: a file of another format.
    """
    kind = format_of(path)
    if kind == "jsonl":
        return _line_chunks([path], partial(_parse_json_records, str(path), text_of), places)
    if kind == "table":
        parse = partial(_parse_table_records, str(path), text_of)
        return _or_empty((RawChunk(parse, batch) for batch in read_table(path)), 1)
    raise UserError(
        f"{path} must be a .jsonl or .parquet file, or a folder of datasets; convert it"
    )


def _line_chunks(
    paths: Sequence[Path],
    parse: Callable[[LineBlock], ParsedRows],
    places: Sequence[BlockPlace] | None,
) -> Iterator[RawChunk]:
    for block in read_line_blocks(paths, places):
        yield RawChunk(parse, block, block.place)


def _part_chunks(parts: Iterator[TextPart]) -> Iterator[RawChunk]:
    """Chunks of rows that only reading the file as a whole can separate."""
    chunk: list[TextPart] = []
    size, is_first = 0, True
    for part in parts:
        chunk.append(part)
        size += len(part.text)
        if size >= BLOCK_BYTES or len(chunk) >= BLOCK_LINES:
            yield RawChunk(_parse_parts, PartsBlock(chunk, size))
            chunk, size, is_first = [], 0, False
    if chunk or is_first:
        yield RawChunk(_parse_parts, PartsBlock(chunk, size))


def _parse_parts(block: PartsBlock) -> ParsedRows:
    rows = [part for part in block.parts if part.text]
    lines = np.array([part.line for part in rows], np.int64)
    return ParsedRows(
        [[part.text for part in rows]], lines, sum(part.num_lines for part in block.parts)
    )


def _parse_lines(names: Sequence[str], block: LineBlock) -> ParsedRows:
    columns = [block.texts(side, name) for side, name in enumerate(names)]
    return ParsedRows.consecutive(columns, block.first)


def _paragraphs(path: Path) -> Iterator[TextPart]:
    numbered = enumerate(read_lines(path), 1)
    for has_text, group in groupby(numbered, key=lambda pair: bool(pair[1].strip())):
        numbers, lines = zip(*group, strict=True)
        yield TextPart(numbers[0], len(lines), "\n".join(lines) if has_text else "")


def _whole_file(path: Path) -> Iterator[TextPart]:
    lines = list(read_lines(path, keep_ends=True))
    text = "".join(lines)
    yield TextPart(1, len(lines), text if text.strip() else "")


def _tsv_chunks(
    path: Path,
    fields: Mapping[str, Field | None],
    has_header: bool | None,
    languages: Mapping[str, str],
    places: Sequence[BlockPlace] | None,
) -> Iterator[RawChunk]:
    explicit_fields = [field for field in fields.values() if field is not None]
    columns: list[int] = []
    # The number of columns of each line; 0: that of the first line that is not blank.
    width = 0 if explicit_fields else len(fields)
    for block in read_line_blocks([path], places):
        place = block.place
        if not columns and not any(isinstance(field, str) for field in explicit_fields):
            columns = [i if f is None else int(f) - 1 for i, f in enumerate(fields.values())]
            if min(columns) < 0:
                raise UserError(
                    f"columns are counted from 1, so there is no column {min(columns) + 1}"
                )
            if has_header is None:
                has_header = has_names(path, _cells(path, block, columns), fields, languages)
            if has_header:
                block = _without_header(block)
        elif not columns:  # a file with a header
            if not all(isinstance(field, str) for field in explicit_fields):
                raise UserError(
                    f"{path}: give all columns by name or all by number, not some of each"
                )
            line, end, _ = block.data(0).partition(b"\n")
            header = next(decode_lines([line + end], str(path)), "").split("\t")
            columns, width = _header_columns(path, header, fields), len(header)
            block = _without_header(block)
        if not width:
            first = (line for line in BytesIO(block.data(0)) if line.strip())
            width = next((line.count(b"\t") + 1 for line in first), 0)
        parse = partial(_parse_tsv, str(path), columns, width, bool(has_header))
        yield RawChunk(parse, block, place)


def _without_header(block: LineBlock) -> LineBlock:
    """The first block of a file without its first line that is not blank.

    Blank lines before it count as if they followed it, so that rows keep their line numbers.
    """
    lines = block.data(0)
    blank = _BLANK_LINES.match(lines)
    start = 0 if blank is None else blank.end()
    return LineBlock(2, (lines[:start] + lines[start:].partition(b"\n")[2],), block.num_bytes)


def _cells(path: Path, block: LineBlock, columns: Sequence[int]) -> list[list[str]]:
    """Some columns of the lines of a block that have all of them; none if the first has not."""
    lines = [line.split("\t") for line in block.texts(0, str(path)) if line.strip()]
    if not lines or len(lines[0]) <= max(columns):
        return []
    return [[cells[i] for i in columns] for cells in lines if len(cells) > max(columns)]


def _header_columns(
    path: Path, header: Sequence[str], fields: Mapping[str, Field | None]
) -> list[int]:
    """The index of each field in the header of a table."""
    header = [name.strip() for name in header]
    # Fields that are not given have the names of their keys.
    names = [str(key if field is None else field) for key, field in fields.items()]
    for name in names:
        if header.count(name) != 1:
            count = "two columns" if name in header else "no column"
            raise UserError(
                f"{path}, line 1: the header has {count} {name!r} (its columns:"
                f" {format_names(header)}); name another column"
            )
    return [header.index(name) for name in names]


def _parse_tsv(
    name: str, columns: Sequence[int], width: int, has_header: bool, block: LineBlock
) -> ParsedRows:
    blank, rows = [""] * max(width, max(columns) + 1), []
    for number, line in enumerate(block.texts(0, name), block.first):
        cells = line.split("\t")
        if len(cells) != width or max(columns) >= width:
            if line.strip():
                raise UserError(
                    f"{name}, line {number}: {len(cells)} columns where there must be"
                    f" {len(blank)}; keep tabs out of the texts, or name other columns"
                )
            cells = blank
        rows.append(cells)
    cells_of = [[cells[column] for cells in rows] for column in columns]
    parsed = ParsedRows.consecutive(cells_of, block.first)
    return parsed._replace(num_headers=int(has_header and block.first == 2))


def _parse_jsonl(name: str, keys: Mapping[str, str], block: LineBlock) -> ParsedRows:
    columns: list[list[str]] = [[] for _ in keys]
    for number, entry in _json_objects(name, block):
        location = f"{name}, line {number}"
        for texts, (column, key) in zip(columns, keys.items(), strict=True):
            is_label = column == LABEL
            texts.append("" if entry is None else _text(entry, key, location, is_label))
    return ParsedRows.consecutive(columns, block.first)


def _json_objects(name: str, block: LineBlock) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number and the object of each line; None for a blank line."""
    for number, line in enumerate(block.texts(0, name), block.first):
        if not line.strip():
            yield number, None
            continue
        entry = parse_json(line, f"{name}, line {number}")
        if not isinstance(entry, dict):
            raise UserError(f"{name}, line {number}: not a JSON object; write one object a line")
        yield number, entry


def _parse_json_records(name: str, text_of: TextOf, block: LineBlock) -> ParsedRows:
    texts = [
        "" if record is None else text_of(record, f"{name}, line {number}")
        for number, record in _json_objects(name, block)
    ]
    return ParsedRows.consecutive([texts], block.first)


def _parse_table_records(name: str, text_of: TextOf, batch: TableBatch) -> ParsedRows:
    numbered = enumerate(batch.objects(), batch.first)
    texts = [text_of(record, f"{name}, line {number}") for number, record in numbered]
    return ParsedRows.consecutive([texts], batch.first)


def _table_chunks(path: Path, fields: Mapping[str, Field | None]) -> Iterator[RawChunk]:
    names = _names(path, "a table", fields)
    columns = [(name, column == LABEL) for column, name in names.items()]
    chunks = (RawChunk(_parse_cells, batch) for batch in read_table(path, columns))
    return _or_empty(chunks, len(columns))


def _or_empty(chunks: Iterator[RawChunk], num_columns: int) -> Iterator[RawChunk]:
    """The chunks, or one empty chunk if the iterator is empty."""
    empty = LineBlock(1, (b"",) * num_columns, 0)
    return chain([next(chunks, RawChunk(partial(_parse_lines, [""] * num_columns), empty))], chunks)


def _parse_cells(batch: TableBatch) -> ParsedRows:
    return ParsedRows.consecutive(batch.cells(), batch.first)


def _names(path: Path, format: str, fields: Mapping[str, Field | None]) -> dict[str, str]:
    """The field of each column in a format with named fields; raises UserError for a number."""
    if any(isinstance(field, int) for field in fields.values()):
        raise UserError(
            f"{path} is {format}, whose fields have names; name them instead of numbers"
        )
    return {column: str(field or column) for column, field in fields.items()}


def _text(entry: dict[str, object], key: str, location: str, is_label: bool) -> str:
    if key not in entry:
        keys = ", ".join(map(repr, entry)) or "none"
        raise UserError(
            f"{location}: no key {key!r} (found: {keys}); set the field to the right key"
        )
    text = label_text(entry[key]) if is_label else entry[key]
    if not isinstance(text, str):
        raise UserError(f"{location}: {key!r} is not a text; write it as a JSON string")
    return text
