"""Lines of text files: UTF-8, plain or compressed, one by one or in blocks."""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from heedful import extras
from heedful.errors import UserError
from heedful.files import open_bytes

# Bytes; a file without line breaks, such as a binary one, is not read into memory.
LONGEST_LINE = 1 << 28
COMPRESSED = (".gz", ".zst")  # endings of compressed files, by which their formats are named
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
# Of a block: at least one of the limits is reached, except at the end of a file.
BLOCK_LINES = 4_096
BLOCK_BYTES = 1 << 20
_LINES_AT_ONCE = 64  # between two looks at the size of a block


class LineBlock(NamedTuple):
    """Consecutive lines of one file, or the same lines of line-parallel files, as bytes.

    Attributes:
        first: the number of the first line, from 1.
        lines: for each file its lines, with line ends.
        num_bytes: bytes of the (compressed) files that the block ends after the block before.
    """

    first: int
    lines: tuple[list[bytes], ...]
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """The number of lines of each file."""
        return len(self.lines[0])

    def part(self, start: int, stop: int) -> "LineBlock":
        """The lines from `start` to before `stop`, counted from 0 in the block."""
        lines = tuple(side[start:stop] for side in self.lines)
        size = self.num_bytes * len(lines[0]) // self.num_rows
        return LineBlock(self.first + start, lines, size)


def read_lines(path: Path, *, keep_ends: bool = False) -> Iterator[str]:
    r"""The lines of a UTF-8 text file: plain, gzip or Zstandard.

    Only "\n" and "\r\n" end a line. Unicode's other line separators are part of the text: otherwise
    the lines of parallel files would no longer correspond. A byte order mark at the start is
    dropped. Compression is detected by the first bytes of the file, and required if its name ends
    in .gz or .zst.

    Args:
        keep_ends: end each line that has a line end with "\n"; default: without line ends.

    Raises:
        UserError: the file cannot be read, is not UTF-8 (with the line), or is damaged.
    """
    with _opened(path) as (stream, _):
        yield from decode_lines(_raw_lines(stream, path), str(path), keep_ends=keep_ends)


def read_line_blocks(paths: Sequence[Path]) -> Iterator[LineBlock]:
    """The lines of one file, or of line-parallel files, in blocks; an empty file is one block.

    Blocks depend on the content of the files alone.

    Raises:
        UserError: a file cannot be read or is damaged; the files have different numbers of lines.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(path)) for path in paths]
        streams = [
            _raw_lines(stream, path) for (stream, _), path in zip(opened, paths, strict=True)
        ]
        first, position, is_last = 1, 0, False
        while not is_last:
            lines: tuple[list[bytes], ...] = tuple([] for _ in paths)
            size = 0
            while size < BLOCK_BYTES and len(lines[0]) < BLOCK_LINES and not is_last:
                pieces = [list(islice(stream, _LINES_AT_ONCE)) for stream in streams]
                if len(set(map(len, pieces))) > 1:
                    _raise_different_lengths(paths)
                is_last = len(pieces[0]) < _LINES_AT_ONCE
                for collected, piece in zip(lines, pieces, strict=True):
                    collected += piece
                    size += sum(map(len, piece))
            before, position = position, sum(tell() for _, tell in opened)
            if lines[0] or first == 1:
                yield LineBlock(first, lines, position - before)
            first += len(lines[0])


def decode_lines(
    lines: Iterable[bytes], name: str, *, first: int = 1, keep_ends: bool = False
) -> Iterator[str]:
    """`read_lines` for lines in bytes.

    Args:
        name: of the file or stream, for messages.
        first: the number of the first line.
    """
    for number, raw in enumerate(lines, first):
        _check_length(raw, name, number)
        line = raw.removeprefix(_BOM) if number == 1 else raw
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: not UTF-8 at byte {error.start + 1} of the line;"
                " convert it to UTF-8"
            ) from error
        yield text + "\n" if keep_ends and line.endswith(b"\n") else text


def _check_length(line: bytes, name: str, number: int) -> None:
    if len(line) > LONGEST_LINE:
        raise UserError(
            f"{name}, line {number}: longer than {LONGEST_LINE >> 20} MiB; break it into lines"
        )


def _raw_lines(stream: Any, path: Path) -> Iterator[bytes]:
    with _named_errors(path):  # not those of the line-parallel file beside it
        for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE + 1), b""), 1):
            _check_length(line, str(path), number)
            yield line


def _raise_different_lengths(paths: Sequence[Path]) -> None:
    counts = []
    for path in paths:
        with _opened(path) as (stream, _):
            counts.append(f"{path} has {sum(1 for _ in _raw_lines(stream, path))}")
    raise UserError(
        " lines but ".join(counts) + "; line n of one must belong to line n of the other"
    )


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as UserError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged gzip: {error}; fetch or pack it again") from error
    except OSError as error:
        if error.errno is None:  # of pyarrow
            raise UserError(
                f"{path} is damaged Zstandard: {error}; fetch or pack it again"
            ) from error
        raise UserError(f"cannot read {path}: {error.strerror}; name a text file") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """The bytes of a file, decompressed, and the position in the file itself; raises UserError."""
    with ExitStack() as stack:
        with _named_errors(path):
            raw = stack.enter_context(open_bytes(path))
            start = raw.peek(len(_ZSTD_MAGIC))
        is_gzip, is_zstd = start.startswith(_GZIP_MAGIC), start.startswith(_ZSTD_MAGIC)
        if path.suffix == ".gz" and not is_gzip:
            raise UserError(f"{path} is named .gz but is not gzip; rename it or pack it again")
        if path.suffix == ".zst" and not is_zstd:
            raise UserError(
                f"{path} is named .zst but is not Zstandard; rename it or pack it again"
            )
        stream: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        yield _zstd_stream(path, raw) if is_zstd else stream, raw.tell


def _zstd_stream(path: Path, raw: BufferedReader) -> BufferedReader:
    """The decompressed content of a Zstandard file, by pyarrow."""
    extras.require("parquet", f"{path} is compressed by Zstandard, which")
    import pyarrow as pa

    unpacked: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return BufferedReader(unpacked, 1 << 20)
