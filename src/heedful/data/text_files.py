"""Lines of text files: UTF-8, plain or compressed, one by one or in blocks."""

import codecs
import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from heedful import extras
from heedful.errors import UserError
from heedful.files import open_bytes, user_errors

# Bytes; a file without line breaks, such as a binary one, is not read into memory.
LONGEST_LINE = 1 << 28
_COMPRESSED = (".gz", ".zst")  # endings of compressed files
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
# Limits of a block: it ends where one is reached, or at the end of a file.
BLOCK_LINES = 4_096
BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 20  # of a file at a time
_LINE_END = ord("\n")

# Documents that are no text: what to do, and the first bytes of formats with their name.
_AS_TEXT = "save it as plain text (.txt, UTF-8)"
_AS_TABLE = "save its table as tab-separated text (.tsv, UTF-8)"
_AS_PDF = "extract its text, for example by `pdftotext FILE.pdf FILE.txt`"
_AS_GZIP = "pack it again: `{0} -dc FILE | gzip > FILE.gz`, with FILE.gz named as its format"
_DOCUMENTS = {
    b"%PDF-": ("a PDF", _AS_PDF),
    b"\xd0\xcf\x11\xe0\xa1\xb1": ("a document of an old Office program (.doc, .xls)", _AS_TEXT),
    b"{\\rtf": ("a document (.rtf)", _AS_TEXT),
    b"\xfd7zXZ\x00": ("compressed by xz", _AS_GZIP.format("xz")),
    **{
        b"BZh%d1AY&" % level: ("compressed by bzip2", _AS_GZIP.format("bzip2"))
        for level in range(1, 10)
    },
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "unpack it, and name the text file in it"),
}
_ZIP = b"PK\x03\x04"
# A member of the ZIP file that is a document.
_ZIP_MEMBERS: Mapping[str, tuple[str, str]] = {
    "word/document.xml": ("a Word document (.docx)", _AS_TEXT),
    "xl/workbook.xml": ("an Excel spreadsheet (.xlsx)", _AS_TABLE),
    "ppt/presentation.xml": ("a PowerPoint presentation (.pptx)", _AS_TEXT),
}
_OPEN_DOCUMENTS: Mapping[bytes, tuple[str, str]] = {
    b"application/vnd.oasis.opendocument.text": ("an OpenDocument text (.odt)", _AS_TEXT),
    b"application/vnd.oasis.opendocument.spreadsheet": ("a spreadsheet (.ods)", _AS_TABLE),
    b"application/epub+zip": ("a book (.epub)", _AS_TEXT),
}
_OTHER_ZIP = ("a ZIP file", "unpack it, and name the text file in it")


def without_compression(path: Path) -> Path:
    """The name without .gz or .zst, whose ending is that of the format."""
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path


class BlockPlace(NamedTuple):
    """The place of a block in plain files, with which it is found again without reading.

    Attributes:
        first: the number of the first line, from 1.
        starts, sizes: for each file the index of the first byte, and the number of bytes.
    """

    first: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class LineBlock(NamedTuple):
    """Consecutive lines of one file, or the same lines of line-parallel files, as bytes.

    The bytes of plain files are not kept, nor sent to other processes: they are read when needed.

    Attributes:
        place: of the lines in the files, in bytes that are not compressed.
        num_bytes: bytes of the (compressed) files that the block ends after the block before.
        content: for each file its lines, with line ends; None: those at `place` in a plain file.
    """

    paths: tuple[Path, ...]
    place: BlockPlace
    num_bytes: int
    content: tuple[bytes | None, ...]

    @property
    def first(self) -> int:
        """The number of the first line, from 1."""
        return self.place.first

    @property
    def plain_place(self) -> BlockPlace | None:
        """The place for `read_line_blocks` to find the block; None unless all files are plain."""
        return self.place if all(lines is None for lines in self.content) else None

    @property
    def num_rows(self) -> int:
        """The number of lines of each file."""
        data = self.data(0)
        return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))

    def data(self, side: int) -> bytes:
        """The bytes of the lines of a file; raises UserError if it became shorter."""
        path, lines = self.paths[side], self.content[side]
        if lines is not None:
            return lines
        start, size = self.place.starts[side], self.place.sizes[side]
        with _named_errors(path), path.open("rb") as file:
            file.seek(start)
            lines = file.read(size)
        if len(lines) < size:
            raise UserError(f"{path} became shorter while it was read; start again")
        return lines

    def slice(self, start: int, stop: int) -> "LineBlock":
        """The lines from `start` to before `stop`, counted from 0 in the block."""
        lines = (BytesIO(self.data(side)) for side in range(len(self.paths)))
        content = [b"".join(islice(side, start, stop)) for side in lines]
        num_bytes = self.num_bytes * (stop - start) // self.num_rows
        return self.with_content(self.first + start, content)._replace(num_bytes=num_bytes)

    def with_content(self, first: int, content: Sequence[bytes]) -> "LineBlock":
        """A block of other lines of the files, the first of which has the number `first`."""
        return self._replace(place=BlockPlace(first, (), ()), content=tuple(content))

    def texts(self, side: int) -> list[str]:
        """The lines of a file as in `read_lines`."""
        data = self.data(side)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:  # the line is named by
            return [*decode_lines(BytesIO(data), str(self.paths[side]), first=self.first)]
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if "\r" in text:
            lines = [line.removesuffix("\r") for line in lines]
        if self.first == 1 and lines:
            lines[0] = lines[0].removeprefix(_BOM.decode())
        return lines


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
    for block in read_line_blocks([path]):
        lines = BytesIO(block.data(0))
        yield from decode_lines(lines, str(path), first=block.first, keep_ends=keep_ends)


