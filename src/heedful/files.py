"""Writing so that nothing which was saved is ever lost: beside, synced, then renamed."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from heedful.errors import UserError


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, sync it, and give it its name.

    Whoever reads `path` sees the old content or all of the new. Raises UserError (a full disk, no
    permission, a directory in the way), and then leaves nothing behind.
    """
    with _beside(path) as beside:
        write(beside)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open binary file that takes the place of `path` once the block has ended without error.

    As `write_file`, for content that comes bit by bit.
    """
    with _beside(path) as beside, beside.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """`write_file` for text, in UTF-8."""
    write_file(path, lambda beside: _write_text(beside, text))


def write_json(path: Path, content: Any) -> None:
    """`write_file` for JSON that a person may read."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises UserError where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON (truncated or foreign?): {error}") from None


def plain_name(name: object, where: object) -> str:
    """The name of a file beside `where`, which names it: never a path that leads elsewhere.

    Raises:
        UserError: it is absolute, leads up or down, or is no name at all.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
        raise UserError(f"{where} must name a file beside it, not {name!r}; correct it")
    return name


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Like `write_file` for a new directory: it is there whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        fill(beside)
        for file in beside.rglob("*"):
            _sync(file)
        _sync(beside)
        if path.exists():
            shutil.rmtree(path)
        beside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left half-written, at any depth."""
    for entry in [*directory.rglob(".*.*.tmp")]:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


@contextmanager
def _beside(named: Path) -> Iterator[Path]:
    if named.exists() and not named.is_file() and not named.is_dir():
        with _copied_into(named) as scratch:
            yield scratch
        return
    path = Path(os.path.realpath(named))  # what a link leads to is replaced, not the link
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        _sync(beside)
        beside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        with suppress(OSError):
            beside.unlink()


@contextmanager
def _copied_into(device: Path) -> Iterator[Path]:
    """For a pipe or a device, which must be written to: a rename would put a file in its place."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory) / "content"
        yield scratch
        try:
            with scratch.open("rb") as source, device.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise _cannot_write(device, error) from None


def _cannot_write(path: Path, error: OSError) -> UserError:
    # A file where the path has a folder is "File exists" to mkdir.
    in_the_way = isinstance(error, FileExistsError)
    reason = "Not a directory" if in_the_way else error.strerror or str(error)
    return UserError(f"cannot write {path}: {reason}; make room, or name another place")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
