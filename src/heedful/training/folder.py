"""A run's folder: marked by the run that made it, and locked while a process works in it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter, ValidationError

import heedful
from heedful.errors import UserError
from heedful.files import (
    cannot_write,
    is_leftover,
    missing_folders,
    read_object,
    remove,
    remove_empty,
    write_json,
)
from heedful.training.checkpoint import Checkpoints
from heedful.zoo.saved import LOCK, WEIGHTS, read_step

MARKER = "run.json"  # written first into the empty folder of a new run
# Entries that a start writes, as patterns; nothing else is ever removed.
_OWN = (
    MARKER,
    "recipe.yaml",
    "config.json",
    "tokenizer.json",
    "tokenizer.src.json",
    "tokenizer.tgt.json",
    "init_from.json",
    "log.jsonl",
    WEIGHTS,
    "checkpoints/best.safetensors",
    "checkpoints/.*.tmp",
    "tensorboard/events.out.tfevents.*",
    "data/*.jsonl",
)
_SUBFOLDERS = ("checkpoints", "tensorboard", "data")  # removed where they are empty


def is_run(path: Path) -> bool:
    """Whether a run made this folder."""
    return (path / MARKER).is_file()


@dataclass(frozen=True)
class RunFacts:
    """The facts that a run notes in its folder, to go on from them.

    Attributes:
        heedful: the version that began it.
        precision: of its steps, `auto` resolved.
        data: the name of the folder of its prepared data.
        outputs: the name of the folder of a teacher's outputs, where it learns from these.
        start_id: what a decoder of two stacks reads first.
    """

    heedful: str
    precision: str
    data: str | None = None
    outputs: str | None = None
    start_id: Annotated[int, Field(ge=0)] | None = None


def facts_of_run(path: Path) -> RunFacts:
    """The facts of the run in a folder; raises UserError where they are missing or damaged."""
    try:
        return TypeAdapter(RunFacts).validate_python(read_object(path / MARKER))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path / MARKER} is damaged ({key}); start a new run") from None


class RunFolder:
    """The folder of a run, made if it is missing, and locked until the block ends.

    The operating system holds the lock and frees it when the process ends, so the lock file of a
    killed run does not block later runs.

    Args:
        resume: the folder must be that of a run; otherwise it must be missing, empty, or that of
            a run.

    Raises:
        UserError: the folder holds files that no run wrote, or no run to resume; another process
            works there; it cannot be made. Nothing in it has changed then.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; give a folder for the run (--out)")
        for name in (MARKER, "recipe.yaml") if resume else ():
            if not (path / name).is_file():
                raise UserError(f"{path} holds no run to resume (no {name}); leave out --resume")
        self._check_content()

    def _check_content(self) -> None:
        """Refuse a folder with files in it that no run made."""
        if is_run(self.path) or not self.path.is_dir():
            return
        for name in sorted(os.listdir(self.path)):
            if name != LOCK and not is_leftover(name):
                raise UserError(
                    f"{self.path} holds {name}, which no run wrote; give a new folder (--out)"
                )

    def __enter__(self) -> Self:
        lock = self.path / LOCK
        self._lock, self._made = FileLock(lock), list[Path]()
        try:
            self._made += missing_folders(self.path)
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
            remove_empty(self._made)
            raise cannot_write(self.path, error) from None
        self._before = self._own()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.release()
        if kind is not None:
            remove_empty(self._made)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A start that fails removes what it wrote, so that the corrected command can be used."""
        try:
            yield
        except BaseException:
            self._remove(self._own() - self._before)
            raise

    def claim(self, precision: str) -> None:
        """Mark the folder as that of a new run, of which `auto` precision was resolved so.

        Where an earlier run was killed before it had anything to go on from, what it wrote is
        removed, but for `recipe.yaml`, which may be the recipe that was read.

        Raises:
            UserError: there is a run to go on with, or a finished one.
        """
        is_finished = (self.path / WEIGHTS).exists() and read_step(self.path / WEIGHTS) is None
        if is_finished or Checkpoints(self.path / "checkpoints", keep=1).newest():
            raise UserError(
                f"{self.path} already holds a run; go on with --resume, or give another --out"
            )
        self._remove(self._own() - {self.path / "recipe.yaml", self.path / MARKER})
        facts = RunFacts(heedful.__version__, precision)
        write_json(self.path / MARKER, asdict(facts))

    def note(self, **facts: Any) -> None:
        """Write down some fields of the run's `RunFacts`."""
        write_json(self.path / MARKER, asdict(replace(facts_of_run(self.path), **facts)))

    def _own(self) -> set[Path]:
        return {path for pattern in _OWN for path in self.path.glob(pattern)}

    def _remove(self, own: Iterable[Path]) -> None:
        for path in own:
            remove(path)
        remove_empty([self.path / name for name in _SUBFOLDERS])
