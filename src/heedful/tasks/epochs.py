"""The training batches of a run, epoch by epoch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heedful.data.buckets import pad_batch
from heedful.data.collate import Batch
from heedful.data.subwords import SubwordSampler
from heedful.tasks.run_data import RunData
from heedful.tasks.task import Task


class EpochBatches:
    """The batches of a task.

    With `training.subword_sampling`, words have new subword splits in each epoch; with
    `training.compile`, batches are padded to few shapes.

    Raises:
        UserError: a tokenizer that does not support subword sampling; a task without fixed shapes.
    """

    def __init__(self, task: Task, data: RunData) -> None:
        training = task.recipe.training
        self._task, self._data = task, data
        self._shapes = task.batch_shapes(data) if training.compile else None
        self._sampler = None
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

    def plan_epoch(self, epoch: int) -> Sequence[Any]:
        """The batches of an epoch, a pure function, as items for `load_batch`."""
        if self._sampler is not None:
            splits = self._data.splits | {"train": self._sampler.epoch(epoch)}
            self._data = replace(self._data, splits=splits)
        return self._task.plan_epoch(self._data, epoch)

    def load_batch(self, item: Any) -> Batch:
        """A batch of the epoch that was planned last, as tensors on the CPU."""
        batch = self._task.collate(self._data, item)
        return batch if self._shapes is None else pad_batch(batch, self._shapes)
