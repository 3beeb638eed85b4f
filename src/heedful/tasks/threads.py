"""The number of torch's threads in a training on a CPU.

Which is the fastest depends on the sizes of net and batches, so the run's first steps are timed.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch

from heedful import processes
from heedful.config import Training
from heedful.processes import Processes
from heedful.progress import PrintLine
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.start import RunParts, make_loss
from heedful.tasks.task import Task
from heedful.training.folder import RunFacts, RunFolder, facts_of_run
from heedful.training.micro_batches import MicroBatch, MicroBatches
from heedful.training.parallel import TrainedNet
from heedful.training.step import TrainStep
from heedful.training.updates import WeightUpdates

_LEAST_RUN = 600.0  # seconds: shorter runs are not measured
_LONGEST_STEP = 0.5  # seconds: in longer steps, products keep all threads busy (docs/log.md)
_SECONDS_PER_ROUND = 0.5  # of the steps that are timed, for each number of threads
_TRIAL_STEPS, _MAX_STEPS = 3, 50  # number of steps that are timed, at first and at most
_ROUNDS = 3
_LEAST_GAIN = 1.05  # over all threads


class TimedSteps:
    """The first steps of a run, taken by a copy of its net.

    Args:
        facts: of the run, for its precision and the parts of its batches.
    """

    def __init__(self, task: Task, parts: RunParts, facts: RunFacts) -> None:
        settings, alone = task.recipe.training, Processes()
        step = TrainStep(
            deepcopy(parts.model.net),
            make_loss(task, parts, torch.device("cpu")),
            activation_checkpointing=settings.activation_checkpointing,
        )
        self._updates = WeightUpdates(
            TrainedNet(step), settings, alone, precision=facts.precision, compiler=None
        )
        epochs = EpochBatches(task, parts.data)
        of_step = MicroBatches(
            epochs.plan_epoch,
            epochs.load_batch,
            alone,
            num_batches=settings.gradient_accumulation,
            num_parts=facts.batch_parts,
            seed=settings.seed,
            device=torch.device("cpu"),
        ).of_step
        self._steps, position = list[list[MicroBatch]](), (0, 0)
        for _ in range(_MAX_STEPS):
            micro_batches, position = of_step(*position)
            self._steps.append(micro_batches)
        self.take(1)  # allocates memory

    def take(self, count: int) -> tuple[float, int]:
        """Seconds and tokens of the first `count` steps; the learning rate is 0."""
        tokens, began = 0, time.perf_counter()
        for number, micro_batches in enumerate(self._steps[:count], 1):
            tokens += self._updates.take(micro_batches, 0.0, number).tokens
        return time.perf_counter() - began, tokens


@contextmanager
def fastest_threads(
    task: Task, parts: RunParts, folder: RunFolder, resume: bool, print_line: PrintLine
) -> Iterator[None]:
    """In the block a run on a CPU uses the number of threads that is the fastest.

    A new run measures it, if it is long enough, and notes it in its folder; a resumed one uses the
    number that is noted, as the order of sums depends on it. Without effect for several processes,
    and with `training.parallel` other than auto.

    Args:
        parts: of the run, on the CPU.
    """
    threads = torch.get_num_threads()
    chosen: int | None = None
    try:
        if processes.current().count == 1 and task.recipe.training.parallel == "auto":
            if resume:
                chosen = facts_of_run(folder.path).threads
            elif threads > 1:
                chosen = _measure(task, parts, folder, print_line)
        if chosen is not None:
            torch.set_num_threads(min(chosen, threads))
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(task: Task, parts: RunParts, folder: RunFolder, print_line: PrintLine) -> int | None:
    """The fastest number, noted in the run's folder; None for a run that is not measured."""
    threads, training = torch.get_num_threads(), task.recipe.training
    total = EpochBatches(task, parts.data).total_steps()
    if training.compile or not _is_long(training, total, _LONGEST_STEP):
        return None
    steps = TimedSteps(task, parts, facts_of_run(folder.path))
    seconds = steps.take(_TRIAL_STEPS)[0] / _TRIAL_STEPS
    if seconds > _LONGEST_STEP or not _is_long(training, total, seconds):
        return None
    count = min(_MAX_STEPS, max(_TRIAL_STEPS, math.ceil(_SECONDS_PER_ROUND / seconds)))
    rates = dict.fromkeys((threads >> shift for shift in range(threads.bit_length())), 0.0)
    for number in [*rates] * _ROUNDS:  # the best of some alternating rounds
        torch.set_num_threads(number)
        seconds, tokens = steps.take(count)
        rates[number] = max(rates[number], tokens / seconds)
    chosen = max(rates, key=rates.__getitem__)
    if rates[chosen] < _LEAST_GAIN * rates[threads]:
        chosen = threads
    folder.update_facts(threads=chosen)
    others = ", ".join(f"{n} {rate:,.0f}" for n, rate in rates.items() if n != chosen)
    print_line(f"threads    {chosen}: {rates[chosen]:,.0f} tokens/s ({others})")
    return chosen


def _is_long(training: Training, total_steps: int | None, seconds_per_step: float) -> bool:
    """True for a run of at least `_LEAST_RUN` seconds, if a step takes this long."""
    ends = [] if total_steps is None else [total_steps * seconds_per_step]
    ends += [] if training.max_minutes is None else [60 * training.max_minutes]
    return min(ends, default=math.inf) >= _LEAST_RUN
