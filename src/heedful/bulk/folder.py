"""The folder of a bulk job: its manifest, its finished shards, and the log of these.

`manifest.json` has the settings, and at the end an entry for each shard. Until then `shards.jsonl`
has these entries, one a line, each appended after the file of its shard was written.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.bulk.model_files import sha256_of_file
from heedful.bulk.worker import ShardResult
from heedful.errors import UserError
from heedful.files import (
    atomic_replace,
    cannot_write,
    check_new,
    missing_folders,
    read_object,
    remove,
    remove_empty,
    remove_unfinished,
    user_errors,
    write_json,
    write_text,
)

MANIFEST, LOG = "manifest.json", "shards.jsonl"
_KEYS = {"index", "file", "sha256", "rows", "errors", "input", "line"}  # of an entry


@dataclass
class JobFolder:
    """The folder of a job.

    Args:
        suffix: of the files of shards.

    Attributes:
        manifest: None: no job was started here.
        entries: of the finished shards, by index.
    """

    path: Path
    suffix: str
    manifest: dict[str, Any] | None = field(init=False)
    entries: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    _new_folders: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        """Read the manifest.

        Raises:
            UserError: a folder with other files; a damaged manifest; a path that cannot be one.
        """
        self._new_folders = missing_folders(self.path)
        if not (self.path / MANIFEST).is_file():
            check_new(self.path, overwrite=True)  # an empty one
            self.manifest = None
            return
        self.manifest = read_object(self.path / MANIFEST)
        if not isinstance(self.manifest.get("settings"), dict):
            raise UserError(f"{self.path / MANIFEST} is not of a bulk job; give another folder")

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings that the job was started with; None: it was not started."""
        return None if self.manifest is None else self.manifest["settings"]

    @property
    def is_complete(self) -> bool:
        """True if all shards are finished."""
        return self.manifest is not None and self.manifest.get("complete") is True

    @contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """In the block the folder is this process's alone, and `entries` are of finished shards.

        If the block ends with an error before a shard is finished, nothing is left behind.

        Raises:
            UserError: another process works in the folder; it cannot be written.
        """
        with user_errors("write", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process works on {self.path}; wait for it, or give another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            remove_unfinished(self.path)
            self._read_log()
            try:
                if self.manifest is None:
                    write_json(self.path / MANIFEST, {"complete": False, "settings": settings})
                yield
            except Exception:
                if not self.entries:
                    for name in (LOG, MANIFEST):
                        remove(self.path / name)
                    remove_empty(self._new_folders)
                raise
        finally:
            os.close(handle)

    def add(self, result: ShardResult) -> None:
        """Write the file of a shard, and then its entry.

        Raises:
            UserError: a full disk; a folder that cannot be written.
        """
        path = self.path / f"part-{result.index:06}{self.suffix}"
        with atomic_replace(path) as temporary:
            temporary.write_bytes(result.content)
        entry = {
            "index": result.index,
            "file": path.name,
            "sha256": hashlib.sha256(result.content).hexdigest(),
            "rows": result.num_rows,
            "errors": result.num_errors,
            "input": result.file,
            "line": result.line,
        }
        try:
            with (self.path / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry, ensure_ascii=False) + "\n")
                log.flush()
                os.fsync(log.fileno())
        except OSError as error:
            raise cannot_write(self.path / LOG, error) from None
        self.entries[result.index] = entry

    def write_manifest(self, settings: Mapping[str, Any]) -> None:
        """Write the manifest of the complete job; totals of its shards are made here."""
        shards = [self.entries[index] for index in sorted(self.entries)]
        totals = {name: sum(entry[name] for entry in shards) for name in ("rows", "errors")}
        content = {"complete": True, "settings": settings, **totals, "shards": shards}
        write_json(self.path / MANIFEST, content)
        remove(self.path / LOG)
        self.manifest = content

    def _read_log(self) -> None:
        """Read the entries whose files are as they were written; the log then has these alone."""
        log = self.path / LOG
        if self.manifest is None or not log.is_file():
            return
        for line in log.read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError):  # the last line of a killed process
                entry = json.loads(line)
                if entry.keys() == _KEYS and _sha256(self.path / entry["file"]) == entry["sha256"]:
                    self.entries[entry["index"]] = entry
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in self.entries.values()]
        write_text(log, "".join(lines))


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a complete job with the format jsonl, in the order of its input."""
    for entry in read_object(path / MANIFEST)["shards"]:
        with (path / entry["file"]).open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _sha256(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
