"""A run's folder while one process works in it: locked, and emptied again if the start fails."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from heedful.errors import UserError
from heedful.files import cannot_write, remove
from heedful.zoo.saved import LOCK

# What a start writes; nothing else is ever removed.
_OWN = (
    "recipe.yaml",
    "config.json",
    "tokenizer*.json",
    "data.json",
    "init_from.json",
    "checkpoints",
    "log.jsonl",
    "tensorboard",
)


class RunFolder:
    """The folder of a run, made if it is missing, and locked until the block ends.

    The system holds the lock, not the file: it is gone with the process, however that ends, so
    that a lock file which a killed run left behind keeps nobody out.

    Raises:
        UserError: another process works there; the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; give a folder for the run (--out)")

    def __enter__(self) -> Self:
        lock = self.path / LOCK
        self._lock, self._made = FileLock(lock), list[Path]()
        try:
            self._made += [one for one in (self.path, *self.path.parents) if not one.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            lock.write_text(f"{os.getpid()}\n")
        except Timeout:
            process = lock.read_text(errors="replace").strip() if lock.is_file() else "?"
            raise UserError(
                f"{self.path} is in use by a run (process {process}); wait for it, stop it, or "
                "give another --out"
            ) from None
        except OSError as error:
            _remove_empty(self._made)
            raise cannot_write(self.path, error) from None
        self._before = self._own()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.release()
        if kind is not None:
            _remove_empty(self._made)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A start that fails removes what it wrote, so that the corrected command can be used."""
        try:
            yield
        except BaseException:
            for path in self._own() - self._before:
                remove(path)
            raise

    def clear(self) -> None:
        """Remove what a start wrote, and nothing else."""
        for path in self._own():
            remove(path)

    def _own(self) -> set[Path]:
        return {path for pattern in _OWN for path in self.path.glob(pattern)}


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:  # the innermost first
        with suppress(OSError):  # something of others' is in it, or it was never made
            folder.rmdir()
