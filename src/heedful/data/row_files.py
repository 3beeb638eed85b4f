"""Rows of files: what a path names, its format, and the sources that read one or more files."""

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from heedful.data.csv_rows import csv_units
from heedful.data.jsonl import jsonl_chunks, jsonl_record_chunks
from heedful.data.labels import ProblemType, checked_labels
from heedful.data.pair_files import (
    PAIR_FORMATS,
    pair_units,
    subtitle_units,
)
from heedful.data.plain_text import text_chunks
from heedful.data.rows import (
    CORPUS,
    LABEL,
    Chunk,
    Field,
    FilePlaces,
    Rows,
    TextOf,
    TextUnit,
    collect,
    is_blank,
)
from heedful.data.tables import table_chunks, table_record_chunks
from heedful.data.text_files import (
    BlockPlace,
    LineBlock,
    check_no_document,
    read_line_blocks,
    read_lines,
    without_compression,
)
from heedful.data.tsv import tsv_chunks
from heedful.data.unit_blocks import unit_chunks
from heedful.errors import UserError

# The formats of files with one ending in their name, beside that of compression.
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".tsv": "tsv", ".csv": "csv"}
_FORMATS |= {".tmx": "tmx", ".xliff": "xliff", ".xlf": "xliff", ".po": "po", ".pot": "po"}
_FORMATS |= {".sdlxliff": "xliff", ".mqxliff": "xliff", ".mxliff": "xliff"}
_FORMATS |= {".mo": "mo", ".srt": "subtitles", ".vtt": "subtitles"}
_DATASET = ("state.json", "dataset_dict.json")  # in a folder that is one table
ReadFile: TypeAlias = Callable[..., Iterator[Chunk]]  # with the argument `places`


