"""Read rows of text from plain text, TSV, JSONL, line-parallel files and tables."""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from heedful.data.columns import DataReport, merge_reports
from heedful.data.tables import is_table, read_objects, read_table
from heedful.errors import UserError, format_names
from heedful.files import open_bytes, parse_json

Field: TypeAlias = int | str  # the number of a column, from 1, or the name of a column or key
Unit: TypeAlias = Literal["line", "paragraph", "file"]

LABEL = "label"  # the column in which empty cells are errors, and JSONL numbers are allowed
MESSAGES = "messages"  # the column with conversations as JSON
CORPUS = "corpus"  # the column with the name of each row's corpus (`data.corpora`)

# Bytes; a file without line breaks, such as a binary one, is not read into memory.
LONGEST_LINE = 1 << 28
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


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

    def of_corpus(self, name: str) -> "Rows":
        """The rows with the name of their corpus in the column `CORPUS`."""
        columns = {**self.columns, CORPUS: [name] * len(self)}
        return Rows(columns, self.report, self.sources, self.locations)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts with equal columns, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: [text for part in parts for text in part[name]] for name in parts[0].columns}
    sources: list[str] = []
    locations = []
    for part in parts:
        if part.locations is not None:
            locations.append(part.locations + np.array([[len(sources)], [0]]))
        sources += part.sources
    joined = np.concatenate(locations, axis=1) if len(locations) == len(parts) else None
    return Rows(columns, merge_reports([part.report for part in parts]), sources, joined)


def read_rows(
    files: Sequence[Path] | Mapping[str, Sequence[Path]],
    fields: Mapping[str, Field | None] | None = None,
    *,
    unit: Unit = "line",
    keep_empty: bool = False,
) -> Rows:
    r"""Read the rows of one or more files, in order.

    The format of a file is determined by its name, without a final .gz:

    * line-parallel files, if `files` maps each column to its files;
    * .tsv (unless one column is read and no field is given): columns separated by tabs, without
      quoting, the same number in every line. Fields are numbers (a file without a header) or names
      (a file with one); all `None`: the file has exactly these columns, in order, and no header;
    * .jsonl: one object per line. A field is a key; `None` means the name of the column;
    * .parquet, and folders of `Dataset.save_to_disk`: a field is a column, `a.b` a field of a
      struct; `None` means the name of the column; missing values are empty texts;
    * other names are plain text, for one column: a row is a line, a paragraph (lines between blank
      lines, joined by "\n") or a file, by `unit`, which the other formats ignore.

    Rows with an empty column (only whitespace) are left out and counted, unless `keep_empty`. The
    column "label" is stripped, must not be empty, and may be an integer or boolean in JSONL and
    tables. Lines, byte order marks and gzip are as in `read_lines`.

    Args:
        fields: the field of each column; default: {"text": None}.

    Raises:
        UserError: no file; a file that cannot be read, is damaged gzip or not UTF-8 (with its
            line); parallel files of different lengths; a line with a syntax error, or without
            a field or label (with its number); a file without rows.
    """
    if isinstance(files, Mapping):
        columns = list(files)
        if len(set(map(len, files.values()))) > 1:
            counts = " but ".join(f"{len(paths)} {column} files" for column, paths in files.items())
            raise UserError(f"{counts} are given; line-parallel files must be given in pairs")
        groups = zip(*files.values(), strict=True)
        sources = [(" and ".join(map(str, paths)), _parallel(paths)) for paths in groups]
    else:
        fields = {"text": None} if fields is None else fields
        columns = list(fields)
        sources = [(str(path), _entries(path, fields, unit)) for path in files]
    if not sources:
        raise UserError("no files are given; name at least one")
    return _collect(columns, sources, keep_empty)


def read_records(
    files: Sequence[Path], column: str, text_of: Callable[[Mapping[str, Any], str], str]
) -> Rows:
    """Rows of one column, each made of a whole object of JSONL or row of a table.

    Args:
        text_of: returns the text of a record, whose second argument is the file and line; a row
            with an empty text is left out and counted.

    Raises:
        UserError: a file of another format, or as `read_rows`; errors of `text_of`.
    """

    def entries(path: Path) -> Iterator[_Entry]:
        for number, record in _records(path):
            text = "" if record is None else text_of(record, f"{path}, line {number}")
            yield _Entry(number, 1, [text])

    return _collect([column], [(str(path), entries(path)) for path in files], keep_empty=False)


