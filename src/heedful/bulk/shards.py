"""Shards: parts of the input files, each processed as a whole by one worker."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from heedful.data.row_files import format_of, read_chunks
from heedful.data.rows import Chunk, Field, is_blank
from heedful.errors import UserError

SHARD_ROWS = 4_096  # most rows of a shard; a shard has at most about 1 MiB of text as well


class Row(NamedTuple):
    """A row of the input.

    Attributes:
        line: its line in the file, or its row in a table, from 1.
        texts: one per column; empty for a row that cannot be read.
        error: the reason why it has no result; "": none.
    """

    line: int
    texts: Sequence[str]
    error: str = ""


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of one file, read but not parsed; it can be sent to another process.

    Attributes:
        index: its number among all shards, from 0.
        first_row: the number of its first row among the rows of all files, from 0.
        file: the name of the file.
    """

    index: int
    first_row: int
    file: str
    chunk: Chunk

    @property
    def num_rows(self) -> int:
        """The number of rows, those with errors included."""
        return self.chunk.num_rows

    def rows(self) -> list[Row]:
        """All rows: those that are empty or cannot be read have an error."""
        return _rows(self.chunk)


@dataclass(frozen=True)
class ShardReader:
    """Reads files in shards, which depend on the content of the files and `shard_rows` alone.

    Attributes:
        files: text, .tsv, .jsonl and .parquet files and tables, as in `heedful.data.row_files`.
        columns: for each column of the rows the key of JSONL, the column of a table, or the
            number or name of a column of .tsv; None: as in `heedful.data.row_files.read_rows`.
        shard_rows: most rows of a shard.
    """

    files: tuple[Path, ...]
    columns: tuple[tuple[str, str | None], ...]
    shard_rows: int = SHARD_ROWS

    def shards(self, done: Collection[int] = ()) -> Iterator[Shard]:
        """The shards in order, without those whose indices are in `done`.

        Raises:
            UserError: a file that cannot be read, is damaged, or has none of the columns.
        """
        index = first_row = 0
        for path in self.files:
            for chunk in read_chunks(path, self._fields(path), "line", header=False):
                for start in range(0, chunk.num_rows, self.shard_rows):
                    stop = min(start + self.shard_rows, chunk.num_rows)
                    if index not in done:
                        yield Shard(index, first_row, str(path), chunk.slice(start, stop))
                    index += 1
                    first_row += stop - start

    def _fields(self, path: Path) -> dict[str, Field | None]:
        """The field of each column in a file; numbers are for .tsv and .csv files alone."""
        is_numbered = format_of(path) in ("tsv", "csv")
        return {
            column: int(field) if is_numbered and field and field.isdecimal() else field
            for column, field in self.columns
        }


def _rows(chunk: Chunk) -> list[Row]:
    """The rows of a chunk; a chunk that cannot be parsed is divided into halves."""
    try:
        rows = chunk.parse()
        assert rows.locations is not None
        _, lines = rows.locations.tolist()
        return [*map(_row, lines, zip(*rows.columns.values(), strict=True))]
    except UserError as error:
        count = chunk.num_rows
        if count == 1:
            return [Row(chunk.first_line, (), str(error))]
        halves = chunk.slice(0, count // 2), chunk.slice(count // 2, count)
        return [row for half in halves for row in _rows(half)]


def _row(line: int, texts: Sequence[str]) -> Row:
    is_empty = any(map(is_blank, texts))
    return Row(line, texts, "the text is empty" if is_empty else "")
