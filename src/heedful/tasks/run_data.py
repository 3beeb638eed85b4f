"""The data of a run: rows of text as read, and columns of ids as prepared."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from heedful.data.buckets import BatchShape
from heedful.data.columns import Columns, Sequences, open_columns
from heedful.data.filters import Filter
from heedful.data.labels import ProblemType
from heedful.data.prepared import FolderLock
from heedful.data.reports import DataReport, FilterReport
from heedful.data.row_files import FileRows, JoinedRows
from heedful.data.rows import Rows, RowSource
from heedful.data.scan import Scan
from heedful.data.splits import Split
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, format_names
from heedful.files import read_json

FILTERS = "filters.json"  # in a prepared folder: the report of its filters


@dataclass(frozen=True)
class Inherited:
    """Tokenizers, start token and labels that a run inherits from another model.

    Attributes:
        tokenizers: of source and target; None: new ones are trained.
        start_id: the decoder's start token of an encoder-decoder; None: the tokenizer's BOS.
        labels: the class names of a classifier, in the order of its logits.
        problem: what the logits of a classifier that the run starts from mean; None: it starts
            from another model, or from none.
    """

    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    start_id: int | None = None
    labels: tuple[str, ...] = ()
    problem: ProblemType | None = None


@dataclass(frozen=True)
class RawData:
    """The sources of a task's rows of text: files, or rows in memory that it generates.

    Attributes:
        sources: of train, and optionally of valid and test, by the recipe keys that name their
            files, without "data."; rows in memory by the name of their split.
        hold_out_tail: where there is no source of valid, chooses the last texts of train by facts
            about them; they are not compared with train, as lines of running text recur. None: all
            rows of random sources are held out.
        filters: of the rows of train.
        drops_held_out: rows of train with the source of a held-out row are dropped.
        problem: the kind of the labels.
    """

    sources: dict[str, dict[str, FileRows] | Rows]
    hold_out_tail: Callable[[Scan], Split] | None = None
    filters: Sequence[Filter] = ()
    drops_held_out: bool = True
    problem: ProblemType = "single_label"

    def rows_of(self, split: str) -> RowSource:
        """The rows of all sources of a split, one after the other."""
        sources = self.sources[split]
        if isinstance(sources, Rows):
            return sources
        first, *others = (replace(files, problem=self.problem) for files in sources.values())
        return JoinedRows((first, *others)) if others else first


@dataclass(frozen=True)
class RunData:
    """The examples of a run: columns of ids, opened from a prepared folder.

    Attributes:
        tokenizers: of source and target; one object twice for a task with one side.
        start_id: the decoder's start token of an encoder-decoder.
        epoch: the number of the epoch whose batches are planned and collated.
        shapes: with `training.compile`, those that training batches are padded to; else None.
        outputs: the prepared folder of teacher outputs that `train` consists of, if any.
        holds: prevent the removal of the folders while the data are used.
    """

    directory: Path
    tokenizers: tuple[Tokenizer, Tokenizer]
    splits: dict[str, Columns]
    start_id: int
    epoch: int = 0
    shapes: list[BatchShape] | None = None
    outputs: Path | None = None
    holds: tuple[FolderLock, ...] = field(default=(), repr=False, compare=False)

    def with_teacher_outputs(self, outputs: Path | None) -> "RunData":
        """The data with the `train` of the prepared folder `outputs`; None: unchanged."""
        if outputs is None:
            return self
        train = open_columns(outputs / "train")
        splits, holds = self.splits | {"train": train}, (*self.holds, FolderLock(outputs))
        return replace(self, splits=splits, outputs=outputs, holds=holds)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of `RunFacts` by which the data are opened again."""
        outputs = None if self.outputs is None else self.outputs.name
        return {"data": self.directory.name, "outputs": outputs, "start_id": self.start_id}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a task with one side."""
        return self.tokenizers[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the logits in their order; empty for data without labels."""
        return tuple(self.splits["train"].info.get("labels", ()))

    @property
    def problem(self) -> ProblemType:
        """The kind of the labels."""
        problem: ProblemType = self.splits["train"].info.get("problem", "single_label")
        return problem

    @property
    def final(self) -> str:
        """The split for the final scores."""
        return "test" if "test" in self.splits else "valid"

    def ids(self, split: str, column: str = "text") -> Sequences:
        """A column of id sequences of a split."""
        return self.splits[split].sequences(column)

    @property
    def filters(self) -> FilterReport:
        """The training rows that filters dropped when the data were prepared."""
        path = self.directory / FILTERS
        return FilterReport.from_json(read_json(path)) if path.is_file() else FilterReport()

    def texts(self, split: str, count: int | None = None) -> list[dict[str, str]]:
        """The held-out rows of a split as text: all, or the first `count`."""
        with (self.directory / f"{split}.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in islice(lines, count)]


class DataSummary(NamedTuple):
    """The counts of prepared data.

    Attributes:
        sources: a line on each source that was read, by its key.
        tokenizers: of source and target; one object twice for a task with one side.
        reports: by split.
        labels: the training rows of each label, in the order of the labels.
    """

    sources: Mapping[str, str]
    filters: FilterReport
    tokenizers: tuple[Tokenizer, Tokenizer]
    reports: Mapping[str, DataReport]
    labels: Mapping[str, int]

    def check_labels(self) -> None:
        """Raise UserError for a label of the training files that no training row has."""
        if missing := [name for name, count in self.labels.items() if not count]:
            raise UserError(
                f"no training row has the label {format_names(missing)}: all its rows are held out "
                "or dropped; add rows, or drop those with it (a name of a column: "
                "data.train.header=true)"
            )

    def lines(self) -> Iterator[str]:
        """Lines on the files, the filters, the tokenizers, the splits and the labels."""
        for name, summary in self.sources.items():
            yield f"{'data.' + name:<10} {summary}"
        if self.filters.filters:
            noun = self.reports["train"].noun  # for a row
            yield f"filters    {self.filters.summary(noun)}"
        src, tgt = self.tokenizers
        more = "" if src is tgt else f" and {tgt.vocab_size:,}"
        yield f"tokenizer  {src.kind}, {src.vocab_size:,} entries{more}"
        for name, report in self.reports.items():
            yield f"{name:<10} {report.summary()}"
        if self.labels:
            shown = [f"{name} ({count:,})" for name, count in self.labels.items()]
            yield f"labels     {format_names(shown, str)}"
