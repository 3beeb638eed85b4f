"""Rows of TSV files: columns separated by tabs, without quoting, with or without a header."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

from heedful.data.language_tags import NAMES, language_of, macrolanguage_of
from heedful.data.rows import LABEL, Chunk, Field, Rows
from heedful.data.text_files import BlockPlace, LineBlock, decode_lines, read_line_blocks
from heedful.errors import UserError, format_names

_BLANK_LINES = re.compile(rb"\s*\n")
# Names of columns in common data sets; names and codes of languages.
_COLUMN_NAMES = """
src source tgt target trg ref reference input output text texts text1 text2 text_a text_b
sentence sentence1 sentence2 sentence_a sentence_b premise hypothesis question answer query
passage review comment tweet title label labels class category sentiment polarity intent
rating score original translation translated source_text target_text source_sentence
target_sentence src_text tgt_text
"""
_LANGUAGE_NAMES = """
arabic bengali bulgarian catalan chinese croatian czech danish dutch english estonian finnish
french german greek hebrew hindi hungarian icelandic indonesian irish italian japanese korean
latvian lithuanian malay norwegian persian polish portuguese romanian russian serbian slovak
slovenian spanish swahili swedish tamil thai turkish ukrainian urdu vietnamese welsh
ar bg bn ca cs cy da de el en es et fa fi fr ga he hi hr hu id is it ja ko lt lv ms nl no pl
pt ro ru sk sl sr sv sw ta th tr uk ur vi zh
"""
_NAMES, _LANGUAGES = frozenset(_COLUMN_NAMES.split()), frozenset(_LANGUAGE_NAMES.split())
_CODES = {name.lower(): code for code, name in NAMES.items()}
# Names of columns that can only be one field of a table.
_SAME = {
    "src": ("src", "source", "source_text"),
    "tgt": ("tgt", "trg", "target", "target_text", "translation"),
    "text": ("text", "sentence", "review"),
    LABEL: ("label", "labels", "class", "category", "sentiment"),
}
_REGION = re.compile(r"[-_][a-z]{2,4}$")  # of a language code
_MIN_ROWS = 10  # from which a label that occurs once is a name
_MIN_REPEATS = 4.0  # mean number of rows of a label, likewise


class ColumnOrderError(UserError):
    """Names of columns that contradict the fields which are read from them.

    Attributes:
        problem: the message without the remedy.
        columns: for each field the number of the column with its name, or N.
    """

    def __init__(self, problem: str, columns: Mapping[str, int | str]) -> None:
        given = " ".join(f"data.train.{name}_field={number}" for name, number in columns.items())
        super().__init__(
            f"{problem}: give columns, such as {given}, or data.train.header=false if this line is "
            "a row"
        )
        self.problem = problem
        self.columns = columns


def tsv_chunks(
    path: Path,
    fields: Mapping[str, Field | None],
    header: bool | None = None,
    languages: Mapping[str, str] | None = None,
    places: Sequence[BlockPlace] | None = None,
) -> Iterator[Chunk]:
    """Rows of some columns of a table, in which each line has the same number of columns.

    Args:
        fields: the number of each column from 1, or its name in the header; all None: the table has
            exactly these columns, in order.
        header: the first line, of columns that are not given by name, is a header, which is left
            out; None: if it is recognized as one (`has_names`).
        languages: by column; a recognized header must not contradict them.
    """
    explicit_fields = [field for field in fields.values() if field is not None]
    columns: list[int] = []
    # The number of columns of each line; 0: that of the first line that is not blank.
    width = 0 if explicit_fields else len(fields)
    for block in read_line_blocks([path], places):
        place = block.plain_place
        if not columns and not any(isinstance(field, str) for field in explicit_fields):
            columns = [i if f is None else int(f) - 1 for i, f in enumerate(fields.values())]
            if min(columns) < 0:
                raise UserError(
                    f"columns are counted from 1, so there is no column {min(columns) + 1}"
                )
            if header is None:
                header = has_names(path, _cells(block, columns), fields, languages or {})
            if header:
                block = _without_header(block)
        elif not columns:  # a file with a header
            if not all(isinstance(field, str) for field in explicit_fields):
                raise UserError(
                    f"{path}: give all columns by name or all by number, not some of each"
                )
            line, end, _ = block.data(0).partition(b"\n")
            names = next(decode_lines([line + end], str(path)), "").split("\t")
            columns, width = header_columns(path, names, fields), len(names)
            block = _without_header(block)
        if not width:
            first = (line for line in BytesIO(block.data(0)) if line.strip())
            width = next((line.count(b"\t") + 1 for line in first), 0)
        index_of = dict(zip(fields, columns, strict=True))
        yield Chunk(block, partial(_parse, index_of, width, bool(header)), place)


def _without_header(block: LineBlock) -> LineBlock:
    """The first block of a file without its first line that is not blank.

    Blank lines before it count as if they followed it, so that rows keep their line numbers.
    """
    lines = block.data(0)
    blank = _BLANK_LINES.match(lines)
    start = 0 if blank is None else blank.end()
    return block.with_content(2, [lines[:start] + lines[start:].partition(b"\n")[2]])


def _cells(block: LineBlock, columns: Sequence[int]) -> list[list[str]]:
    """The cells of some columns, for each line with all of these columns.

    Empty if the first line lacks one of them.
    """
    lines = [line.split("\t") for line in block.texts(0) if line.strip()]
    if not lines or len(lines[0]) <= max(columns):
        return []
    return [[cells[i] for i in columns] for cells in lines if len(cells) > max(columns)]


def header_columns(
    path: Path, header: Sequence[str], fields: Mapping[str, Field | None], line: int = 1
) -> list[int]:
    """The index of each field in the header of a table, which is a line of its file."""
    header = [name.strip() for name in header]
    # Fields that are not given have the names of their keys.
    names = [str(key if field is None else field) for key, field in fields.items()]
    for name in names:
        if header.count(name) != 1:
            count = "two columns" if name in header else "no column"
            raise UserError(
                f"{path}, line {line}: the header has {count} {name!r} (its columns:"
                f" {format_names(header)}); name another column"
            )
    return [header.index(name) for name in names]


def _parse(columns: Mapping[str, int], width: int, has_header: bool, block: LineBlock) -> Rows:
    """The rows of a block.

    Args:
        columns: the index of each column.
        width: the number of columns of a line.
    """
    last = max(columns.values())
    blank, rows = [""] * max(width, last + 1), []
    for number, line in enumerate(block.texts(0), block.first):
        cells = line.split("\t")
        if len(cells) != width or last >= width:
            if line.strip():
                raise UserError(
                    f"{block.paths[0]}, line {number}: {len(cells)} columns where there must be"
                    f" {len(blank)}; keep tabs out of the texts, or name other columns"
                )
            cells = blank
        rows.append(cells)
    texts = {name: [cells[column] for cells in rows] for name, column in columns.items()}
    num_headers = int(has_header and block.first == 2)
    return Rows.of_lines(texts, str(block.paths[0]), block.first, num_headers=num_headers)


def has_names(
    path: Path,
    rows: Sequence[Sequence[str]],
    fields: Mapping[str, str | int | None],
    languages: Mapping[str, str],
) -> bool:
    """True if the first of some rows of a table names the columns.

    Its cells are all names of columns in common data sets, or names or codes of languages; or its
    label occurs in no other row, where other labels are repeated.

    Args:
        fields: by name, in the order of the cells, with the column that was given for it.
        languages: the language of each field that has one.

    Raises:
        ColumnOrderError: no column was given, and one has the name of a field that is read from
            another, or of a language that is not its field's.
    """
    if not rows:
        return False
    cells = [cell.strip().lower() for cell in rows[0]]
    if len({*cells}) == len(cells) and all(map(_is_name, cells)):
        _check_order(path, cells, fields, languages)
        return True
    if LABEL not in fields or len(rows) <= _MIN_ROWS:
        return False
    label = [*fields].index(LABEL)
    counts = Counter(row[label].strip() for row in rows[1:])
    is_repeated = len(rows) - 1 >= _MIN_REPEATS * len(counts)
    first = rows[0][label].strip()
    is_name = first != "" and "," not in first and not _is_number(first)
    return is_repeated and first not in counts and is_name


def _check_order(
    path: Path,
    cells: Sequence[str],
    fields: Mapping[str, str | int | None],
    languages: Mapping[str, str],
) -> None:
    """Raises ColumnOrderError if a column is read as one field and has the name of another."""
    if any(column is not None for column in fields.values()):
        return
    named = [
        _field_named(cell, field, fields, languages)
        for cell, field in zip(cells, fields, strict=True)
    ]
    for number, (field, cell) in enumerate(zip(fields, cells, strict=True), 1):
        if named[number - 1] == field:
            continue
        known = {name: column for column, name in enumerate(named, 1) if name is not None}
        language = f" ({languages[field]})" if field in languages else ""
        raise ColumnOrderError(
            f"{path}: the first line names column {number} {cell!r}, which is read as the "
            f"{field}{language}",
            {**dict.fromkeys(fields, "N"), **known},
        )


def _field_named(
    cell: str, field: str, fields: Mapping[str, object], languages: Mapping[str, str]
) -> str | None:
    """The field that a column's name means; `field` if it may be this one; None: no field."""
    if not _is_language(cell) or field not in languages:
        return next((name for name in fields if cell in _SAME.get(name, ())), field)
    language = language_of(_CODES.get(cell, cell))
    exact = [name for name, tag in languages.items() if language_of(tag) == language]
    if exact:
        return field if field in exact else exact[0]
    is_related = macrolanguage_of(languages[field]) == macrolanguage_of(language)
    return field if is_related else None


def _is_language(cell: str) -> bool:
    return _REGION.sub("", cell) in _LANGUAGES


def _is_name(cell: str) -> bool:
    return cell.replace(" ", "_").replace("-", "_") in _NAMES or _is_language(cell)


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()