@dataclass(frozen=True)
class FileRows:
    """The rows of files; made by `open_rows`.

    Attributes:
        files: for each file, or group of line-parallel files, its paths, and the function that
            reads it.
        as_texts: make each text of labeled texts, or of labeled pairs, a row with the one column
            `text`.
        corpus: the name of the rows' corpus, which becomes a column; "": none.
        problem: the kind of the labels; a cell of several labels may be empty, or a list.
    """

    columns: tuple[str, ...]
    files: tuple[tuple[tuple[Path, ...], ReadFile], ...]
    keep_empty: bool = False
    as_texts: bool = False
    corpus: str = ""
    problem: ProblemType = "single_label"

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the rows."""
        columns = ("text",) if self.as_texts else self.columns
        return (*columns, CORPUS) if self.corpus else columns

    @property
    def num_bytes(self) -> int:
        """The size of the files."""
        paths = [path for paths, _ in self.files for path in paths]
        files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
        return sum(file.stat().st_size for file in files if file.is_file())

    def chunks(self, places: FilePlaces | None = None) -> Iterator[Chunk]:
        """The rows in chunks; see `RowSource.chunks`."""
        without_files = replace(self, files=())  # each chunk is sent with it
        for index, (_, read) in enumerate(self.files):
            for chunk in read(places=(places or {}).get(index)):
                parse = partial(without_files.parse, chunk.parse_block)
                yield replace(chunk, parse_block=parse, file_index=index, corpus=self.corpus)

    def parse(self, parse_block: Callable[[Any], Rows], block: Any) -> Rows:
        """The rows of a block without empty ones, which are counted."""
        rows = parse_block(block)
        empty = dict.fromkeys(self.columns, 0)
        is_empty = np.zeros(len(rows), bool)
        for column in self.columns:
            if column != LABEL and not self.keep_empty:
                blank = [index for index, text in enumerate(rows[column]) if is_blank(text)]
                empty[column] = len(blank)
                is_empty[blank] = True
        left = rows.select(np.flatnonzero(~is_empty)) if is_empty.any() else rows
        assert left.locations is not None
        columns = left.columns
        if LABEL in columns:
            # Labels that are not read may be of any kind.
            problem: ProblemType = "multi_label" if self.as_texts else self.problem
            labels = checked_labels(left[LABEL], left.file_names[0], left.locations[1], problem)
            columns = {**columns, LABEL: labels}
        num_empty = len(rows) - len(left)
        report = replace(rows.report, num_kept=len(left), num_empty=num_empty, empty=empty)
        rows = Rows(columns, report, left.file_names, left.locations)
        if self.as_texts:
            rows = _as_texts(rows)
        return rows.of_corpus(self.corpus) if self.corpus else rows


@dataclass(frozen=True)
class JoinedRows:
    """The rows of several sources with the same columns, one after the other."""

    sources: tuple[FileRows, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(source.num_bytes for source in self.sources)

    def chunks(self, places: FilePlaces | None = None) -> Iterator[Chunk]:
        """The rows in chunks; see `RowSource.chunks`."""
        first = 0
        for source in self.sources:
            known = {index - first: found for index, found in (places or {}).items()}
            for chunk in source.chunks(known):
                yield replace(chunk, file_index=first + chunk.file_index)
            first += len(source.files)


def open_rows(
    files: Sequence[Path] | Mapping[str, Sequence[Path]],
    fields: Mapping[str, Field | None] | None = None,
    *,
    unit: TextUnit = "line",
    header: bool | None = None,
    languages: Mapping[str, str] | None = None,
    keep_empty: bool = False,
) -> FileRows:
    """The rows of files, to be read in chunks; arguments and errors as in `read_rows`.

    Args:
        header: a .tsv file has a line with names of columns, or not; None: it is recognized.
        languages: by column; a recognized header must not contradict them.
    """
    groups: list[tuple[tuple[Path, ...], ReadFile]]
    if isinstance(files, Mapping):
        columns = tuple(files)
        if len(set(map(len, files.values()))) > 1:
            counts = " but ".join(f"{len(paths)} {column} files" for column, paths in files.items())
            raise UserError(f"{counts} are given; line-parallel files must be given in pairs")
        groups = [
            (paths, partial(_read_parallel_chunks, columns, paths))
            for paths in zip(*files.values(), strict=True)
        ]
    else:
        fields = {"text": None} if fields is None else fields
        columns = tuple(fields)
        groups = [
            ((path,), partial(read_chunks, path, fields, unit, header, languages)) for path in files
        ]
    if not groups:
        raise UserError("no files are given; name at least one")
    return FileRows(columns, tuple(groups), keep_empty)


def read_rows(
    files: Sequence[Path] | Mapping[str, Sequence[Path]],
    fields: Mapping[str, Field | None] | None = None,
    *,
    unit: TextUnit = "line",
    keep_empty: bool = False,
) -> Rows:
    r"""Read the rows of one or more files, in order, into memory.

    The format of a file is determined by its name, without a final .gz or .zst:

    * line-parallel files, if `files` maps each column to its files;
    * .tsv: columns separated by tabs, without quoting, the same number in every line. Fields are
      numbers, or names in the first line; all `None`: the file has exactly these columns, in order,
      and one column is lines of text. Without names, a first line of several that is recognized as
      a header (`heedful.data.tsv`) is left out and counted;
    * .csv: the same with quotes, and with commas, semicolons, tabs or bars between columns, by
      which is most frequent in the first row;
    * .tmx, .xliff, .xlf, .sdlxliff, .mqxliff, .mxliff, .po, .pot, .mo: pairs, for the columns `src`
      and `tgt`, with the languages of the call; two .srt or .vtt files beside each other are pairs
      by time;
    * .jsonl, .ndjson: one object per line. A field is a key; `None` means the name of the column;
    * .parquet, and folders of `Dataset.save_to_disk`: a field is a column, `a.b` a field of a
      struct; `None` means the name of the column; missing values are empty texts;
    * other names are plain text, for one column: a row is a line, a paragraph (lines between blank
      lines, joined by "\n") or a file, by `unit`, which the other formats ignore.

    Rows with an empty column (nothing displayed) are left out and counted, unless `keep_empty`. The
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
    read = partial(_read_record_chunks, column=column, text_of=text_of)
    return FileRows((column,), tuple(((path,), partial(read, path)) for path in files))


