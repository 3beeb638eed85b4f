"""A bulk job: files through a model, shard by shard, from its start or from where it stopped."""

import json
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import heedful
from heedful.backends.manifest import FOLDER
from heedful.bulk.folder import JobFolder
from heedful.bulk.formats import SUFFIXES, check_format
from heedful.bulk.model_files import (
    Stamp,
    model_files,
    model_hashes,
    sha256_of_file,
    stamp_of,
)
from heedful.bulk.shards import SHARD_ROWS, ShardReader
from heedful.bulk.tasks import task_class
from heedful.bulk.worker import ShardResult, Worker
from heedful.data.row_files import expand_path
from heedful.data.tables import table_files
from heedful.data.text_files import check_no_pipe
from heedful.data.workers import map_in_order
from heedful.errors import UserError
from heedful.files import user_errors
from heedful.hardware import cores
from heedful.progress import PrintLine, track

_FILES = ("glossary", "json_schema")  # options that may name a file
# Returns the results of the shards that are not done, in any order.
MapShards = Callable[[Worker, ShardReader, Collection[int]], Generator[ShardResult, None, None]]


@dataclass(frozen=True)
class BulkJob:
    """The settings of a job.

    Attributes:
        model: the directory.
        task, pairs: as in `heedful.bulk.tasks.task_class`.
        inputs: files, folders and patterns, as in `heedful.data.row_files.expand_path`.
        output: the folder of the job: a new or empty one, or that of the job to continue.
        fields: for each text of a row its key or column; empty: as in `read_rows`.
        options: of the task.
        format: of the output, as in `heedful.bulk.formats`.
        shard_rows: most rows of a shard.
        load_settings: keywords of `heedful.pipelines.load`; default of its threads: those that the
            job in the folder was started with, or the share of the cores of one of several workers.
        workers: their number.
    """

    model: Path
    task: str
    inputs: Sequence[Path]
    output: Path
    pairs: bool = False
    fields: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    format: str = "jsonl"
    shard_rows: int = SHARD_ROWS
    load_settings: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1

    def check(self) -> None:
        """Raise UserError for a format or an option that the task does not have."""
        task = task_class(self.task, pairs=self.pairs)
        check_format(self.format, task)
        for name in self.options:
            if name not in task.known_options():
                raise UserError(f"{self.task} has no option {name}; leave it out")

    def reader(self) -> ShardReader:
        """The reader of the files; raises UserError for no files or wrong fields."""
        files = tuple(file for path in self.inputs for file in expand_path(path))
        if not files:
            raise UserError("no files are given; name at least one")
        for path in files:
            check_no_pipe(path)
        columns = task_class(self.task, pairs=self.pairs).columns
        fields: Sequence[str | None] = self.fields or [None] * len(columns)
        if len(fields) != len(columns):
            raise UserError(
                f"{len(fields)} fields are given, but a row has {len(columns)} "
                f"({' and '.join(columns)}); give one for each"
            )
        return ShardReader(files, tuple(zip(columns, fields, strict=True)), self.shard_rows)

    def settings(self, files: Sequence[Path]) -> dict[str, Any]:
        """All that the results depend on, for the manifest.

        A job continues only if they are equal, so no measurements here (`JobFolder.write_manifest`
        has the totals).
        """
        inputs = [
            {"path": str(path), "sha256": [*map(sha256_of_file, table_files(path))]}
            for path in files
        ]
        content = {
            "heedful": heedful.__version__,
            "model": model_hashes(self.model),
            "task": self.task,
            "pairs": self.pairs,
            "options": {name: _with_hash(name, value) for name, value in self.options.items()},
            "loading": dict(self.load_settings),
            "format": self.format,
            "shard_rows": self.shard_rows,
            "fields": [*self.fields],
            "inputs": inputs,
        }
        copy: dict[str, Any] = json.loads(json.dumps(content))
        return copy

    def worker(self, model_hashes: Mapping[str, str]) -> Worker:
        """The worker for the shards; `model_hashes` are those of the manifest."""
        return Worker(
            self.model,
            model_hashes,
            self.load_settings,
            self.task,
            self.pairs,
            self.options,
            self.format,
        )


def _with_hash(name: str, value: Any) -> Any:
    """The value of an option for the manifest; of one that names a file with its SHA-256."""
    if _is_file(name, value):
        return {"path": str(value), "sha256": sha256_of_file(Path(value))}
    return value


def _is_file(name: str, value: Any) -> bool:
    """True for the value of an option that is a file."""
    return name in _FILES and isinstance(value, str | Path) and os.path.isfile(value)


@dataclass(frozen=True)
class BulkReport:
    """The numbers of a finished job: of all its rows, those with an error, and its shards."""

    num_rows: int
    num_errors: int
    num_shards: int


