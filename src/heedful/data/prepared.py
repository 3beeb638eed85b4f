"""Prepared data in a cache that runs share: folders named by a hash of their files and settings."""

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from filelock import FileLock

from heedful.data.tables import table_files
from heedful.data.text_files import check_no_pipe
from heedful.errors import UserError
from heedful.files import (
    cache_home,
    cannot_write,
    is_leftover,
    open_bytes,
    read_json,
    read_object,
    remove,
    remove_leftovers,
    sync_all,
    user_errors,
    write_json,
)

FORMAT = 11  # raise it when the stored files change, or the way they are made from the same text
MANIFEST = "prepared.json"  # the key and origin of a folder, and digests of its other files

_SECTION_BYTES = 1 << 26  # of a file, which one thread reads; digests depend on it
_READ_BYTES = 1 << 20  # at a time
_hash = partial(hashlib.blake2b, digest_size=16)

UNFINISHED = ".unfinished"  # ends the name of a folder whose preparation was interrupted


def cache_folder() -> Path:
    """The folder of prepared data: `data` in HEEDFUL_CACHE; default: in the user's cache folder."""
    return cache_home() / "data"


def content_key(paths: Sequence[Path]) -> list[str]:
    """Digests of the content of files and tables, for the key of `prepare_once`.

    Raises:
        UserError: a file cannot be read.
    """
    return _digests([file for path in paths for file in table_files(path)])


class Resumable(UserError):
    """An error after which another attempt can use the unfinished work."""


def prepare_once(
    directory: Path,
    key: Mapping[str, Any],
    prepare: Callable[[Path], None],
    about: Mapping[str, Any] | None = None,
    *,
    resumable: bool = False,
) -> Path:
    """The folder in `directory` for a key; calls `prepare` to fill it if it does not exist.

    The folder's name is a hash of `key` and `FORMAT`; until it is complete it ends in `UNFINISHED`,
    under which `heedful cache` lists it. Of two processes that need it at the same time one
    prepares it and the other waits.

    Args:
        key: everything that the data depend on, as JSON: `content_key` of the files, settings.
        prepare: called with a folder that has only a manifest, to fill it.
        about: the task and the files that the data come from, for `heedful cache ls`.
        resumable: `prepare` continues in the folder that an interrupted call has left; otherwise
            it begins anew.

    Raises:
        UserError: files of an existing folder have changed; the folder cannot be written. Errors
            that `prepare` raises are passed on.
    """
    content = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    path = directory / hashlib.blake2b(content.encode(), digest_size=10).hexdigest()
    folder, about = path.with_name(path.name + UNFINISHED), about or {}
    if path.is_dir():
        check_prepared(path)
        return path
    with user_errors("write", directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{path.name}.lock").acquire()
    with lock:  # the operating system frees it when the process ends, even if killed
        if path.is_dir():  # another process has prepared it meanwhile
            check_prepared(path)
            return path
        try:
            if not resumable or not (folder / MANIFEST).is_file():
                remove(folder)
                folder.mkdir()
                task = f"{about.get('task', 'data')}, unfinished"
                write_json(folder / MANIFEST, {"about": {**about, "task": task}})
            hold = FolderLock(folder)  # so that `heedful cache rm` keeps it
            prepare(folder)
            names = sorted(set(_files(folder)) - {MANIFEST})
            digests = dict(zip(names, _digests([folder / name for name in names]), strict=True))
            write_json(folder / MANIFEST, {"about": about, "key": key, "files": digests})
            sync_all(folder)
            folder.replace(path)
            del hold
        except OSError as error:  # the work so far may help an attempt with more room
            if not resumable:
                remove(folder)
            raise cannot_write(folder, error) from None
        except BaseException as error:
            is_wrong = isinstance(error, UserError) and not isinstance(error, Resumable)
            if not resumable or is_wrong or _files(folder) == [MANIFEST]:
                remove(folder)  # the data are wrong, or nothing is done
            raise
    return path


def check_prepared(path: Path) -> None:
    """Compare the files of a prepared folder with its manifest; UserError if they have changed."""
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else {}
    digests = manifest.get("files", {}) if isinstance(manifest, dict) else {}
    files = set(_files(path)) - {MANIFEST}
    changed = files ^ digests.keys()
    names = sorted(files - changed)
    digests_now = _digests([path / name for name in names])
    changed |= {
        name for name, digest in zip(names, digests_now, strict=True) if digest != digests[name]
    }
    if changed or not manifest:
        first = min(changed, default=MANIFEST)
        raise UserError(
            f"{path} holds prepared data that have changed since ({first});"
            f" remove them with heedful cache rm {path.name}, and they are prepared again"
        )


class FolderLock:
    """A shared lock on a prepared folder, so that `heedful cache rm` does not remove it.

    Held until the object is deleted or the process ends.

    Raises:
        UserError: the folder was removed.
    """

    def __init__(self, path: Path) -> None:
        with user_errors("read", path / MANIFEST):
            handle = os.open(path / MANIFEST, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(OSError):  # a folder of another user
            os.utime(path / MANIFEST)  # the time of the last use
        if not path.is_dir():  # removed while this process waited for the lock
            raise UserError(f"{path} was removed just now; start again, and it is prepared again")


def _files(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


def _digests(paths: Sequence[Path]) -> list[str]:
    """A digest of each file: that of the digests of its sections, which threads compute."""
    sections: list[list[tuple[Path, int]]] = []  # of each file, at least one: where it begins
    for path in paths:
        check_no_pipe(path)
        with user_errors("read", path):
            size = path.stat().st_size
        sections.append([(path, start) for start in range(0, max(1, size), _SECTION_BYTES)])
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_digest, *zip(*chain.from_iterable(sections), strict=True))
        return [_hash(b"".join(islice(digests, len(some)))).hexdigest() for some in sections]


def _digest(path: Path, start: int) -> bytes:
    """The digest of the section of a file that begins at a byte."""
    digest = _hash()
    with user_errors("read", path), open_bytes(path) as file:
        file.seek(start)
        blocks = iter(partial(file.read, _READ_BYTES), b"")
        for block in islice(blocks, _SECTION_BYTES // _READ_BYTES):
            digest.update(block)
    return digest.digest()


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


def remove_temporary_folders(directory: Path) -> None:
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