def read_bytes(path: Path) -> Iterator[tuple[bytes, int]]:
    """The (decompressed) bytes of a file in parts, and the bytes of the file read for each.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    before = 0
    with _opened(path) as (stream, tell, _):
        while True:
            with _named_errors(path):
                data = stream.read(_READ_BYTES)
            if not data:
                return
            place = tell()
            yield data, place - before
            before = place


def read_line_blocks(
    paths: Sequence[Path], places: Sequence[BlockPlace] | None = None
) -> Iterator[LineBlock]:
    """The lines of one file, or of line-parallel files, in blocks; an empty file is one block.

    Blocks depend on the content of the files alone.

    Args:
        places: of all blocks, if an earlier call has found them: they are not read here.

    Raises:
        UserError: a file cannot be read or is damaged; the files have different numbers of lines.
    """
    if places is not None:
        for place in places:
            yield LineBlock(tuple(paths), place, sum(place.sizes), (None,) * len(paths))
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(path)) for path in paths]
        sides = [
            _Lines(stream, path, is_plain=is_plain)
            for (stream, _, is_plain), path in zip(opened, paths, strict=True)
        ]
        first, position = 1, 0
        while True:
            count = _count_lines(sides, paths)
            if not count and first > 1:
                return
            before, position = position, sum(tell() for _, tell, _ in opened)
            starts, sizes, content = zip(*(side.take(count) for side in sides), strict=True)
            place = BlockPlace(first, starts, sizes)
            yield LineBlock(tuple(paths), place, position - before, content)
            if not count:
                return
            first += count


def decode_lines(
    lines: Iterable[bytes], name: str, *, first: int = 1, keep_ends: bool = False
) -> Iterator[str]:
    """`read_lines` for lines in bytes.

    Args:
        name: of the file or stream, for messages.
        first: the number of the first line.
    """
    for number, raw in enumerate(lines, first):
        if len(raw) > LONGEST_LINE:
            _raise_long_line(name, number)
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


class _Lines:
    """The lines of a file that were read ahead.

    Args:
        is_plain: the stream is the file itself: bytes are not kept, as they can be read again.

    Attributes:
        ends: (N,), the index behind each whole line that was read and not taken.
        is_read: the file has no further lines.
    """

    def __init__(self, stream: Any, path: Path, *, is_plain: bool) -> None:
        self._stream, self._path, self._is_plain = stream, path, is_plain
        # Used again for each read: the system would clear the pages of new arrays.
        self._buffer, self._is_end = np.empty(_READ_BYTES, np.uint8), np.empty(_READ_BYTES, bool)
        self._data, self._num_read = bytearray(), 0  # bytes of lines that were not taken
        self._num_taken, self._start = 0, 0
        self.ends, self.is_read = np.zeros(0, np.int64), False
        self._size = 0  # bytes of the whole lines

    def read(self) -> None:
        """Read lines for a block, unless there are enough."""
        while not self.is_read and len(self.ends) < BLOCK_LINES and self._size < BLOCK_BYTES:
            with _named_errors(self._path):  # not those of the line-parallel file beside it
                size = self._stream.readinto(self._buffer.data)
            data = self._buffer[:size]
            is_end = np.equal(data, _LINE_END, out=self._is_end[:size])
            ends = np.flatnonzero(is_end) + 1 + self._num_read
            self._num_read += size
            if not self._is_plain:
                self._data += data.data
            if not size:
                self.is_read = True
                if self._size < self._num_read:  # a last line without a line end
                    ends = np.array([self._num_read])
            # Of the lines, and of the one that is not whole yet.
            is_long = np.diff(ends, prepend=self._size, append=self._num_read) > LONGEST_LINE
            if is_long.any():
                number = self._num_taken + len(self.ends) + int(is_long.argmax()) + 1
                _raise_long_line(str(self._path), number)
            self.ends = np.concatenate([self.ends, ends])
            self._size = int(self.ends[-1]) if len(self.ends) else 0

    def take(self, count: int) -> tuple[int, int, bytes | None]:
        """Remove the first lines: the index of their first byte, their size, and the bytes.

        The bytes of a plain file are None.
        """
        end = int(self.ends[count - 1]) if count else 0
        start = self._start
        self._start += end
        self._num_read -= end
        self._size -= end
        self.ends = self.ends[count:] - end
        self._num_taken += count
        if self._is_plain:
            return start, end, None
        data = bytes(memoryview(self._data)[:end])
        del self._data[:end]
        return start, end, data


def _count_lines(sides: Sequence[_Lines], paths: Sequence[Path]) -> int:
    """The number of lines of the next block; raises UserError if a file has fewer than another."""
    for side in sides:
        side.read()
    count = min(BLOCK_LINES, *(len(side.ends) for side in sides))
    sizes = sum(side.ends[:count] for side in sides)
    enough = int(np.searchsorted(sizes, BLOCK_BYTES)) + 1
    if enough <= count or count == BLOCK_LINES:
        return min(enough, count)
    if any(len(side.ends) > count or not side.is_read for side in sides):
        _raise_different_lengths(paths)
    return count


def _raise_long_line(name: str, number: int) -> NoReturn:
    raise UserError(
        f"{name}, line {number}: longer than {LONGEST_LINE >> 20} MiB; break it into lines"
    )


def _raise_different_lengths(paths: Sequence[Path]) -> NoReturn:
    for path in paths:
        first = next(_raw_lines(path), b"")
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path} is UTF-16; convert it to UTF-8")
    counts = [f"{path} has {sum(1 for _ in _raw_lines(path))}" for path in paths]
    raise UserError(
        " lines but ".join(counts) + "; line n of one must belong to line n of the other"
    )


def _raw_lines(path: Path) -> Iterator[bytes]:
    for block in read_line_blocks([path]):
        yield from BytesIO(block.data(0))


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
def _opened(path: Path) -> Iterator[tuple[Any, Callable[[], int], bool]]:
    """The bytes of a file, decompressed, the position in the file itself (0 in a pipe), and if they
    are equal.

    Raises UserError.
    """
    with ExitStack() as stack:
        with _named_errors(path):
            raw = stack.enter_context(open_bytes(path))
            start = raw.peek(len(_ZSTD_MAGIC))
        check_no_document(path)
        is_gzip, is_zstd = start.startswith(_GZIP_MAGIC), start.startswith(_ZSTD_MAGIC)
        if path.suffix.lower() == ".gz" and not is_gzip:
            raise UserError(f"{path} is named .gz but is not gzip; rename it or pack it again")
        if path.suffix.lower() == ".zst" and not is_zstd:
            raise UserError(
                f"{path} is named .zst but is not Zstandard; rename it or pack it again"
            )
        stream: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        is_plain = not is_gzip and not is_zstd and path.is_file()
        tell = raw.tell if raw.seekable() else lambda: 0  # a pipe has no position
        yield _zstd_stream(path, raw) if is_zstd else stream, tell, is_plain


def _zstd_stream(path: Path, raw: BufferedReader) -> BufferedReader:
    """The decompressed content of a Zstandard file, by pyarrow."""
    extras.require("parquet", f"{path} is compressed by Zstandard, which")
    import pyarrow as pa

    unpacked: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return BufferedReader(unpacked, 1 << 20)


def check_no_pipe(path: Path) -> None:
    """Raise UserError for a pipe, where a file is read more than once."""
    if path.is_fifo():
        raise UserError(
            f"{path} is a pipe, which can be read once; write it to a file, and name that"
        )


def check_no_document(path: Path) -> None:
    """Raise UserError for a file that is a document by its content, with the way to its text."""
    if not path.is_file():
        return
    with user_errors("read", path), path.open("rb") as file:
        start = file.read(8)
    found = next((entry for magic, entry in _DOCUMENTS.items() if start.startswith(magic)), None)
    if start.startswith(_ZIP):
        found = _in_zip(path)
    if found is not None:
        raise UserError(f"{path} is {found[0]}, not text; {found[1]}")


def _in_zip(path: Path) -> tuple[str, str]:
    try:
        with zipfile.ZipFile(path) as file:
            names = {*file.namelist()}
            kind = file.read("mimetype") if "mimetype" in names else b""
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError):
        return _OTHER_ZIP
    for member, entry in _ZIP_MEMBERS.items():
        if member in names:
            return entry
    return _OPEN_DOCUMENTS.get(kind.strip(), _OTHER_ZIP)
