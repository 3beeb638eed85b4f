"""The forward and backward passes of an optimizer step, and the processes that run them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch

from heedful.data.collate import Batch
from heedful.processes import Processes


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass.

    Attributes:
        is_counted: False in a process that has no rows in this round: its loss has weight 0, so
            that it takes part in the exchange of gradients.
        seed: of the random numbers of the pass (dropout), a function of the run's seed, the epoch,
            and the rows.
    """

    batch: Batch
    is_counted: bool
    seed: int

    @property
    def num_targets(self) -> int:
        """The targets that the loss of the step is divided by."""
        return self.batch.num_targets if self.is_counted else 0

    @property
    def num_tokens(self) -> int:
        """The tokens that are not padding."""
        return self.batch.num_tokens if self.is_counted else 0

    @property
    def corpora(self) -> dict[str, int]:
        """The tokens by corpus, for data of several; the names are those of all of them."""
        return {name: count * self.is_counted for name, count in self.batch.corpora.items()}


def parts_per_batch(num_batches: int, num_processes: int) -> int:
    """The least number of parts per batch for which all processes have equally many per step."""
    return num_processes // gcd(num_batches, num_processes)


class MicroBatches:
    """The micro-batches of each step: the parts of its planned batches, dealt to the processes.

    A step has the same parts with the same random numbers for any number of processes, so its
    gradient depends on that number only by the order of sums.

    Args:
        plan_epoch, load_batch: as in `TrainingHooks`.
        num_batches: planned batches per step, fewer at the end of an epoch.
        num_parts: parts that the rows of a batch are divided into.
        seed: the run's.
    """

    def __init__(
        self,
        plan_epoch: Callable[[int], Sequence[Any]],
        load_batch: Callable[[Any], Batch],
        processes: Processes,
        *,
        num_batches: int,
        num_parts: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._plan_epoch, self._load_batch = plan_epoch, load_batch
        self._processes, self._device = processes, device
        self._num_batches, self._num_parts, self._seed = num_batches, num_parts, seed
        self._plan: tuple[int, Sequence[Any]] = (-1, [])

    def of_step(self, epoch: int, first: int) -> tuple[list[MicroBatch], tuple[int, int]]:
        """The micro-batches of this process in the step that begins at a batch of an epoch.

        Every process has equally many.

        Returns:
            The micro-batches, and epoch and batch at which the next step begins.
        """
        if self._plan[0] != epoch:
            self._plan = (epoch, self._plan_epoch(epoch))
        plan = self._plan[1]
        indices = range(first, min(first + self._num_batches, len(plan)))
        loaded: dict[int, Batch] = {}

        def load(index: int, part: int) -> Batch | None:
            if index not in loaded:
                loaded[index] = self._load_batch(plan[index])
            return loaded[index].part(part, self._num_parts)

        def micro_batch(index: int, part: int, *, is_counted: bool = True) -> MicroBatch:
            rows = load(index, part)
            if rows is None:
                rows, is_counted = load(index, self._num_parts - 1), False
            assert rows is not None, "the last part has rows"
            seed = np.random.SeedSequence([self._seed, epoch, index, part])
            number = int(seed.generate_state(1, np.uint64)[0])
            return MicroBatch(rows.to(self._device), is_counted, number)

        parts = [(index, part) for index in indices for part in range(self._num_parts)]
        own = [micro_batch(*part) for part in parts[self._processes.rank :: self._processes.count]]
        if len(own) < -(-len(parts) // self._processes.count):
            own.append(micro_batch(*parts[0], is_counted=False))
        next_batch = indices.stop
        return own, (epoch + 1, 0) if next_batch >= len(plan) else (epoch, next_batch)
