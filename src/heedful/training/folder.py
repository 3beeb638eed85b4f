"""The folder of a run: marked as one by a file, and locked while a process trains in it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter, ValidationError

import heedful
from heedful.config import Recipe
from heedful.errors import UserError
from heedful.files import (
    cannot_write,
    is_leftover,
    missing_folders,
    read_object,
    read_text,
    remove,
    remove_empty,
    write_json,
    write_text,
)
from heedful.recipe_files import recorded_recipe
from heedful.training.checkpoint import Checkpoints
from heedful.zoo.saved import LOCK, WEIGHTS, read_step

MARKER = "run.json"  # written first into the empty folder of a new run
_DATA = ("data/train.jsonl", "data/valid.jsonl", "data/test.jsonl")  # rows from memory
# Patterns of the files that a start writes; no others are ever removed.
_WRITTEN_AT_START = (
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
    *_DATA,
)
_KEPT_AT_RESTART = (MARKER, "recipe.yaml", *_DATA)
_SUBFOLDERS = ("checkpoints", "tensorboard", "data")  # removed if they are empty


def is_run(path: Path) -> bool:
    """True if the folder is that of a run."""
    return (path / MARKER).is_file()


@dataclass(frozen=True)
class RunFacts:
    """The content of `run.json`: facts that are needed to resume the run.

    Attributes:
        heedful: the version of heedful that started the run.
        precision: the precision of steps, with `auto` resolved.
        data: the name of the folder of prepared data in the cache.
        outputs: the name of the folder of teacher outputs, for sequence-level distillation.
        start_id: the decoder's start token, for an encoder-decoder.
        batch_parts: the parts of each batch, unless the recipe sets them.
        threads: the number of torch's threads that was measured to be the fastest; None: not
            measured.
        report: facts on data, net and machine for the report of the run, and at its end the scores.
    """

    heedful: str
    precision: str
    data: str | None = None
    outputs: str | None = None
    start_id: Annotated[int, Field(ge=0)] | None = None
    batch_parts: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] | None = None
    report: dict[str, Any] = field(default_factory=dict)


def facts_of_run(path: Path) -> RunFacts:
    """The facts of the run in a folder; raises UserError if they are missing or damaged."""
    try:
        return TypeAdapter(RunFacts).validate_python(read_object(path / MARKER))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path / MARKER} is damaged ({key}); start a new run") from None


def can_resume(path: Path) -> bool:
    """True if the folder is that of a run which has at least its recipe."""
    return is_run(path) and (path / "recipe.yaml").is_file()


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a run's recipe; a file with equal values is kept, with its comments.

    Raises:
        UserError: the file has other values, and a user has edited it.
    """
    if path.is_file():
        saved = recorded_recipe(path)
        if saved == recipe:
            return
        if saved.to_yaml() != read_text(path):
            raise UserError(
                f"{path} was edited and is another recipe, so it is not replaced; give another "
                "out=FOLDER, or move it away"
            )
    write_text(path, recipe.to_yaml())


@dataclass
class RunFolder:
    """A context in which the folder of a run exists and is locked.

    The lock belongs to the process and ends with it, so the lock file of a killed run does not
    block later runs.

    Args:
        resume: the folder must be that of a run; otherwise it must be missing, empty, or that of
            a run.

    Raises:
        UserError: the folder contains files of another origin, or no run to resume; another
            process trains in it; it cannot be created. The folder is unchanged then.
    """

    path: Path
    resume: bool = field(default=False, kw_only=True)

    def __enter__(self) -> Self:
        path = self.path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; give a folder for the run, out=FOLDER")
        for name in (MARKER, "recipe.yaml") if self.resume else ():
            if not (path / name).is_file():
                raise UserError(f"{path} holds no run to resume (no {name}); leave out resume=True")
        is_new = path.is_dir() and not is_run(path)
        for name in sorted(os.listdir(path)) if is_new else ():
            if name != LOCK and not is_leftover(name):
                raise UserError(f"{path} holds {name}, which no run wrote; give a new out=FOLDER")
        lock = path / LOCK
        self._lock, self._made = FileLock(lock), list[Path]()
        try:
            self._made += missing_folders(path)
            path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            lock.write_text(f"{os.getpid()}\n")
        except Timeout:
            process = lock.read_text(errors="replace").strip() if lock.is_file() else "?"
            raise UserError(
                f"{path} is in use by a run (process {process}); wait for it, stop it, or "
                "give another out=FOLDER"
            ) from None
        except OSError as error:
            remove_empty(self._made)
            raise cannot_write(path, error) from None
        self._before = self._files()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.release()
        if kind is not None:
            remove_empty(self._made)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Remove the files written in the block if it raises, so that a new run can start."""
        try:
            yield
        except BaseException:
            self._remove(self._files() - self._before)
            raise

    def claim(self, precision: str, batch_parts: int = 1) -> None:
        """Mark the folder as that of a new run.

        Files of an earlier run that was killed before its first checkpoint are removed, except
        `recipe.yaml` and the data that it names, which may be those of the new run.

        Args:
            precision, batch_parts: as in `RunFacts`.

        Raises:
            UserError: the folder contains a run that can be resumed, or a finished one.
        """
        is_finished = (self.path / WEIGHTS).exists() and read_step(self.path / WEIGHTS) is None
        if is_finished or Checkpoints(self.path / "checkpoints", keep=1).newest():
            raise UserError(
                f"{self.path} already holds a run; continue it with resume=True, or give another "
                "out=FOLDER"
            )
        self._remove(self._files() - {self.path / name for name in _KEPT_AT_RESTART})
        facts = RunFacts(heedful.__version__, precision, batch_parts=batch_parts)
        write_json(self.path / MARKER, asdict(facts))

    def update_facts(self, **facts: Any) -> None:
        """Update some fields of the run's `RunFacts`."""
        write_json(self.path / MARKER, asdict(replace(facts_of_run(self.path), **facts)))

    def _files(self) -> set[Path]:
        return {path for pattern in _WRITTEN_AT_START for path in self.path.glob(pattern)}

    def _remove(self, files: Iterable[Path]) -> None:
        for path in files:
            remove(path)
        remove_empty([self.path / name for name in _SUBFOLDERS])