def read_lines(path: Path, *, keep_ends: bool = False) -> Iterator[str]:
    r"""The lines of a UTF-8 text file, plain or gzip.

    Only "\n" and "\r\n" end a line. Unicode's other line separators are part of the text: otherwise
    the lines of parallel files would no longer correspond. A byte order mark at the start is
    dropped. Gzip is detected by the first bytes of the file, and required if its name ends in .gz.

    Args:
        keep_ends: end each line that has a line end with "\n"; default: without line ends.

    Raises:
        UserError: the file cannot be read, is not UTF-8 (with the line), or is damaged gzip.
    """
    with _opened(path) as stream:
        lines = iter(lambda: stream.readline(LONGEST_LINE + 1), b"")
        yield from decode_lines(lines, str(path), keep_ends=keep_ends)


def decode_lines(
    lines: Iterable[bytes], name: str, *, first: int = 1, keep_ends: bool = False
) -> Iterator[str]:
    """`read_lines` for lines in bytes.

    Args:
        name: of the file or stream, for messages.
        first: the number of the first line.
    """
    for number, raw in enumerate(lines, first):
        if len(raw) > LONGEST_LINE:
            raise UserError(
                f"{name}, line {number}: longer than {LONGEST_LINE >> 20} MiB; break it into lines"
            )
        line = raw.removeprefix(_BOM) if number == 1 else raw
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: not UTF-8 at byte {error.start + 1} of the line;"
                " convert it to UTF-8"
            ) from error
        yield text + "\n" if keep_ends and line.endswith(b"\n") else text


class _Entry(NamedTuple):
    """A row of a file, before empty rows are left out."""

    line: int  # the number of its first line
    num_lines: int  # the number of its lines
    texts: Sequence[str]  # one per column; empty for blank lines between paragraphs


def _collect(
    columns: Sequence[str], sources: Sequence[tuple[str, Iterable[_Entry]]], keep_empty: bool
) -> Rows:
    """Rows of the entries of `sources` (name, entries), without empty ones, which are counted."""
    rows: dict[str, list[str]] = {column: [] for column in columns}
    locations: list[tuple[int, int]] = []
    empty = dict.fromkeys(columns, 0)
    num_lines = num_empty = 0
    noun = _noun(columns)
    for source, (name, entries) in enumerate(sources):
        before, lines_before = len(locations), num_lines
        for line, size, texts in entries:
            num_lines += size
            row = dict(zip(columns, texts, strict=bool(texts)))
            blank = [c for c, text in row.items() if c != LABEL and not text.strip()]
            if not row or (blank and not keep_empty):
                num_empty += bool(row)
                for column in blank:
                    empty[column] += 1
                continue
            if LABEL in row:
                row[LABEL] = row[LABEL].strip()
                if not row[LABEL]:
                    raise UserError(f"{name}, line {line}: no label; add it, or drop the line")
            for column, text in row.items():
                rows[column].append(text)
            locations.append((source, line))
        if len(locations) == before:
            kind = {"pairs": "pair with text on both sides"}.get(noun, noun.removesuffix("s"))
            raise UserError(
                f"{name} is empty: it holds no {'labeled ' * (LABEL in columns)}{kind} in"
                f" {num_lines - lines_before} lines; leave it out, or name another file"
            )
    report = DataReport(num_lines, len(locations), num_empty, noun=noun, empty=empty)
    names = [name for name, _ in sources]
    return Rows(rows, report, names, np.array(locations, dtype=np.int64).T)


