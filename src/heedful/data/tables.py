"""Rows of tables: Parquet files, and folders that the package `datasets` has saved."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heedful.data.columns import listed
from heedful.errors import UserError
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
                    schema = opened.schema_arrow
                    wanted = [_of_structure(schema, name)[0] for name, _ in columns]
                    batches = opened.iter_batches(_BATCH_ROWS, columns=wanted)
                    yield from _rows(file, schema, batches, columns, pa)


def _rows(
    file: Path, schema: Any, batches: Any, columns: Sequence[tuple[str, bool]], pa: Any
) -> Iterator[list[str]]:
    """The rows of batches of a schema."""
    found = [_column(file, schema, name, is_any, pa) for name, is_any in columns]
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(start, _BATCH_ROWS)
            yield from map(list, zip(*(texts(part) for texts in found), strict=True))


def _column(
    file: Path, schema: Any, name: str, is_any: bool, pa: Any
) -> Callable[[Any], list[str]]:
    """The cells of a batch in a column; raises UserError where there is none, or it has no text."""
    top, inner = _of_structure(schema, name)
    index = schema.get_field_index(top)
    if index < 0:
        often = "twice" if top in schema.names else "not"
        raise UserError(
            f"{file}: column {name!r} is {often} in the table ({listed(schema.names)});"
            " name a column that is there once"
        )
    kind, place = schema.field(index).type, -1
    if inner is not None:
        place = kind.get_field_index(inner) if pa.types.is_struct(kind) else -1
        if place < 0:
            raise UserError(f"{file}: the column {top!r} has no field {inner!r}")
        kind = kind.field(place).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    fits = [pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view]
    fits += [pa.types.is_integer, pa.types.is_boolean] if is_any else []
    if not any(test(kind) for test in fits):
        raise UserError(f"{file}: {name!r} holds {kind}, not text; name another column")
    classes = _classes(schema, top) if is_any and inner is None else []

    def text(value: Any) -> str:
        if classes and isinstance(value, int):  # -1: not known
            return classes[value] if 0 <= value < len(classes) else ""
        return str(value).lower() if isinstance(value, bool) else str(value)

    def texts(batch: Any) -> list[str]:
        array = batch.column(top)
        array.validate(full=True)  # sizes, and UTF-8: the library reads past the end otherwise
        # A missing structure has no field.
        array = array if inner is None else array.flatten()[place]
        return ["" if value is None else text(value) for value in array.to_pylist()]

    return texts


def _of_structure(schema: Any, name: str) -> tuple[str, str | None]:
    """A column, and the field in it that a name means."""
    top, _, inner = name.partition(".")
    return (name, None) if name in schema.names or not inner else (top, inner)


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
