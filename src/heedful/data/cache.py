"""The cache of prepared data: list its folders and remove them."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.data.prepared import MANIFEST, UNFINISHED
from heedful.errors import UserError
from heedful.files import is_leftover, read_object, remove, remove_leftovers, user_errors


@dataclass(frozen=True)
class CacheEntry:
    """A folder of prepared data.

    Attributes:
        size: in bytes.
        last_used: the time when a run last opened the folder, in seconds since 1970.
        about: the task and the files that the data were prepared from.
    """

    path: Path
    size: int
    last_used: float
    about: dict[str, Any]


def list_entries(directory: Path) -> list[CacheEntry]:
    """The folders of prepared data in a directory, the most recently used first.

    Folders without a manifest are ignored.

    Raises:
        UserError: the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    with user_errors("read", directory):
        paths = [path for path in directory.iterdir() if (path / MANIFEST).is_file()]
        entries = [_entry(path) for path in paths if not path.name.startswith(".")]
    return sorted(entries, key=lambda entry: -entry.last_used)


def _entry(path: Path) -> CacheEntry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        about = read_object(path / MANIFEST).get("about", {})
    except UserError:  # a damaged manifest; the folder can still be removed
        about = {}
    return CacheEntry(path, size, (path / MANIFEST).stat().st_mtime, dict(about))


def is_in_use(entry: CacheEntry) -> bool:
    """True if a process has the folder open (`prepared.FolderLock`)."""
    with user_errors("read", entry.path), (entry.path / MANIFEST).open("rb") as file:
        return not _try_lock(file.fileno())


def remove_entry(entry: CacheEntry) -> bool:
    """Remove a folder of prepared data unless it is in use. Returns True if it was removed.

    Raises:
        UserError: no permission.
    """
    path = entry.path
    with user_errors("remove", path), (path / MANIFEST).open("r+b") as file:
        if not _try_lock(file.fileno()):
            return False
        remove_folder(path)
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder of prepared data and its lock file; raises OSError as `Path.rename`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.rename(aside)  # atomic: other processes never find a folder with some files missing
    remove(aside)
    path.with_name(f".{path.name.removesuffix(UNFINISHED)}.lock").unlink(missing_ok=True)


def remove_unfinished_entries(directory: Path) -> None:
    """Remove the temporary folders of processes that were killed while they prepared data."""
    names = [path.name for path in directory.glob(".*.tmp") if is_leftover(path.name)]
    for name in {name[1:].rsplit(".", 2)[0] for name in names}:
        remove_leftovers(directory / name)


def _try_lock(handle: int) -> bool:
    """Take the exclusive lock of an open file; False if another process holds a lock on it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
