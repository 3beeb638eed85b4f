"""The number of torch's threads in a training on a CPU.

Which is the fastest depends on the sizes of net and batches, so the run's first steps are timed.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice

import torch

from heedful import processes
from heedful.config import Training
from heedful.processes import Processes
from heedful.progress import PrintLine
from heedful.tasks.start import PreparedRun
from heedful.training.folder import RunFacts, RunFolder, facts_of_run
from heedful.training.step import TrainedNet, WeightUpdates, step_batches

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

    def __init__(self, run: PreparedRun, facts: RunFacts) -> None:
        settings, alone = run.task.recipe.training, Processes()
        trained = TrainedNet(run.loss_net(deepcopy(run.model.net)))
        self._updates = WeightUpdates(
            trained, settings, alone, precision=facts.precision, compiler=None
        )
        steps = step_batches(
            run.epochs.plan_epoch,
            run.epochs.load_batch,
            alone,
            num_batches=settings.gradient_accumulation,
            num_parts=facts.batch_parts,
            seed=settings.seed,
            device=torch.device("cpu"),
        )
        self._steps = [batches for batches, _ in islice(steps, _MAX_STEPS)]
        self.take(1)  # allocates memory

    def take(self, count: int) -> tuple[float, int]:
        """Seconds and tokens of the first `count` steps; the learning rate is 0."""
        tokens, began = 0, time.perf_counter()
        for number, batches in enumerate(self._steps[:count], 1):
            tokens += self._updates.take(batches, 0.0, number).tokens
        return time.perf_counter() - began, tokens


@contextmanager
def fastest_threads(
    run: PreparedRun, folder: RunFolder, resume: bool, print_line: PrintLine
) -> Iterator[None]:
    """In the block a run on a CPU uses the number of threads that is the fastest.

    A new run measures it, if it is long enough, and notes it in its folder; a resumed one uses the
    number that is noted, as the order of sums depends on it. Without effect for several processes,
    and with `training.parallel` other than auto.

    Args:
        run: with the model on the CPU.
    """
    threads = torch.get_num_threads()
    chosen: int | None = None
    try:
        if processes.current().count == 1 and run.task.recipe.training.parallel == "auto":
            if resume:
                chosen = facts_of_run(folder.path).threads
            elif threads > 1:
                chosen = _measure(run, folder, print_line)
        if chosen is not None:
            torch.set_num_threads(min(chosen, threads))
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(run: PreparedRun, folder: RunFolder, print_line: PrintLine) -> int | None:
    """The fastest number, noted in the run's folder; None for a run that is not measured."""
    threads, training = torch.get_num_threads(), run.task.recipe.training
    total = run.epochs.total_steps()
    if training.compile or not _is_long(training, total, _LONGEST_STEP):
        return None
    steps = TimedSteps(run, facts_of_run(folder.path))
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
