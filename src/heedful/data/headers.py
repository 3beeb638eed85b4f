"""Recognition of a first line that names the columns of a table."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from heedful.errors import UserError

# What the label of a row is: one class; any number of classes; one number or several.
Problem: TypeAlias = Literal["single_label", "multi_label", "regression"]
LABEL = "label"  # the column in which empty cells are errors, and JSONL numbers are allowed


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
    path: Path, rows: Sequence[Sequence[str]], fields: Mapping[str, str | int | None]
) -> bool:
    """True if the first of some rows of a table names the columns.

    Its cells are all names of columns in common data sets, or names or codes of languages; or its
    label occurs in no other row, where other labels are repeated.

    Args:
        fields: by name, in the order of the cells, with the column that was given for it.

    Raises:
        UserError: no column was given, and one has the name of a field that is read from another.
    """
    if not rows:
        return False
    cells = [cell.strip().lower() for cell in rows[0]]
    if len({*cells}) == len(cells) and all(map(_is_name, cells)):
        _check_order(path, cells, fields)
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


def _check_order(path: Path, cells: Sequence[str], fields: Mapping[str, str | int | None]) -> None:
    """Raises UserError if a column is read as one field and has the name of another."""
    if any(column is not None for column in fields.values()):
        return
    for number, (field, cell) in enumerate(zip(fields, cells, strict=True), 1):
        named = next((name for name in fields if cell in _SAME.get(name, ())), field)
        if named != field:
            raise UserError(
                f"{path}: the first line names column {number} {cell!r}, which is read as the "
                f"{field}: give columns, such as data.train.{named}_field={number}, or "
                "data.train.header=false if this line is a row"
            )


def _is_name(cell: str) -> bool:
    language = _REGION.sub("", cell)
    return cell.replace(" ", "_").replace("-", "_") in _NAMES or language in _LANGUAGES


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()
