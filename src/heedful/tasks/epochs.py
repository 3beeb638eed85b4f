"""The training batches of a run, epoch by epoch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64

from heedful.data.buckets import pad_batch
from heedful.data.collate import Batch
from heedful.data.columns import Columns, Sequences, rows_of
from heedful.data.labels import LABELS
from heedful.data.plans import Windows
from heedful.data.subword_sampling import SubwordSampler
from heedful.tasks.corpora import corpus_shares
from heedful.tasks.run_data import RunData
from heedful.tasks.task import Task

_COUNTED_ROWS = 4_000_000  # of all epochs, that are planned to count their batches
_TOKENS_PER_ROW = 32  # that are planned in the time of a row
_SAMPLING_COST = 20  # times that of planning, of the lengths of sampled subword splits


class EpochBatches:
    """The batches of a task.

    With `training.subword_sampling`, words have new subword splits in each epoch, sampled when a
    batch is loaded, as `training.noise` is added; with `training.compile`, batches are padded to
    few shapes.

    Raises:
        UserError: a tokenizer that does not support subword sampling; a task without fixed shapes.
    """

    def __init__(self, task: Task, data: RunData) -> None:
        training, train = task.recipe.training, data.splits["train"]
        self._task = task
        self._shapes = task.batch_shapes(data) if training.compile else None
        self._stored = replace(data, shapes=self._shapes)  # without noise
        self._current: RunData | None = None
        self._last: tuple[int, Sequence[Any]] | None = None  # to plan
        self._num_steps_of: dict[Any, int] = {}
        self._shares = corpus_shares(task.recipe, train.corpora) if train.corpora else []
        self._noise = task.row_noise(data) if training.noise.is_on else None
        self._sampler: SubwordSampler | None = None
        if training.subword_sampling is not None:
            columns = task.text_columns(data.tokenizers)
            has_limit = task.recipe_keys.includes("data.max_length")
            self._sampler = SubwordSampler(
                train,
                {name: column.tokenizer for name, column in columns.items()},
                training.subword_sampling,
                seed=training.seed,
                max_length=task.recipe.data.max_length if has_limit else None,
                max_tokens=training.batch_tokens,
            )

    def plan_epoch(self, epoch: int) -> Sequence[Any]:
        """The batches of an epoch, a pure function, as items for `load_batch`."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._task.plan_epoch(self._data_of(epoch))
        return self._last[1]

    def total_steps(self) -> int | None:
        """The optimizer steps until `max_steps` or `max_epochs`, whichever is first; else None.

        The batches of every epoch are counted. Of large data those of the first epoch with the same
        weights of corpora count for an epoch; they differ by few batches.
        """
        training, total = self._task.recipe.training, 0
        if training.max_epochs is None:
            return training.max_steps
        for epoch in range(training.max_epochs):
            total += self._num_steps(epoch)
            if training.max_steps is not None and total >= training.max_steps:
                return training.max_steps
        return total

    def num_epochs(self, steps: int) -> float:
        """The epochs of the first `steps` optimizer steps."""
        epoch = 0
        while steps > (size := self._num_steps(epoch)):
            steps -= size
            epoch += 1
        return epoch + steps / size

    def _num_steps(self, epoch: int) -> int:
        """The optimizer steps of an epoch, see `total_steps`."""
        kind = epoch if self._counts_all else tuple(s.passes_in(epoch) for s in self._shares)
        if kind not in self._num_steps_of:
            accumulation = self._task.recipe.training.gradient_accumulation
            self._num_steps_of[kind] = -(-len(self.plan_epoch(epoch)) // accumulation)
        return self._num_steps_of[kind]

    @cached_property
    def _counts_all(self) -> bool:
        """True if all epochs are planned in about a second."""
        train, epochs = self._stored.splits["train"], self._task.recipe.training.max_epochs
        if epochs is None:
            return False
        passes = float(epochs)
        if self._shares:
            rows = sum(share.passes_before(epochs) * share.corpus.size for share in self._shares)
            passes = float(rows / len(train))
        sides = [column for column in train.columns.values() if isinstance(column, Sequences)]
        cost = len(train) + sum(int(side.offsets[-1]) for side in sides) // _TOKENS_PER_ROW
        is_sampled = self._sampler is not None or self._noise is not None
        return passes * cost * (_SAMPLING_COST if is_sampled else 1) <= _COUNTED_ROWS

    def load_batch(self, epoch: int, item: Any) -> Batch:
        """A planned batch of an epoch as tensors on the CPU, a pure function."""
        data = self._data_of(epoch)
        batch = self._task.collate(data, item)
        train = data.splits["train"]
        if train.corpora:
            corpora = corpus_tokens(train, item, batch.indices)
            batch = replace(batch, corpora=corpora, indices=rows_of(batch.indices))
        return batch if self._shapes is None else pad_batch(batch, self._shapes)

    def _data_of(self, epoch: int) -> RunData:
        """The data as they are in an epoch; those of the last one asked for are kept."""
        current = self._current
        if current is None or current.epoch != epoch:
            train = self._stored.splits["train"]
            train = train if self._sampler is None else self._sampler.epoch(epoch)
            train = train if self._noise is None else self._noise.epoch(epoch, train)
            splits = self._stored.splits | {"train": train}
            self._current = current = replace(self._stored, epoch=epoch, splits=splits)
        return current


def corpus_tokens(train: Columns, item: Any, rows: Int64[np.ndarray, " B"]) -> dict[str, int]:
    """The tokens of a planned batch by corpus, for data with several; both sides of pairs count.

    Args:
        item: the planned batch: windows; a list of the rows that are packed into each row; or
            anything else for a batch of whole rows.
        rows: (B,), the rows of the batch, or indices of copies of rows.
    """
    if isinstance(item, Windows):
        columns = np.arange(int(item.sizes.max()))
        inside = columns < item.sizes[:, None]
        indices = item.starts[:, None] + np.where(inside, columns, 0)
        rows = item.order[np.searchsorted(item.offsets, indices, side="right") - 1][inside]
        counts = np.ones(len(rows))
    else:
        if isinstance(item, list) and all(isinstance(part, np.ndarray) for part in item):
            rows = np.concatenate(item)
        sides = [
            column
            for name, column in train.columns.items()
            if isinstance(column, Sequences) and name != LABELS
        ]
        counts = np.sum([side.take(rows).lengths for side in sides], axis=0)
    ends = np.array([corpus.end for corpus in train.corpora])
    numbers = np.searchsorted(ends, rows_of(rows), side="right")
    sums = np.bincount(numbers, weights=counts, minlength=len(ends)).astype(int).tolist()
    return {corpus.name: count for corpus, count in zip(train.corpora, sums, strict=True)}