def expand_path(path: Path) -> list[Path]:
    """The files of a path or pattern, sorted by name.

    A folder means all files in it that are not hidden, unless it is a table of `datasets`; a name
    with `*`, `?` or `[` that is not the name of a file means all files that match it.

    Raises:
        UserError: no file matches; `-`, which other commands read as standard input.
    """
    if path.name == "-" and not path.exists():
        raise UserError(
            "- is no file: a run reads its data twice, so store standard input in a file first"
        )
    if path.is_dir() and not any((path / name).exists() for name in _DATASET):
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        if not files:
            raise UserError(f"the folder {path} has no files; name another one")
        return files
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    if not (matches := sorted(map(Path, glob.glob(str(path))))):
        raise UserError(f"no file matches the pattern {path}; correct it")
    return matches


def format_of(path: Path) -> str:
    """The format of a file by its name: "table", "text" or a value of `_FORMATS`."""
    if path.suffix.lower() == ".parquet" or path.is_dir():
        return "table"
    return _FORMATS.get(without_compression(path).suffix.lower(), "text")


def depends_on_languages(path: Path) -> bool:
    """True for a file of pairs, whose units are chosen by the languages of its rows."""
    return format_of(path) in PAIR_FORMATS


def read_chunks(
    path: Path,
    fields: Mapping[str, Field | None],
    unit: TextUnit,
    header: bool | None = None,
    languages: Mapping[str, str] | None = None,
    places: Sequence[BlockPlace] | None = None,
) -> Iterator[Chunk]:
    """The rows of a file in chunks, at least one, with empty rows; arguments as in `open_rows`.

    Args:
        places: those of all chunks, if an earlier call has found them: they are read by `parse`.
    """
    kind = format_of(path)
    has_columns = kind in ("csv", "tsv") and [*fields.values()] != [None]
    if header and not has_columns:
        raise UserError(
            f"{path} has no line of column names to leave out, so header=true has no effect; it is "
            "for .tsv and .csv files, in which the columns of text are given by number"
        )
    if kind == "table":
        return table_chunks(path, _names(path, "a table", fields))
    if kind == "jsonl":
        return jsonl_chunks(path, _names(path, "JSONL", fields), places)
    if has_columns and kind == "csv":
        return unit_chunks(path, [*fields], csv_units(path, fields, header, languages or {}))
    if kind in PAIR_FORMATS:
        _check_pairs(path, fields)
        return unit_chunks(path, [*fields], pair_units(kind, path, languages or {}))
    if has_columns:
        return tsv_chunks(path, fields, header, languages, places)
    if len(fields) > 1:
        check_no_document(path)
        raise UserError(
            f"{path} must be a .tsv, .csv, .jsonl or .parquet file to hold {len(fields)} columns"
            f" ({', '.join(fields)}), or of pairs a .tmx, .xliff or .po file; convert it"
        )
    advice = "name its column of texts, or save them as .txt or .jsonl"
    _check_plain_text(path, advice)
    if kind == "tsv":
        _check_one_column(path, advice)
    if unit == "line":
        return _line_chunks([*fields], [path], places)
    [column] = fields
    return text_chunks(column, path, unit)


def _read_parallel_chunks(
    columns: Sequence[str], paths: Sequence[Path], places: Sequence[BlockPlace] | None = None
) -> Iterator[Chunk]:
    """The rows of line-parallel files in chunks, at least one; `places`: as in `read_chunks`."""
    if [*map(format_of, paths)] == ["subtitles"] * 2:
        return unit_chunks(" and ".join(map(str, paths)), columns, subtitle_units(paths))
    advice = "in a recipe, give it as file"
    for path in paths:
        _check_plain_text(path, advice)
        if format_of(path) == "tsv":
            _check_one_column(path, advice)
    return _line_chunks(columns, paths, places)


