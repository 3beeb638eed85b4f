"""Rows of tables: Parquet files, and folders written by `datasets.Dataset.save_to_disk`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from heedful import extras
from heedful.data.labels import label_text
from heedful.data.rows import LABEL, Chunk, Rows, TextOf, same_rows
from heedful.errors import UserError, format_names
from heedful.files import plain_name, read_object

TableColumns: TypeAlias = Sequence[tuple[str, bool]] | None  # as in `_read_table`

BATCH_ROWS = 4_096  # rows in memory at a time
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # pyarrow accepts a truncated stream without it


def table_chunks(path: Path, names: Mapping[str, str]) -> Iterator[Chunk]:
    """Rows of columns of a table.

    Args:
        names: for each column that of the table. `a.b` is the field b of a column a of structs,
            such as one language of a translation.

    Raises:
        UserError: pyarrow is not installed; a file cannot be read or is damaged; a column is
            missing or has another type.
    """
    columns = [(name, column == LABEL) for column, name in names.items()]
    parse = partial(_parse, str(path), [*names])
    return _chunks(path, _read_table(path, columns), parse, [*names])


def table_record_chunks(path: Path, column: str, text_of: TextOf) -> Iterator[Chunk]:
    """Rows of one text, each made by `text_of` of a whole row; errors as in `table_chunks`."""
    parse = partial(_parse_records, str(path), column, text_of)
    return _chunks(path, _read_table(path), parse, [column])


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


@dataclass
class TableBatch:
    """Consecutive rows of a table: a record batch of pyarrow, not yet converted to text."""

    file: Path
    schema: Any
    batch: Any
    columns: TableColumns
    num_bytes: int  # of the file, about
    first: int = 1  # the number of the first row in the table, from 1

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.batch.num_rows)

    def slice(self, start: int, stop: int) -> "TableBatch":
        """The rows from `start` to before `stop`."""
        size = self.num_bytes * (stop - start) // self.num_rows
        batch = self.batch.slice(start, stop - start)
        return replace(self, batch=batch, num_bytes=size, first=self.first + start)

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process: of a slice of a batch, its rows alone."""
        import pyarrow as pa

        with _user_errors(self.file, pa):
            self.batch.validate(full=True)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.batch.schema) as stream:
                stream.write_batch(self.batch)
        return {**vars(self), "batch": sink.getvalue().to_pybytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import pyarrow as pa

        with pa.ipc.open_stream(state["batch"]) as stream:
            vars(self).update(state, batch=stream.read_next_batch())

    def cells(self) -> list[list[str]]:
        """The cells of each column as text; a missing value is "".

        Raises:
            UserError: damaged data.
        """
        import pyarrow as pa

        assert self.columns is not None
        with _user_errors(self.file, pa):
            to_text = _converters(self.file, self.schema, self.columns, pa)
            self.batch.validate(full=True)  # sizes and UTF-8: pyarrow reads out of bounds otherwise
            table = pa.Table.from_batches([self.batch]).flatten()
            return [
                [*map(to_text[name], table.column(name).to_pylist())] for name, _ in self.columns
            ]

    def objects(self) -> Iterator[dict[str, Any]]:
        """The rows as objects; raises UserError for damaged data."""
        import pyarrow as pa

        with _user_errors(self.file, pa):
            self.batch.validate(full=True)
            yield from self.batch.to_pylist()


def _chunks(
    path: Path,
    batches: Iterator[TableBatch],
    parse: Callable[[TableBatch], Rows],
    columns: Sequence[str],
) -> Iterator[Chunk]:
    """The chunks of a table: at least one."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield Chunk(batch, parse)
    if is_empty:
        yield Chunk(Rows.of_lines({column: [] for column in columns}, str(path), 1), same_rows)


def _parse(name: str, columns: Sequence[str], batch: TableBatch) -> Rows:
    cells = dict(zip(columns, batch.cells(), strict=True))
    return Rows.of_lines(cells, name, batch.first)


def _parse_records(name: str, column: str, text_of: TextOf, batch: TableBatch) -> Rows:
    numbered = enumerate(batch.objects(), batch.first)
    texts = [text_of(record, f"{name}, line {number}") for number, record in numbered]
    return Rows.of_lines({column: texts}, name, batch.first)


def _read_table(path: Path, columns: TableColumns = None) -> Iterator[TableBatch]:
    """The rows of a table, a few thousand at a time.

    Args:
        columns: the name of each column, and whether it may hold integers, booleans and class
            labels (converted to their names) besides text; None: all columns, for `objects`.
    """
    extras.require("parquet", f"{path} is a table, which")
    import pyarrow as pa

    read = _read_stream if path.is_dir() else _read_parquet
    first = 1
    for file in table_files(path):
        with _user_errors(file, pa):
            for batch in read(file, columns, pa):
                yield replace(batch, first=first)
                first += batch.num_rows


def _read_stream(file: Path, columns: TableColumns, pa: Any) -> Iterator[TableBatch]:
    """The batches of a file in the streaming format of Arrow."""
    with pa.OSFile(str(file)) as source:
        start = max(0, source.size() - len(_STREAM_END))
        if source.read_at(len(_STREAM_END), start) != _STREAM_END:
            raise pa.ArrowInvalid("it is truncated")
        source.seek(0)
        with pa.ipc.open_stream(source) as stream:
            _converters(file, stream.schema, columns or (), pa)  # refuses wrong columns at once
            for batch in stream:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    some = batch.slice(start, BATCH_ROWS)
                    yield TableBatch(file, stream.schema, some, columns, some.nbytes)


def _read_parquet(file: Path, columns: TableColumns, pa: Any) -> Iterator[TableBatch]:
    """The batches of a Parquet file, one row group after the other."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        schema = opened.schema_arrow
        _converters(file, schema, columns or (), pa)
        bytes_a_row = file.stat().st_size / max(1, opened.metadata.num_rows)
        names = None if columns is None else [name for name, _ in columns]
        for batch in opened.iter_batches(BATCH_ROWS, columns=names):
            size = int(bytes_a_row * batch.num_rows)
            yield TableBatch(file, schema, batch, columns, size)


def _converters(
    file: Path, schema: Any, columns: Sequence[tuple[str, bool]], pa: Any
) -> dict[str, Callable[[Any], str]]:
    """For each column the function from a cell to text, with the fields of structs as columns."""
    flat = schema.empty_table().flatten().schema
    return {
        name: _converter(file, schema, flat, name, allows_labels, pa)
        for name, allows_labels in columns
    }


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
    if allows_labels:
        allowed += [pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating]
        allowed += [pa.types.is_list, pa.types.is_large_list]
    if not any(is_type(kind) for is_type in allowed):
        raise UserError(f"{file}: {name!r} holds {kind}, not text; name another column")
    classes = _classes(schema, name) if allows_labels else []

    def text(value: Any) -> str:
        """The cell of a row as text."""
        if value is None:
            return ""
        if not allows_labels:
            return str(value)
        if classes and isinstance(value, int):  # -1: no label
            return classes[value] if 0 <= value < len(classes) else ""
        if classes and isinstance(value, list):
            wrong = [index for index in value if index not in range(len(classes))]
            if wrong:
                raise UserError(
                    f"{file}: {name!r} holds the label {wrong[0]}, which has no class name; leave "
                    "its rows out"
                )
            value = [classes[index] for index in value]
        label = label_text(value)
        if label is None:
            raise UserError(
                f"{file}: {name!r} holds {value!r}; a list of labels has texts without commas, or "
                "numbers"
            )
        return label

    return text


def _classes(schema: Any, name: str) -> Sequence[str]:
    """The class names of a `ClassLabel` column, which `datasets` stores in the schema; else []."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][name]
        feature = feature.get("feature", feature)  # of the items of a list
        names = feature["names"] if feature["_type"] == "ClassLabel" else []
    except (AttributeError, KeyError, TypeError, ValueError):
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
