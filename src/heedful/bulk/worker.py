"""The worker of bulk inference: opens a model, and turns shards into the bytes of their output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from heedful import pipelines
from heedful.bulk.formats import Record, encode
from heedful.bulk.model_files import ModelFiles
from heedful.bulk.shards import Row, Shard
from heedful.bulk.tasks import BulkTask, Result, open_task, task_class
from heedful.errors import UserError
from heedful.progress import Advance


@dataclass(frozen=True)
class ShardResult:
    """The content of a shard's output, and the numbers of its rows and of those with an error.

    Attributes:
        index: of the shard.
        file, line: the place of its first row.
    """

    index: int
    file: str
    line: int
    content: bytes
    num_rows: int
    num_errors: int


@dataclass(frozen=True)
class Worker:
    """Processes shards; opens its model at the first one, so that it can be sent to a process.

    A shard is processed as a whole, so that its results do not depend on the worker or on other
    shards.

    Args:
        model: the directory.
        model_hashes: of its files, as in the job's manifest; another model is refused.
        load_settings: keywords of `heedful.pipelines.load`.
        task, pairs: as in `heedful.bulk.tasks.task_class`.
        options: of the task.
        format: of the output.
        progress: called with the number of rows of each batch; None: the worker is in another
            process.
    """

    model: Path
    model_hashes: Mapping[str, str]
    load_settings: Mapping[str, Any]
    task: str
    pairs: bool
    options: Mapping[str, Any]
    format: str
    progress: Advance | None = field(default=None, compare=False)

    def __call__(self, shard: Shard) -> ShardResult:
        """The results of a shard.

        Raises:
            UserError: the model cannot be opened, is not of the task, or not the job's.
        """
        files, task = self._opened  # before the rows: its errors are of no row
        rows = shard.rows()
        results = self._results(rows, shard.first_row)
        records: list[Record] = [
            {
                "file": shard.file,
                "line": row.line,
                **dict(zip(task.columns, row.texts, strict=False)),
                **result,
            }
            for row, result in zip(rows, results, strict=True)
        ]
        num_errors = sum("error" in result for result in results)
        content = encode(records, self.format, task)
        files.check_unchanged()  # a backend opens the net itself at the first text that needs it
        return ShardResult(
            shard.index, shard.file, shard.chunk.first_line, content, len(rows), num_errors
        )

    @cached_property
    def _opened(self) -> tuple[ModelFiles, BulkTask[Any]]:
        task = task_class(self.task, pairs=self.pairs)
        files = ModelFiles(self.model, self.model_hashes)
        model = pipelines.load(self.model, **self.load_settings)
        files.check_unchanged()
        return files, open_task(task, model, self.options)

    def _results(self, rows: Sequence[Row], first: int) -> list[Result]:
        """A result for each row; of a row that cannot be used, its error."""
        _, task = self._opened
        results: list[Result] = [{"error": row.error} for row in rows]
        usable = [index for index, row in enumerate(rows) if not row.error]
        counter = _Counter(len(rows), self.progress)
        failures: list[Exception] = []

        def run(indices: list[int]) -> None:
            """Store the results of rows; a batch that fails is divided into halves."""
            if not indices:
                return
            texts = [rows[index].texts for index in indices]
            try:
                outputs = task.results(texts, first, indices, counter.advance)
            except Exception as error:
                if isinstance(error, UserError) and (errors := self._errors(rows, indices)):
                    for index, reason in errors.items():
                        results[index] = {"error": reason}
                    run([index for index in indices if index not in errors])
                elif len(indices) == 1:
                    failures.append(error)
                    results[indices[0]] = {"error": f"{type(error).__name__}: {error}"}
                else:
                    middle = len(indices) // 2
                    run(indices[:middle])
                    run(indices[middle:])
            else:
                for index, output in zip(indices, outputs, strict=True):
                    results[index] = output

        run(usable)
        if len(failures) == len(usable) > 1:  # no row is the cause
            raise failures[0]
        counter.report_rest()
        return results

    def _errors(self, rows: Sequence[Row], indices: Sequence[int]) -> dict[int, str]:
        """The reasons why rows cannot be used, by index."""
        errors = {}
        _, task = self._opened
        for index in indices:
            try:
                task.check(rows[index].texts, rows[index].line)
            except UserError as error:
                errors[index] = str(error)
        return errors


class _Counter:
    """Reports the rows of a shard to `progress`, each once, even if some are processed again."""

    def __init__(self, total: int, progress: Advance | None) -> None:
        self._left, self._progress = total, progress

    def advance(self, count: int) -> None:
        """Report `count` rows, at most the remaining ones."""
        count = min(count, self._left)
        self._left -= count
        if self._progress is not None:
            self._progress(count)

    def report_rest(self) -> None:
        """Report the remaining rows."""
        self.advance(self._left)
