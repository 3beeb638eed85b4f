"""The cache of prepared data: what it holds, and how it is removed."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.data.prepared import MANIFEST
from heedful.errors import UserError
from heedful.files import is_leftover, read_object, remove, remove_leftovers, told


@dataclass(frozen=True)
class CacheEntry:
    """A prepared folder.

    Attributes:
        size: bytes.
        used: when a run last opened it, in seconds since 1970.
        about: the task and the files that the data come from.
    """

    path: Path
    size: int
    used: float
    about: dict[str, Any]


def list_entries(directory: Path) -> list[CacheEntry]:
    """The prepared folders in the cache, the last used first; whatever else is there is no entry.

    Raises:
        UserError: the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    with told("read", directory):
        paths = [path for path in directory.iterdir() if (path / MANIFEST).is_file()]
        found = [_entry(path) for path in paths if not path.name.startswith(".")]
    return sorted(found, key=lambda entry: -entry.used)


def _entry(path: Path) -> CacheEntry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        about = read_object(path / MANIFEST).get("about", {})
    except UserError:  # a damaged manifest; the folder can still be removed
        about = {}
    return CacheEntry(path, size, (path / MANIFEST).stat().st_mtime, dict(about))


def is_in_use(entry: CacheEntry) -> bool:
    """Whether a process has the folder open (`prepared.Hold`)."""
    with told("read", entry.path), (entry.path / MANIFEST).open("rb") as file:
        return not _locked(file.fileno())


def remove_entry(entry: CacheEntry) -> bool:
    """Remove a prepared folder, and say whether that was done: a folder in use stays.

    Raises:
        UserError: no permission.
    """
    path = entry.path
    with told("remove", path), (path / MANIFEST).open("r+b") as file:
        if not _locked(file.fileno()):
            return False
        remove_folder(path)
    return True


def remove_folder(path: Path) -> None:
    """Remove a prepared folder that is not needed any more, with its lock; OSError as `rename`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.rename(aside)  # so that nobody sees a part of it
    remove(aside)
    path.with_name(f".{path.name}.lock").unlink(missing_ok=True)


def remove_unfinished_entries(directory: Path) -> None:
    """Remove what killed processes left half-prepared."""
    names = [path.name for path in directory.glob(".*.tmp") if is_leftover(path.name)]
    for name in {name[1:].rsplit(".", 2)[0] for name in names}:
        remove_leftovers(directory / name)


def _locked(handle: int) -> bool:
    """Take the exclusive lock of a file if no other process holds a lock on it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
