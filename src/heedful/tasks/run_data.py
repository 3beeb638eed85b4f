"""The data of a run: as read, and as prepared for training and evaluation."""

import json
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from heedful.data.columns import Columns, Sequences, open_columns
from heedful.data.prepared import Hold
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class InheritedParts:
    """Tokenizers, start id and labels that a run takes over from another model.

    Attributes:
        tokenizers: of both sides; None: new ones are made.
        start_id: what a decoder of two stacks reads first; None: the tokenizer's BOS.
        labels: names of a classifier's classes, in the order of its logits.
    """

    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    start_id: int | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class RawData:
    """Rows of text by split, as a task reads or makes them.

    Attributes:
        rows: of train, valid and, where given, test; those of train are none of the others.
        summaries: by split, what was found in its files.
        labels: names of the classes, from all labelled training texts.
    """

    rows: dict[str, Rows]
    summaries: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Data:
    """Examples of a run: columns of ids, opened from a prepared folder.

    Attributes:
        start_id: what a decoder of two stacks reads first.
        outputs: the prepared folder of a teacher's outputs, where `train` is made of these.
        holds: keep the folders from being removed while the data are used.
    """

    directory: Path
    tokenizers: tuple[Tokenizer, Tokenizer]
    splits: dict[str, Columns]
    start_id: int
    outputs: Path | None = None
    holds: tuple[Hold, ...] = field(default=(), repr=False, compare=False)

    def with_teacher_outputs(self, outputs: Path | None) -> "Data":
        """The data with another `train`, where one is prepared in the folder `outputs`."""
        if outputs is None:
            return self
        train = open_columns(outputs / "train")
        splits, holds = self.splits | {"train": train}, (*self.holds, Hold(outputs))
        return replace(self, splits=splits, outputs=outputs, holds=holds)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a task with one side."""
        return self.tokenizers[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits; none where texts have no labels."""
        return tuple(self.splits["train"].info.get("labels", ()))

    @property
    def final(self) -> str:
        """The split that a finished run is scored on."""
        return "test" if "test" in self.splits else "valid"

    def ids(self, split: str, column: str = "text") -> Sequences:
        """A column of sequences of ids."""
        return self.splits[split].sequences(column)

    def texts(self, split: str, count: int | None = None) -> list[dict[str, str]]:
        """The held-out rows as they were read: all, or the first `count`."""
        with (self.directory / f"{split}.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in islice(lines, count)]


class PlannedRows(NamedTuple):
    """A planned batch: some rows as an epoch changes them."""

    epoch: int
    indices: Int64[np.ndarray, " B"]
