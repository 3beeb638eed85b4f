"""The training batches of a run, epoch by epoch."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Int64

from heedful.data.buckets import pad_batch
from heedful.data.collate import Batch
from heedful.data.columns import Columns, Sequences
from heedful.data.plans import Windows
from heedful.data.subword_sampling import SubwordSampler
from heedful.tasks.corpora import corpus_shares, recipe_after, weight_steps
from heedful.tasks.run_data import RunData
from heedful.tasks.task import Task


class EpochItem(NamedTuple):
    """A planned batch of an epoch; `item`: as in `Task.plan_epoch`."""

    epoch: int
    item: Any


class EpochPlan(Sequence[EpochItem]):
    """The planned batches of an epoch; those of large epochs are planned when they are read.

    Args:
        limit: the number of batches after which the epoch ends; None: all are read.
    """

    def __init__(self, epoch: int, items: Sequence[Any], limit: int | None = None) -> None:
        self._epoch, self._items, self._limit = epoch, items, limit

    def __len__(self) -> int:
        size = len(self._items)
        return size if self._limit is None else min(size, self._limit)

    @overload
    def __getitem__(self, index: int) -> EpochItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[EpochItem]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return EpochItem(self._epoch, self._items[range(len(self))[index]])

    def __iter__(self) -> Iterator[EpochItem]:
        return (EpochItem(self._epoch, item) for item in islice(self._items, self._limit))


class EpochBatches:
    """The batches of a task.

    With `training.subword_sampling`, words have new subword splits in each epoch, sampled when a
    batch is loaded; with `training.compile`, batches are padded to few shapes. Where weights of
    corpora change by step, an epoch ends at that step, and the next one has the new weights.

    Raises:
        UserError: a tokenizer that does not support subword sampling; a task without fixed shapes.
    """

    def __init__(self, task: Task, data: RunData) -> None:
        training = task.recipe.training
        self._task, self._data = task, data
        self._shapes = task.batch_shapes(data) if training.compile else None
        self._sampler: SubwordSampler | None = None
        self._current: tuple[int, RunData] | None = None
        self._weight_steps = weight_steps(task.recipe)
        self._first_steps = [0]  # of the epochs whose predecessors were planned
        if training.subword_sampling is not None:
            columns = task.text_columns(data.tokenizers)
            has_limit = task.recipe_keys.includes("data.max_length")
            self._sampler = SubwordSampler(
                data.splits["train"],
                {name: column.tokenizer for name, column in columns.items()},
                training.subword_sampling,
                seed=training.seed,
                max_length=task.recipe.data.max_length if has_limit else None,
                max_tokens=training.batch_tokens,
            )

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """The batches of an epoch, a pure function, as items for `load_batch`.

        With weights by step all epochs before it are planned too, to count their steps, unless
        they were planned before.
        """
        if not self._weight_steps:
            return EpochPlan(epoch, self._task.plan_epoch(self._data_of(epoch), epoch))
        for earlier in range(len(self._first_steps) - 1, epoch):
            self.plan_epoch(earlier)
        first, steps = self._first_steps[epoch], self._weight_steps
        accumulation = self._task.recipe.training.gradient_accumulation
        end = next((step for step in steps if step > first), None)
        task = copy(self._task)
        task.recipe = recipe_after(task.recipe, first)
        items = task.plan_epoch(self._data_of(epoch), epoch)
        plan = EpochPlan(epoch, items, None if end is None else (end - first) * accumulation)
        if len(self._first_steps) == epoch + 1:
            self._first_steps.append(first + -(-len(plan) // accumulation))
        return plan

    def mean_size(self, first: int) -> int:
        """Batches of an epoch, on average until `max_epochs`, by those of the first epoch.

        Epochs differ where the weights of corpora change.
        """
        recipe, corpora = self._task.recipe, self._data.splits["train"].corpora
        end = recipe.training.max_epochs
        if end is None or not corpora:
            return first
        shares = corpus_shares(recipe, corpora)
        rows, rows_of_first = (
            sum(share.passes_before(epoch) * share.corpus.size for share in shares)
            for epoch in (end, 1)
        )
        return max(1, round(first * rows / (end * rows_of_first)))

    def load_batch(self, planned: EpochItem) -> Batch:
        """A planned batch as tensors on the CPU, a pure function."""
        data = self._data_of(planned.epoch)
        batch = self._task.collate(data, planned.item)
        train = data.splits["train"]
        if train.corpora:
            batch = replace(batch, corpora=corpus_tokens(train, planned.item, batch.indices))
        return batch if self._shapes is None else pad_batch(batch, self._shapes)

    def _data_of(self, epoch: int) -> RunData:
        """The data as they are in an epoch; those of the last one asked for are kept."""
        if self._sampler is None:
            return self._data
        if self._current is None or self._current[0] != epoch:
            splits = self._data.splits | {"train": self._sampler.epoch(epoch)}
            self._current = epoch, replace(self._data, splits=splits)
        return self._current[1]


def corpus_tokens(train: Columns, item: Any, rows: Int64[np.ndarray, " B"]) -> dict[str, int]:
    """The tokens of a planned batch by corpus, for data with several; both sides of pairs count.

    Args:
        item: the planned batch: windows, or anything else for a batch of whole rows.
        rows: (B,), the rows of the batch.
    """
    if isinstance(item, Windows):
        columns = np.arange(int(item.sizes.max()))
        inside = columns < item.sizes[:, None]
        indices = item.starts[:, None] + np.where(inside, columns, 0)
        rows = item.order[np.searchsorted(item.offsets, indices, side="right") - 1][inside]
        counts = np.ones(len(rows))
    else:
        sides = [column for column in train.columns.values() if isinstance(column, Sequences)]
        counts = np.sum([side.take(rows).lengths for side in sides], axis=0)
    ends = np.array([corpus.end for corpus in train.corpora])
    numbers = np.searchsorted(ends, rows, side="right")
    sums = np.bincount(numbers, weights=counts, minlength=len(ends)).astype(int).tolist()
    return {corpus.name: count for corpus, count in zip(train.corpora, sums, strict=True)}
