"""Rows of CSV files: columns separated by commas, semicolons, tabs or bars, with quotes.

RFC 4180 defines those with commas.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from heedful.data.rows import Field
from heedful.data.text_files import read_lines
from heedful.data.tsv import has_names, header_columns
from heedful.data.unit_blocks import HEADER, FileRow
from heedful.errors import UserError

_DELIMITERS = ",;\t|"
_SAMPLE = 50  # rows by which a header is recognized
_NAMED = re.compile(r"\"?sep=([,;\t|])\"?\s*", re.IGNORECASE)  # a first line for Excel


def csv_units(
    path: Path,
    fields: Mapping[str, Field | None],
    header: bool | None,
    languages: Mapping[str, str],
) -> Iterator[FileRow]:
    """The rows of a file; arguments as in `heedful.data.tsv.tsv_chunks`.

    The separator is the one that is most frequent in the first row, outside of quotes and not
    before blanks, or that of a first line `sep=;`, which is no row.

    Raises:
        UserError: a quote without its end; a row with another number of columns.
    """
    rows = _read(path)
    first, cells = [], list[list[str]]()
    for line, row in rows:
        first.append((line, row))
        cells += [row] if row else []
        if len(cells) == _SAMPLE:
            break
    if not cells:
        return
    explicit = [field for field in fields.values() if field is not None]
    width, top = len(cells[0]), next(line for line, row in first if row)
    is_named = any(isinstance(field, str) for field in explicit)
    if is_named:
        if not all(isinstance(field, str) for field in explicit) or len(explicit) < len(fields):
            raise UserError(f"{path}: give all columns by name or all by number, not some of each")
        columns, header = header_columns(path, cells[0], fields, top), True
    else:
        columns = [
            i if field is None else int(field) - 1 for i, field in enumerate(fields.values())
        ]
        if not explicit and width != len(fields):
            raise UserError(
                f"{path}, line {top}: {width} columns where there must be {len(fields)};"
                " name columns"
            )
        if not 0 <= min(columns) <= max(columns) < width:
            raise UserError(
                f"{path}, line {top}: {width} columns, so there is no column {max(columns) + 1}"
            )
        if header is None:
            sample = [[row[i] for i in columns] for row in cells if len(row) == width]
            header = has_names(path, sample, fields, languages)
    for line, row in chain(first, rows):
        if not row:
            yield FileRow(line, ("",) * len(columns))
        elif len(row) != width:
            raise UserError(
                f"{path}, line {line}: {len(row)} columns where there must be {width}; put texts"
                " with the separator in quotes"
            )
        elif not header:
            yield FileRow(line, tuple(row[column] for column in columns))
        else:
            header = False
            if not is_named:
                yield FileRow(line, (), HEADER)


def _read(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows, each with the number of its first line; one of blank cells is []."""
    lines = read_lines(path, keep_ends=True)
    delimiter = None
    number = 0
    pending: list[str] = []

    def source() -> Iterator[str]:
        yield from pending
        yield from lines

    for line in lines:
        if not pending and (named := _NAMED.fullmatch(line)):
            delimiter, number = named[1], 1
            break
        pending.append(line)
        if line.strip():
            delimiter = _delimiter(line)
            break
    if delimiter is None:
        return
    # `"a", "b"`: quotes behind a blank are quotes too.
    reader = csv.reader(source(), delimiter=delimiter, strict=True, skipinitialspace=True)
    before = number
    try:
        for row in reader:
            first, number = number + 1, before + reader.line_num
            yield first, row if any(cell.strip() for cell in row) else []
    except csv.Error as error:
        raise UserError(f"{path}, line {number + 1}: {_problem(error)}") from None


def _problem(error: csv.Error) -> str:
    """The reason why a row cannot be read, and the remedy."""
    if "field limit" in str(error):
        return (
            f"a text of more than {csv.field_size_limit():,} characters; end each quote, or write"
            " texts of this size as .jsonl"
        )
    if "new-line" in str(error):
        return (
            "a carriage return in a text without quotes; put the text in quotes, or end lines by"
            " line feeds"
        )
    return f"broken CSV: {error}; end each quote, and write a quote in a text twice"


def _delimiter(line: str) -> str:
    outside = "".join(line.split('"')[::2])

    def counts(mark: str) -> tuple[int, int]:
        """Numbers of occurrences: those not before a blank, as commas of a text are, then all."""
        number = outside.count(mark)
        return number - outside.count(f"{mark} "), number

    return max(_DELIMITERS, key=counts)