def _line_chunks(
    columns: Sequence[str], paths: Sequence[Path], places: Sequence[BlockPlace] | None
) -> Iterator[Chunk]:
    """Rows of one line each, of a file, or of one file a column that are line-parallel."""
    for block in read_line_blocks(paths, places):
        yield Chunk(block, partial(_parse_lines, columns), block.plain_place)


def _parse_lines(columns: Sequence[str], block: LineBlock) -> Rows:
    texts = {column: block.texts(side) for side, column in enumerate(columns)}
    return Rows.of_lines(texts, " and ".join(map(str, block.paths)), block.first)


def _read_record_chunks(
    path: Path, column: str, text_of: TextOf, places: Sequence[BlockPlace] | None = None
) -> Iterator[Chunk]:
    """Rows of one text, each made by `text_of` of a whole object of JSONL or row of a table."""
    kind = format_of(path)
    if kind == "jsonl":
        return jsonl_record_chunks(path, column, text_of, places)
    if kind == "table":
        return table_record_chunks(path, column, text_of)
    raise UserError(
        f"{path} must be a .jsonl or .parquet file, or a folder of datasets; convert it"
    )


def _check_pairs(path: Path, fields: Mapping[str, Field | None]) -> None:
    """Raise UserError unless the fields of a file of translators are a source and a target."""
    if [*fields] != ["src", "tgt"]:
        raise UserError(
            f"{path} holds pairs of a source and a target, not {', '.join(fields)}; it is data for "
            f"translation, and translated itself by: heedful translate MODEL -i {path.name}"
        )
    if any(field is not None for field in fields.values()):
        raise UserError(f"{path} has no columns to name; leave the fields of src and tgt out")


def _check_plain_text(path: Path, advice: str) -> None:
    """Raise UserError for a file whose name is that of another format.

    Args:
        advice: how to read a table.
    """
    kind = format_of(path)
    if (kind == "table" and path.is_file()) or kind in ("jsonl", "csv"):
        raise UserError(f"{path} is a table, not lines of text; {advice}")
    if kind in PAIR_FORMATS:
        raise UserError(f"{path} holds pairs, not lines of text; in a recipe, give it as file")
    if kind == "subtitles":
        raise UserError(
            f"{path} is a file of subtitles, not lines of text; give one for each side of pairs, or"
            " save its texts as .txt"
        )
    if kind == "json":
        raise UserError(
            f"{path} is not lines of text, by its name; convert it to .tsv or .jsonl and give it "
            "as file, or rename it to .txt if it is text"
        )


def _check_one_column(path: Path, advice: str) -> None:
    """Raise UserError for a .tsv file with tabs in its first line that is not blank."""
    if "\t" in next(filter(str.strip, read_lines(path)), ""):
        raise UserError(f"{path} has several columns, not lines of text; {advice}")


def _names(path: Path, format: str, fields: Mapping[str, Field | None]) -> dict[str, str]:
    """The field of each column in a format with named fields; raises UserError for a number."""
    if any(isinstance(field, int) for field in fields.values()):
        raise UserError(
            f"{path} is {format}, whose fields have names; name them instead of numbers"
        )
    return {column: str(field or column) for column, field in fields.items()}


def _as_texts(rows: Rows) -> Rows:
    """One row for each text of labeled texts or pairs, without labels."""
    sides = [rows[column] for column in ("text", "pair") if column in rows]
    texts = [text for row in zip(*sides, strict=True) for text in row]
    assert rows.locations is not None
    locations = np.repeat(rows.locations, len(sides), axis=1)
    return Rows(
        {"text": texts}, replace(rows.report, num_kept=len(texts)), rows.file_names, locations
    )
