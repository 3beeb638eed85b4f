"""The formats of output shards: JSON lines, text and Parquet, as bytes."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from heedful import extras
from heedful.bulk.tasks import BulkTask
from heedful.errors import UserError
from heedful.files import one_line

Format = Literal["jsonl", "text", "parquet"]
SUFFIXES: Mapping[str, str] = {"jsonl": ".jsonl", "text": ".txt", "parquet": ".parquet"}
Record = Mapping[str, Any]
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def check_format(name: str, task: type[BulkTask[Any]]) -> None:
    """Raise UserError for an unknown format, or one that cannot hold the results of a task."""
    if name not in SUFFIXES:
        raise UserError(f"format must be {', '.join(SUFFIXES)}, not {name}")
    if name == "text" and not task.main:
        raise UserError("the format text holds one value a row; take jsonl or parquet")
    if name == "parquet":
        extras.require("parquet", "the format parquet")


def encode(records: Sequence[Record], name: str, task: BulkTask[Any]) -> bytes:
    """The content of a shard's file.

    Args:
        records: the file, the line, and the texts, values or error of each row.
        name: a `Format`. In text a row with an error is a blank line, and spaces replace the line
            breaks of a text, so that line n belongs to row n.
    """
    if name == "jsonl":
        return "".join([_encode(record) + "\n" for record in records]).encode()
    if name == "text":
        return "".join([_line(record.get(task.main)) + "\n" for record in records]).encode()
    import pyarrow as pa
    from pyarrow import parquet

    texts = dict.fromkeys(task.columns, pa.string())
    types = {"file": pa.string(), "line": pa.int64(), **texts, **task.arrow_types()}
    schema = pa.schema({**types, "error": pa.string()})
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([*map(dict, records)], schema), sink)
    return sink.getvalue()


def _line(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return "" if value is None else one_line(str(value))