def run_job(job: BulkJob, map_shards: MapShards, print_line: PrintLine) -> BulkReport:
    """Process all shards, or the remaining ones of an interrupted job.

    Args:
        map_shards: processes the shards and reports progress, see `run_locally`.

    Raises:
        UserError: settings that contradict each other or those of the job in the folder; a folder
            with other files; input that cannot be read, none of whose first rows can, or that is
            changed meanwhile, as the model may be; errors of the model; a full disk. Finished
            shards are kept.
    """
    job.check()
    folder = JobFolder(job.output, SUFFIXES[job.format])
    job = _with_threads(job, folder.settings)
    reader = job.reader()
    own_files = [str(value) for name, value in job.options.items() if _is_file(name, value)]
    stamps = {file: _stamp(Path(file)) for file in (*map(str, reader.files), *own_files)}
    settings = job.settings(reader.files)
    _check_same(settings, folder)
    if folder.is_complete:
        print_line(f"{job.output} is complete: nothing is left to do")
        return _report(folder)
    num_shards, num_rows = _count(reader)
    with folder.opened(settings):
        num_done = sum(entry["rows"] for entry in folder.entries.values())
        if folder.entries:
            print_line(
                f"continues: {len(folder.entries):,} of {num_shards:,} shards "
                f"({num_done:,} of {num_rows:,} rows) are finished"
            )
        try:
            with track(_VERBS[job.task], num_rows - num_done) as advance:
                worker = replace(job.worker(settings["model"]), progress=advance)
                with closing(map_shards(worker, reader, folder.entries.keys())) as results:
                    for result in results:
                        for file in (result.file, *own_files):
                            _check_unchanged(file, stamps)
                        folder.add(result)
        except (KeyboardInterrupt, SystemExit):
            print_line(
                f"interrupted: {len(folder.entries):,} of {num_shards:,} shards are finished; the "
                "same command continues"
            )
            raise
        for file in stamps:
            _check_unchanged(file, stamps)
        folder.write_manifest(settings)
    return _report(folder)


def run_locally(
    worker: Worker, reader: ShardReader, done: Collection[int], *, num_workers: int
) -> Generator[ShardResult, None, None]:
    """The results of the shards that are not done, in order, by processes of this machine.

    One worker runs in this process.
    """
    advance = worker.progress
    if num_workers > 1:
        worker = replace(worker, progress=None)  # a shard's rows are counted when it is finished
    shards = reader.shards(done)
    results = map_in_order(worker, shards, num_workers, work="the bulk job", setting="workers")
    for result in results:
        if num_workers > 1 and advance is not None:
            advance(result.num_rows)
        yield result


def choose_workers(model: Path, device: str = "auto", backend: str = "auto") -> int:
    """The default number of workers: the cores, as far as half of the memory holds the models.

    On a GPU it is one.
    """
    is_converted = backend != "eager" and (model / FOLDER).is_dir()
    if device != "cpu" and not (device == "auto" and is_converted):  # which is run by the CPU
        from heedful.pipelines import choose_device

        if choose_device(device).type != "cpu":
            return 1
    weights = sum(path.stat().st_size for path in model_files(model))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores(), memory // (4 * max(1, weights))))


def _with_threads(job: BulkJob, before: Mapping[str, Any] | None) -> BulkJob:
    """The job with a number of threads; `before` are the settings that the folder has.

    It is one of the settings, as it can change a result in its last digits.
    """
    threads = job.load_settings.get("threads")
    if threads is None and before is not None:
        threads = before.get("loading", {}).get("threads")
    elif threads is None and job.workers > 1:
        threads = max(1, cores() // job.workers)
    return replace(job, load_settings={**job.load_settings, "threads": threads})


def _check_same(settings: Mapping[str, Any], folder: JobFolder) -> None:
    """Raise UserError for other settings than those that a folder was started with."""
    before = folder.settings
    if before is None:
        return
    if changed := [key for key, value in settings.items() if before.get(key) != value]:
        raise UserError(
            f"{folder.path} was started with other settings ({', '.join(changed)}); give those "
            "again, or another folder"
        )


def _stamp(path: Path) -> list[Stamp]:
    """`stamp_of` a file of an option, or each file of an input."""
    with user_errors("read", path):
        return [*map(stamp_of, table_files(path))]


def _check_unchanged(file: str, stamps: Mapping[str, list[Stamp]]) -> None:
    """Raise UserError if a file is not as it was when the job started."""
    if _stamp(Path(file)) != stamps[file]:
        raise UserError(
            f"{file} was changed while the job ran; put it back, and the same command continues, "
            "or give another folder"
        )


def _count(reader: ShardReader) -> tuple[int, int]:
    """The numbers of shards and of rows.

    Raises:
        UserError: no rows; a file that cannot be read; no row of the first shard can be.
    """
    num_shards = num_rows = 0
    for shard in reader.shards():
        if num_shards == 0:
            rows = shard.rows()
            if not any(row.texts for row in rows):
                raise UserError(f"no row can be used: {rows[0].error}")
        num_shards += 1
        num_rows += shard.num_rows
    if not num_rows:
        raise UserError("the input has no rows; name other files")
    return num_shards, num_rows


def _report(folder: JobFolder) -> BulkReport:
    assert folder.manifest is not None
    manifest = folder.manifest
    return BulkReport(manifest["rows"], manifest["errors"], len(manifest["shards"]))


_VERBS = {
    "translate": "translating",
    "generate": "generating",
    "score": "scoring",
    "embed": "embedding",
    "classify": "classifying",
    "fill": "filling",
}