def _noun(columns: Iterable[str]) -> str:
    """The word for rows with these columns in messages."""
    return "pairs" if "tgt" in columns else "chats" if MESSAGES in columns else "texts"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed if it is gzip; raises UserError."""
    try:
        with open_bytes(path) as raw:
            is_gzip = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            if path.suffix == ".gz" and not is_gzip:
                raise UserError(f"{path} is named .gz but is not gzip; rename it or pack it again")
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged gzip: {error}; fetch or pack it again") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {reason}; name a text file") from error


def format_of(path: Path) -> str:
    """The format of a file by its name: table, jsonl, tsv or text."""
    if is_table(path):
        return "table"
    ending = Path(path.name.removesuffix(".gz")).suffix
    return ending[1:] if ending in (".jsonl", ".tsv") else "text"


def _entries(path: Path, fields: Mapping[str, Field | None], unit: Unit) -> Iterator[_Entry]:
    kind = format_of(path)
    if kind == "table":
        return _table(path, fields)
    if kind == "jsonl":
        return _jsonl(path, fields)
    if kind == "tsv" and [*fields.values()] != [None]:
        return _tsv(path, fields)
    if len(fields) > 1:
        raise UserError(
            f"{path} must be a .tsv, .jsonl or .parquet file to hold {len(fields)} columns"
            f" ({', '.join(fields)}); convert it"
        )
    return {"line": _plain_lines, "paragraph": _paragraphs, "file": _whole_file}[unit](path)


def _plain_lines(path: Path) -> Iterator[_Entry]:
    for number, line in enumerate(read_lines(path), 1):
        yield _Entry(number, 1, [line])


def _paragraphs(path: Path) -> Iterator[_Entry]:
    numbered = enumerate(read_lines(path), 1)
    for has_text, group in groupby(numbered, key=lambda pair: bool(pair[1].strip())):
        numbers, lines = zip(*group, strict=True)
        yield _Entry(numbers[0], len(lines), ["\n".join(lines)] if has_text else [])


def _whole_file(path: Path) -> Iterator[_Entry]:
    lines = list(read_lines(path, keep_ends=True))
    text = "".join(lines)
    yield _Entry(1, len(lines), [text] if text.strip() else [])


def _parallel(paths: Sequence[Path]) -> Iterator[_Entry]:
    for path in paths:
        if is_table(path) and path.is_file():
            raise UserError(f"{path} is a table, not lines of text; in a recipe, give it as file")
    for number, lines in enumerate(zip_longest(*map(read_lines, paths)), 1):
        if None in lines:
            counts = [sum(1 for _ in read_lines(path)) for path in paths]
            by_file = [f"{path} has {count}" for path, count in zip(paths, counts, strict=True)]
            raise UserError(
                " lines but ".join(by_file) + "; line n of one must belong to line n of the other"
            )
        yield _Entry(number, 1, lines)


def _tsv(path: Path, fields: Mapping[str, Field | None]) -> Iterator[_Entry]:
    lines = enumerate(read_lines(path), 1)
    given = [field for field in fields.values() if field is not None]
    names: list[str] = []
    if any(isinstance(field, str) for field in given):  # the others have the names of their keys
        names = [str(key if field is None else field) for key, field in fields.items()]
    width = 0 if given else len(fields)
    if not names:
        columns = [i if f is None else int(f) - 1 for i, f in enumerate(fields.values())]
        if min(columns) < 0:
            raise UserError(f"columns are counted from 1, so there is no column {min(columns) + 1}")
    elif not all(isinstance(field, str) for field in given):
        raise UserError(f"{path}: give all columns by name or all by number, not some of each")
    else:
        header = [name.strip() for name in next(lines, (0, ""))[1].split("\t")]
        for name in names:
            if header.count(name) != 1:
                count = "two columns" if name in header else "no column"
                raise UserError(
                    f"{path}, line 1: the header has {count} {name!r} (its columns:"
                    f" {format_names(header)}); name another column"
                )
        columns, width = [header.index(name) for name in names], len(header)
    for number, line in lines:
        if not line.strip():
            yield _Entry(number, 1, [""] * len(fields))
            continue
        cells = line.split("\t")
        width = width or len(cells)
        if len(cells) != width or max(columns) >= width:
            needed = max(width, max(columns) + 1)
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns where there must be {needed};"
                " keep tabs out of the texts, or name other columns"
            )
        yield _Entry(number, 1, [cells[column] for column in columns])


def _jsonl(path: Path, fields: Mapping[str, Field | None]) -> Iterator[_Entry]:
    keys = _names(path, "JSONL", fields)
    for number, entry in _json_objects(path):
        location = f"{path}, line {number}"
        texts = [
            "" if entry is None else _text(entry, key, location, column == LABEL)
            for column, key in keys.items()
        ]
        yield _Entry(number, 1, texts)


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number and the object of each line; None for a blank line."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            yield number, None
            continue
        entry = parse_json(line, f"{path}, line {number}")
        if not isinstance(entry, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; write one object a line")
        yield number, entry


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The numbered records of a JSONL file or a table; None for a blank line."""
    kind = format_of(path)
    if kind == "jsonl":
        return _json_objects(path)
    if kind == "table":
        return enumerate(read_objects(path), 1)
    raise UserError(
        f"{path} must be a .jsonl or .parquet file, or a folder of datasets; convert it"
    )


def _table(path: Path, fields: Mapping[str, Field | None]) -> Iterator[_Entry]:
    names = _names(path, "a table", fields)
    cells = read_table(path, [(name, column == LABEL) for column, name in names.items()])
    for number, row in enumerate(cells, 1):
        yield _Entry(number, 1, row)


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
    text = entry[key]
    if is_label and isinstance(text, int):
        return str(text).lower() if isinstance(text, bool) else str(text)
    if not isinstance(text, str):
        raise UserError(f"{location}: {key!r} is not a text; write it as a JSON string")
    return text
