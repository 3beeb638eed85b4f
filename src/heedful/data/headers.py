"""Recognition of a first line that names the columns of a table."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from heedful.data.language_tags import NAMES, language_of, macrolanguage_of
from heedful.errors import UserError

# What the label of a row is: one class; any number of classes; one number or several.
Problem: TypeAlias = Literal["single_label", "multi_label", "regression"]
LABEL = "label"  # the column in which empty cells are errors, and JSONL numbers are allowed


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


class OtherLabel(str):
    """The text of a label that is no single class: a list, or a number that is not an integer."""


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


def label_text(value: object) -> str | None:
    """A label of JSON or of a table as text; None: it is none. Items of a list have no commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return OtherLabel(value)
    if isinstance(value, list):
        items = [label_text(item) for item in value]
        texts = [item for item in items if item is not None and "," not in item]
        return OtherLabel(",".join(texts)) if len(texts) == len(items) else None
    return value if isinstance(value, str) else None


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
