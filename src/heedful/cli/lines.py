"""Lines in and out for the verbs that work on files and as filters."""

import json
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from heedful.errors import UserError

CHUNK = 1_024
_BLOCK = 1 << 20
_LONGEST = 1_000_000  # characters of a line for a model


def input_chunks(path: Path | None) -> Iterator[list[str]]:
    """Lists of lines, as many as are there without waiting: a line that is typed comes alone.

    Raises UserError: a missing file, a directory (both before the first list is asked for),
    invalid UTF-8 with its line number.
    """
    if path is None:
        return _short_enough(_live_chunks(sys.stdin.fileno()))
    chunks = _short_enough(_file_chunks(path))
    first = next(chunks, [])
    return chain([first], chunks)


def kept(chunks: Iterator[list[str]], lines: deque[str]) -> Iterator[list[str]]:
    """The same chunks; their lines are also put behind `lines`, for whoever writes of them."""
    for chunk in chunks:
        lines.extend(chunk)
        yield chunk


def _short_enough(chunks: Iterator[list[str]]) -> Iterator[list[str]]:
    """The chunks; raises UserError for a line that no model reads, before it is cut to tokens."""
    first = 1
    for chunk in chunks:
        for number, line in enumerate(chunk, first):
            if len(line) > _LONGEST:
                raise UserError(f"line {number} has {len(line):,} characters; break it into lines")
        first += len(chunk)
        yield chunk


def read_parallel(first: Path, second: Path) -> tuple[list[str], list[str]]:
    """The lines of two files that belong together; raises UserError where they differ in number."""
    from heedful.data.rows import read_rows

    rows = read_rows({"first": [first], "second": [second]}, keep_empty=True)
    for name in ("first", "second"):
        list(_short_enough(iter([rows[name]])))
    return rows["first"], rows["second"]


def read_whole(path: Path | None) -> str:
    """All of a file, or of stdin; raises UserError where it cannot be read or is no UTF-8."""
    from heedful.data.rows import decoded_lines, read_lines

    if path is not None:
        return "".join(read_lines(path, keep_ends=True))
    return "".join(decoded_lines(sys.stdin.buffer, "stdin", keep_ends=True))


def json_line(**content: Any) -> str:
    """A line of JSON, as it is read by people."""
    return json.dumps(content, ensure_ascii=False)


def piece_writer(piece: str) -> None:
    """Write a part of a line to stdout at once."""
    _show(piece, end="")


@contextmanager
def line_writer(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a line: to a file whole or not at all, to stdout at once.

    What was written before an interruption stays, as `heedful.files.replacing` says.
    """
    if path is None:
        yield _show
        return
    from heedful.files import partial_of, replacing

    count = 0
    try:
        with replacing(path) as file:

            def write(line: str) -> None:
                nonlocal count
                file.write(f"{line}\n".encode())
                count += 1

            yield write
    except (KeyboardInterrupt, SystemExit):
        if count:
            sys.stderr.write(f"interrupted; lines in {partial_of(path)}: {count:,}\n")
        raise


@contextmanager
def progress_bar(
    what: str, total: int | None = None, *, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A function to tell how many more are done; shown on stderr where that is a terminal."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn(what), MofNCompleteColumn(), TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _show(line: str, end: str = "\n") -> None:
    sys.stdout.write(line + end)
    sys.stdout.flush()


def _file_chunks(path: Path) -> Iterator[list[str]]:
    from heedful.data.rows import read_lines

    lines = read_lines(path)
    while chunk := list(islice(lines, CHUNK)):
        yield chunk


def _live_chunks(handle: int) -> Iterator[list[str]]:
    """What a pipe or a terminal has given so far, as whole lines."""
    from heedful.data.rows import LONGEST_LINE, decoded_lines

    rest, number, data = b"", 0, b"?"
    while data:
        rest += (data := _read(handle))
        # A writer that is not waiting for answers sends more at once: take it together.
        while data and len(rest) < _BLOCK and select.select([handle], [], [], 0.01)[0]:
            rest += (data := _read(handle))
        *lines, rest = rest.split(b"\n")
        if rest and (not data or len(rest) > LONGEST_LINE):
            lines.append(rest)
        for start in range(0, len(lines), CHUNK):
            part = lines[start : start + CHUNK]
            yield list(decoded_lines(part, "stdin", first=number + 1))
            number += len(part)


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, _BLOCK)
    except OSError as error:
        raise UserError(f"cannot read stdin: {error.strerror}") from None
