"""Prepared data, made once and shared by runs: a folder named by a hash of all it depends on."""

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from heedful.data.tables import table_files
from heedful.errors import UserError
from heedful.files import open_bytes, read_json, told, write_directory, write_json

FORMAT = 2  # to be raised when what is stored, or how it is made of the same text, changes
MANIFEST = "prepared.json"  # digests of the files beside it, their key and origin

_VARIABLE = "HEEDFUL_CACHE"  # names the folder of the cache


def cache_folder() -> Path:
    """The folder of prepared data: in HEEDFUL_CACHE, by default in the user's own cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(_VARIABLE) or Path(home) / "heedful") / "data"


def content_key(paths: Sequence[Path]) -> list[str]:
    """Digests of what files and tables hold, to be part of a key.

    Raises:
        UserError: one cannot be read.
    """
    return [_digest(file) for path in paths for file in table_files(path)]


def prepare_once(
    directory: Path,
    key: Mapping[str, Any],
    prepare: Callable[[Path], None],
    about: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of `directory` for this key, prepared first where it is not there.

    The folder's name is a hash of the key and of `FORMAT`: other content, other settings or another
    format have another folder.
    It is there whole or not at all. Of two processes that need it at once one prepares it, and the
    other waits.

    Args:
        key: all that the data depend on, as JSON: `content_key` of the files, settings, sizes.
        prepare: fills the folder that it is given.
        about: the task and the files that the data come from, for `heedful cache ls`.

    Raises:
        UserError: the files of the folder are no longer those that were prepared; what `prepare`
            raises; the folder cannot be written.
    """
    content = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    path = directory / hashlib.blake2b(content.encode(), digest_size=10).hexdigest()

    def fill(beside: Path) -> None:
        prepare(beside)
        digests = {name: _digest(beside / name) for name in _files(beside)}
        write_json(beside / MANIFEST, {"about": about or {}, "key": key, "files": digests})

    if not path.is_dir():
        with told("write", directory):
            directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(directory / f".{path.name}.lock").acquire()
        with lock:  # the system frees it when a process ends, however that is
            if not path.is_dir():  # else another process was faster
                write_directory(path, fill)
                return path
    check_prepared(path)
    return path


def check_prepared(path: Path) -> None:
    """Refuse a prepared folder whose files are not those that were written; raises UserError."""
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else {}
    digests = manifest.get("files", {}) if isinstance(manifest, dict) else {}
    now = set(_files(path)) - {MANIFEST}
    changed = now ^ digests.keys()
    changed |= {name for name in now - changed if _digest(path / name) != digests[name]}
    if changed or not manifest:
        first = min(changed, default=MANIFEST)
        raise UserError(
            f"{path} holds prepared data that have changed since ({first});"
            f" heedful cache rm {path.name} removes them, and they are prepared anew"
        )


class Hold:
    """A shared lock on a prepared folder, which keeps `heedful cache rm` from removing it.

    Held until the object is deleted; the operating system frees the locks of a process that ends.

    Raises:
        UserError: the folder was removed.
    """

    def __init__(self, path: Path) -> None:
        with told("read", path / MANIFEST):
            handle = os.open(path / MANIFEST, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(OSError):  # the cache of somebody else
            os.utime(path / MANIFEST)  # when the data were last used
        if not path.is_dir():  # while the lock was waited for
            raise UserError(f"{path} was removed just now; start again, and it is prepared anew")


def _files(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


def _digest(path: Path) -> str:
    with told("read", path), open_bytes(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
