"""Text files in: their lines, the objects of JSONL, and what is wrong with them, with the line."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from heedful.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 text file, plain or gzip, without their ends.

    Only "\n" and "\r\n" end a line: other marks that Unicode knows are text, or the two sides of
    a corpus would fall out of step. A byte order mark at the start is dropped. A file is gzip by
    its first bytes; one that is named `.gz` must be.

    Raises:
        UserError: the file cannot be read, is not UTF-8 (with the line), or is damaged gzip.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if path.suffix == ".gz" and not packed:
                raise UserError(f"{path} is named .gz but is not gzip; rename it or pack it again")
            stream = cast(Iterable[bytes], gzip.GzipFile(fileobj=raw) if packed else raw)
            for number, line in enumerate(stream, 1):
                line = line.removeprefix(_BOM) if number == 1 else line
                yield _decode(line.removesuffix(b"\n").removesuffix(b"\r"), path, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged gzip: {error}; fetch or pack it again") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {reason}; name a text file") from error


def read_whole(path: Path) -> tuple[str, int]:
    """A text file as it is, its line ends too, and how many lines it has.

    Raises:
        UserError: as `read_lines`.
    """
    # Reading it as lines first finds whatever is wrong with the file, and on which line.
    num_lines = sum(1 for _ in read_lines(path))
    with path.open("rb") as raw:
        packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        data = gzip.GzipFile(fileobj=raw).read() if packed else raw.read()
    return data.removeprefix(_BOM).decode(), num_lines


def is_jsonl(path: Path) -> bool:
    """Whether a file is named as one of JSONL."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object] | None]]:
    """The number and the object of each line of a JSONL file; `None` for a blank line.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object (with its number).
    """
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            yield number, None
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}); write one object a line") from error
        if not isinstance(entry, dict):
            raise UserError(f"{place}: not a JSON object; write one object a line")
        yield number, entry


def text_of(entry: dict[str, object], key: str, place: str) -> str:
    """The text under a key of an object that was read at `place`.

    Raises:
        UserError: there is no such key, or what it holds is no text.
    """
    if key not in entry:
        found = ", ".join(map(repr, entry)) or "none"
        raise UserError(f"{place}: no key {key!r} (found: {found}); set the field to the right key")
    text = entry[key]
    if not isinstance(text, str):
        raise UserError(f"{place}: {key!r} is not a text; write it as a JSON string")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{place}: {key!r} holds half of a surrogate pair, which is no character")
    return text


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not UTF-8 at byte {error.start + 1} of the line;"
            " convert the file to UTF-8"
        ) from error
