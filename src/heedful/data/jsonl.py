"""Rows of JSONL files: one object a line."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from heedful.data.labels import label_text
from heedful.data.rows import LABEL, Chunk, Rows, TextOf
from heedful.data.text_files import BlockPlace, LineBlock, read_line_blocks
from heedful.errors import UserError
from heedful.files import parse_json


def jsonl_chunks(
    path: Path, keys: Mapping[str, str], places: Sequence[BlockPlace] | None = None
) -> Iterator[Chunk]:
    """Rows of the values of keys, one for each column."""
    for block in read_line_blocks([path], places):
        yield Chunk(block, partial(_parse, keys), block.plain_place)


def jsonl_record_chunks(
    path: Path, column: str, text_of: TextOf, places: Sequence[BlockPlace] | None = None
) -> Iterator[Chunk]:
    """Rows of one text, each made by `text_of` of a whole object."""
    for block in read_line_blocks([path], places):
        yield Chunk(block, partial(_parse_records, column, text_of), block.plain_place)


def _parse(keys: Mapping[str, str], block: LineBlock) -> Rows:
    columns: dict[str, list[str]] = {column: [] for column in keys}
    for location, entry in _objects(block):
        for column, key in keys.items():
            text = "" if entry is None else _text(entry, key, location, column == LABEL)
            columns[column].append(text)
    return Rows.of_lines(columns, str(block.paths[0]), block.first)


def _parse_records(column: str, text_of: TextOf, block: LineBlock) -> Rows:
    texts = ["" if record is None else text_of(record, where) for where, record in _objects(block)]
    return Rows.of_lines({column: texts}, str(block.paths[0]), block.first)


def _objects(block: LineBlock) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The file and line, and the object, of each line; None for a blank line."""
    for number, line in enumerate(block.texts(0), block.first):
        location = f"{block.paths[0]}, line {number}"
        if not line.strip():
            yield location, None
            continue
        entry = parse_json(line, location, partial(_object, location))
        if not isinstance(entry, dict):
            raise UserError(f"{location}: not a JSON object; write one object a line")
        yield location, entry


def _object(location: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; raises UserError for a key with two values, of which the first would be lost."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in entry if keys.count(key) > 1)
        raise UserError(f"{location}: the key {twice!r} stands twice in an object; remove one")
    return entry


def _text(entry: dict[str, object], key: str, location: str, is_label: bool) -> str:
    if key not in entry:
        keys = ", ".join(map(repr, entry)) or "none"
        raise UserError(
            f"{location}: no key {key!r} (found: {keys}); set the field to the right key"
        )
    if entry[key] is None:
        raise UserError(f"{location}: {key!r} is null; write a text, or drop the line")
    text = label_text(entry[key]) if is_label else entry[key]
    if not isinstance(text, str):
        raise UserError(f"{location}: {key!r} is not a text; write it as a JSON string")
    return text
