"""Rows of tables: Parquet files, and folders that the package `datasets` has saved."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.errors import UserError, format_names
from heedful.files import plain_name, read_object

_BATCH_ROWS = 4_096  # held at a time
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream: the library reads on without it


def is_table(path: Path) -> bool:
    """Whether a path is read as a table: a name in .parquet, or a folder."""
    return path.suffix == ".parquet" or path.is_dir()


def table_files(path: Path) -> list[Path]:
    """The files that hold a table's rows, in their order.

    Raises:
        UserError: a folder that `Dataset.save_to_disk` has not written, or one of several splits.
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
    found = [each.get("filename") if isinstance(each, dict) else each for each in files]
    return [path / plain_name(name, state) for name in found]


def read_table(path: Path, columns: Sequence[tuple[str, bool]]) -> Iterator[list[str]]:
    """The cells of each row in these columns, some rows at a time; a missing value is empty.

    Args:
        columns: names, and whether a column may hold what is no text: whole numbers, true and
            false, and classes, which become their names. `a.b` is the field b of a column a of
            structures, such as the language of a translation.

    Raises:
        UserError: pyarrow is not installed; a file that cannot be read or is damaged; no such
            column; one that holds no text.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} is a table, which needs the package pyarrow: pip install 'heedful[parquet]'"
        ) from error
    for file in table_files(path):
        with _told(file, pa):
            if path.is_dir():
                with pa.OSFile(str(file)) as source:
                    if source.read_at(len(_END), max(0, source.size() - len(_END))) != _END:
                        raise pa.ArrowInvalid("it has no end")
                    source.seek(0)
                    with pa.ipc.open_stream(source) as stream:
                        yield from _rows(file, stream.schema, stream, columns, pa)
            else:
                with parquet.ParquetFile(file) as opened:
                    wanted = [name for name, _ in columns]
                    batches = opened.iter_batches(_BATCH_ROWS, columns=wanted)
                    yield from _rows(file, opened.schema_arrow, batches, columns, pa)


def _rows(
    file: Path, schema: Any, batches: Any, columns: Sequence[tuple[str, bool]], pa: Any
) -> Iterator[list[str]]:
    """The rows of batches of a schema; a structure's fields are columns of their own."""
    flat = schema.empty_table().flatten().schema
    shown = {name: _shown(file, schema, flat, name, is_any, pa) for name, is_any in columns}
    for batch in batches:
        batch.validate(full=True)  # sizes, and UTF-8: the library reads past the end otherwise
        table = pa.Table.from_batches([batch]).flatten()
        for start in range(0, table.num_rows, _BATCH_ROWS):
            part = table.slice(start, _BATCH_ROWS)
            cells = [map(shown[name], part.column(name).to_pylist()) for name, _ in columns]
            yield from map(list, zip(*cells, strict=True))


def _shown(
    file: Path, schema: Any, flat: Any, name: str, is_any: bool, pa: Any
) -> Callable[[Any], str]:
    """A cell of a column as text; raises UserError where there is none, or it has no text."""
    if flat.names.count(name) != 1:
        often = "twice" if name in flat.names else "not"
        raise UserError(
            f"{file}: column {name!r} is {often} in the table ({format_names(flat.names)});"
            " name a column that is there once"
        )
    kind = flat.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    fits = [pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view]
    fits += [pa.types.is_integer, pa.types.is_boolean] if is_any else []
    if not any(test(kind) for test in fits):
        raise UserError(f"{file}: {name!r} holds {kind}, not text; name another column")
    classes = _classes(schema, name) if is_any else []

    def text(value: Any) -> str:
        if value is None:
            return ""
        if classes and isinstance(value, int):  # -1: not known
            return classes[value] if 0 <= value < len(classes) else ""
        return str(value).lower() if isinstance(value, bool) else str(value)

    return text


def _classes(schema: Any, name: str) -> Sequence[str]:
    """The names of a column's classes, which `datasets` keeps beside the schema; else none."""
    try:
        said = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][name]
        names = said["names"] if said["_type"] == "ClassLabel" else []
    except (KeyError, TypeError, ValueError):
        return []
    return [str(each) for each in names] if isinstance(names, list) else []


@contextmanager
def _told(file: Path, pa: Any) -> Iterator[None]:
    """Errors of the library as a user understands them."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"cannot read {file}: No such file or directory") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{file} is damaged, or no table ({reason}); fetch it again") from error
