"""Read rows of tables: Parquet files, and folders written by `datasets.Dataset.save_to_disk`."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from heedful import extras
from heedful.errors import UserError, format_names
from heedful.files import plain_name, read_object

Row = TypeVar("Row")

_BATCH_ROWS = 4_096  # rows in memory at a time
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # pyarrow accepts a truncated stream without it


def is_table(path: Path) -> bool:
    """True if a path is read as a table: a .parquet file or a folder."""
    return path.suffix == ".parquet" or path.is_dir()


def table_files(path: Path) -> list[Path]:
    """The files with the rows of a table, in order.

    Raises:
        UserError: a folder that `Dataset.save_to_disk` has not written, or one with several splits.
    """
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = read_object(path / "dataset_dict.json").get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        raise UserError(f"{path} holds several splits ({names}); name one of its folders")
    state = path / "state.json"
    if not state.is_file():
        raise UserError(
            f"cannot read {path}: Is a directory, and not one that Dataset.save_to_disk wrote (no "
            "state.json)"
        )
    content = read_object(state)
    files = content.get("_data_files")
    if not isinstance(files, list) or content.get("_indices_data_files"):
        raise UserError(f"{state} is damaged or of an old version of datasets; save it again there")
    file_names = [file.get("filename") if isinstance(file, dict) else file for file in files]
    return [path / plain_name(name, state) for name in file_names]


def read_table(path: Path, columns: Sequence[tuple[str, bool]]) -> Iterator[list[str]]:
    """The cells of each row as text; a missing value is "". Reads a few thousand rows at a time.

    Args:
        columns: the name of each column, and whether it may hold integers, booleans and class
            labels (converted to their names) besides text. `a.b` is the field b of a column a of
            structs, such as one language of a translation.

    Raises:
        UserError: pyarrow is not installed; a file cannot be read or is damaged; a column is
            missing or has another type.
    """

    def cells(file: Path, schema: Any, batches: Any, pa: Any) -> Iterator[list[str]]:
        return _rows(file, schema, batches, columns, pa)

    return _read(path, [name for name, _ in columns], cells)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table as objects with all columns. Reads a few thousand rows at a time.

    Raises:
        UserError: pyarrow is not installed; a file cannot be read or is damaged.
    """

    def objects(file: Path, schema: Any, batches: Any, pa: Any) -> Iterator[dict[str, Any]]:
        for batch in batches:
            batch.validate(full=True)
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()

    return _read(path, None, objects)


def _read(
    path: Path,
    columns: list[str] | None,
    rows_of: Callable[[Path, Any, Any, Any], Iterator[Row]],
) -> Iterator[Row]:
    """The rows of all files of a table.

    Args:
        columns: those to read, of a Parquet file; None: all.
        rows_of: returns the rows of a file, from its path, schema, record batches and pyarrow.
    """
    extras.require("parquet", f"{path} is a table, which")
    import pyarrow as pa
    from pyarrow import parquet

    for file in table_files(path):
        with _user_errors(file, pa):
            if path.is_dir():
                with pa.OSFile(str(file)) as source:
                    start = max(0, source.size() - len(_STREAM_END))
                    if source.read_at(len(_STREAM_END), start) != _STREAM_END:
                        raise pa.ArrowInvalid("it is truncated")
                    source.seek(0)
                    with pa.ipc.open_stream(source) as stream:
                        yield from rows_of(file, stream.schema, stream, pa)
            else:
                with parquet.ParquetFile(file) as opened:
                    batches = opened.iter_batches(_BATCH_ROWS, columns=columns)
                    yield from rows_of(file, opened.schema_arrow, batches, pa)


def _rows(
    file: Path, schema: Any, batches: Any, columns: Sequence[tuple[str, bool]], pa: Any
) -> Iterator[list[str]]:
    """The cells of the rows of record batches, with the fields of structs as columns."""
    flat = schema.empty_table().flatten().schema
    to_text = {
        name: _converter(file, schema, flat, name, allows_labels, pa)
        for name, allows_labels in columns
    }
    for batch in batches:
        batch.validate(full=True)  # sizes and UTF-8: pyarrow reads out of bounds otherwise
        table = pa.Table.from_batches([batch]).flatten()
        for start in range(0, table.num_rows, _BATCH_ROWS):
            part = table.slice(start, _BATCH_ROWS)
            cells = [map(to_text[name], part.column(name).to_pylist()) for name, _ in columns]
            yield from map(list, zip(*cells, strict=True))


def _converter(
    file: Path, schema: Any, flat: Any, name: str, allows_labels: bool, pa: Any
) -> Callable[[Any], str]:
    """The function from a cell of a column to text.

    Raises:
        UserError: the column is missing, there are two of it, or it has another type.
    """
    if flat.names.count(name) != 1:
        count = "two columns" if name in flat.names else "no column"
        raise UserError(
            f"{file}: the table has {count} {name!r} (its columns: {format_names(flat.names)});"
            " name another column"
        )
    kind = flat.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    allowed = [pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view]
    allowed += [pa.types.is_integer, pa.types.is_boolean] if allows_labels else []
    if not any(is_type(kind) for is_type in allowed):
        raise UserError(f"{file}: {name!r} holds {kind}, not text; name another column")
    classes = _classes(schema, name) if allows_labels else []

    def text(value: Any) -> str:
        if value is None:
            return ""
        if classes and isinstance(value, int):  # -1: no label
            return classes[value] if 0 <= value < len(classes) else ""
        return str(value).lower() if isinstance(value, bool) else str(value)

    return text


def _classes(schema: Any, name: str) -> Sequence[str]:
    """The class names of a `ClassLabel` column, which `datasets` stores in the schema; else []."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][name]
        names = feature["names"] if feature["_type"] == "ClassLabel" else []
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


@contextmanager
def _user_errors(file: Path, pa: Any) -> Iterator[None]:
    """Raise errors of pyarrow as UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"cannot read {file}: No such file or directory") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{file} is damaged or not a table ({reason}); fetch it again") from error
