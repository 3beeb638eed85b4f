"""The cores of a CPU in training: threads of one process, or several processes.

Which is the fastest depends on the sizes of net and batches, so the run's first steps are timed.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from heedful import processes
from heedful.config import Training
from heedful.parts.experts import Experts
from heedful.processes import Processes
from heedful.progress import PrintLine
from heedful.tasks.start import PreparedRun
from heedful.training.folder import RunFacts, RunFolder, facts_of_run
from heedful.training.parallel import trained_net
from heedful.training.step import MicroBatches, WeightUpdates, parts_per_batch
from heedful.zoo.sizes import host_memory

_LEAST_RUN = 600.0  # seconds: shorter runs are not measured
_LONGEST_STEP = 0.5  # seconds: in longer steps, products keep all threads busy (docs/log.md)
_SECONDS_PER_ROUND = 0.5  # of the steps that are timed, for each use of the cores
_TRIAL_STEPS, _MAX_STEPS = 3, 50  # number of steps that are timed, at first and at most
_ROUNDS = 3
_LEAST_GAIN = 1.05  # over one process with all threads
_MAX_PROCESSES = 8
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss

# Called in each further process with the recipe as JSON, the run's folder, and `resume`.
Follower = Callable[[Mapping[str, Any], str, bool], object]


@dataclass(frozen=True)
class CoreUse:
    """A number of processes, and of the threads of each.

    >>> str(CoreUse(2, 1)), str(CoreUse(1, 4))
    ('2 processes of 1 thread', '1 process of 4 threads')
    """

    processes: int
    threads: int

    def __str__(self) -> str:
        counts = (self.processes, "process", "es"), (self.threads, "thread", "s")
        words = (f"{count} {word}{plural if count > 1 else ''}" for count, word, plural in counts)
        return " of ".join(words)


@dataclass(frozen=True)
class _Measurement:
    """The steps that several processes take together to be timed.

    Attributes:
        num_rounds, num_steps: number of rounds, and of the steps of each.
        batch_parts: parts of each batch.
    """

    use: CoreUse
    num_rounds: int
    num_steps: int
    batch_parts: int


class TimedSteps:
    """The first steps of a run, taken by a copy of its net.

    Args:
        facts: of the run, for its precision.
        batch_parts: parts of each batch.
        group: the processes that take the steps together.
    """

    def __init__(
        self, run: PreparedRun, facts: RunFacts, batch_parts: int, group: Processes
    ) -> None:
        settings = run.task.recipe.training
        self._net = deepcopy(run.model.net)
        self._updates = WeightUpdates(
            trained_net(run.train_step(self._net), settings, group, facts.precision),
            settings,
            group,
            precision=facts.precision,
            compiler=None,
        )
        micro_batches = MicroBatches(
            run.epochs.plan_epoch,
            run.epochs.load_batch,
            group,
            num_batches=settings.gradient_accumulation,
            num_parts=batch_parts,
            seed=settings.seed,
            device=torch.device("cpu"),
        )
        self._steps = [step for step, _ in islice(micro_batches.steps(), _MAX_STEPS)]
        self.take(1)  # allocates memory

    def take(self, count: int) -> tuple[float, int]:
        """Seconds and tokens of the first `count` steps; the learning rate is 0."""
        tokens, began = 0, time.perf_counter()
        for number, micro_batches in enumerate(self._steps[:count], 1):
            tokens += self._updates.take(micro_batches, 0.0, number).tokens
        return time.perf_counter() - began, tokens

    def depends_on_parts(self) -> bool:
        """True if a step depends on the parts of its batches by more than the order of sums.

        It draws random numbers, as for dropout, or has a loss that is a mean over a batch.
        """
        if any(isinstance(module, Experts) for module in self._net.modules()):
            return True
        self.take(1)
        after = torch.get_rng_state()
        torch.manual_seed(self._steps[0][-1].seed)  # as before its last forward pass
        return not torch.equal(after, torch.get_rng_state())


@contextmanager
def fastest_cores(
    run: PreparedRun,
    folder: RunFolder,
    follower: Follower | None,
    resume: bool,
    print_line: PrintLine,
) -> Iterator[None]:
    """In the block a run on a CPU uses its cores in the way that is the fastest.

    A new run measures this, if it is long enough, and notes it in its folder; a resumed one does
    as noted. Without effect on a GPU, for several processes of torchrun, and with
    `training.parallel` other than auto.

    Args:
        run: on the CPU.
        follower: the program of further processes; None: without effect.
    """
    is_free = processes.current().count == 1 and run.task.recipe.training.parallel == "auto"
    if follower is None or not is_free:
        yield
        return
    threads = torch.get_num_threads()
    content = run.task.recipe.model_dump(mode="json", exclude_unset=True)
    arguments = (follower, content, str(folder.path), resume)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        others = stack.enter_context(ExitStack())

        def start(count: int) -> Processes:
            return others.enter_context(processes.start_others(count, *arguments))

        if resume:
            use = _noted_use(folder.path, threads)
            if use is not None and use.processes > 1:
                print_line(f"cores      {use}, as at the start of the run")
                start(use.processes).from_main(lambda: use)
        else:
            use = _measure(run, folder, start, print_line)
            if use is not None and use.processes == 1:
                others.close()
        if use is not None:
            torch.set_num_threads(use.threads)
        yield


def follow_cores(run: PreparedRun, out: Path) -> bool:
    """Take part in the measurement as a further process; True if it trains afterwards."""
    group = processes.current()
    wanted: _Measurement | CoreUse = group.from_main(_not_main)
    if isinstance(wanted, CoreUse):  # noted when the run began
        use = wanted
    else:
        torch.set_num_threads(wanted.use.threads)
        steps = TimedSteps(run, facts_of_run(out), wanted.batch_parts, group)
        for _ in range(wanted.num_rounds):
            steps.take(wanted.num_steps)
        use = group.from_main(_not_main)
    torch.set_num_threads(use.threads)
    return use.processes > 1


def _not_main() -> Any:
    """The value of `from_main` in the main process, which other processes do not compute."""
    raise AssertionError


def _noted_use(out: Path, threads: int) -> CoreUse | None:
    """The use that a run has measured; one process if the machine now has fewer threads."""
    facts = facts_of_run(out)
    if facts.processes is None or facts.threads is None:
        return None
    use = CoreUse(facts.processes, facts.threads)
    return use if use.processes * use.threads <= threads else CoreUse(1, threads)


def _measure(
    run: PreparedRun,
    folder: RunFolder,
    start: Callable[[int], Processes],
    print_line: PrintLine,
) -> CoreUse | None:
    """The fastest use, noted in the run's folder; None for a run that is not measured."""
    facts, threads = facts_of_run(folder.path), torch.get_num_threads()
    training = run.task.recipe.training
    if threads == 1 or training.compile:
        return None
    total = run.epochs.total_steps()
    if not _is_long(training, total, _LONGEST_STEP):
        return None
    alone = TimedSteps(run, facts, facts.batch_parts, Processes())
    seconds = alone.take(_TRIAL_STEPS)[0] / _TRIAL_STEPS
    if seconds > _LONGEST_STEP or not _is_long(training, total, seconds):
        return None
    num_steps = min(_MAX_STEPS, max(_TRIAL_STEPS, math.ceil(_SECONDS_PER_ROUND / seconds)))
    steps = {CoreUse(1, number): alone for number in _halvings(threads)}
    several, group = _several(training, facts, alone, num_steps, threads), None
    if several is not None:
        try:
            group = start(several.use.processes)
        except (OSError, RuntimeError) as error:  # as where processes cannot open connections
            reason = str(error).strip().splitlines()[0]
            print_line(f"cores      one process, since no other can be started: {reason}")
    if several is not None and group is not None:
        group.from_main(lambda: several)
        steps[several.use] = TimedSteps(run, facts, several.batch_parts, group)
    rates = _rates(steps, num_steps)
    usual = CoreUse(1, threads)
    chosen = max(rates, key=rates.__getitem__)
    if rates[chosen] < _LEAST_GAIN * rates[usual]:
        chosen = usual
    if group is not None:
        group.from_main(lambda: chosen)
    folder.update_facts(processes=chosen.processes, threads=chosen.threads)
    if several is not None and chosen == several.use:
        folder.update_facts(batch_parts=several.batch_parts)
    others = ", ".join(f"{use} {rate:,.0f}" for use, rate in rates.items() if use != chosen)
    print_line(f"cores      {chosen}: {rates[chosen]:,.0f} tokens/s ({others})")
    return chosen


def _rates(steps: Mapping[CoreUse, TimedSteps], count: int) -> dict[CoreUse, float]:
    """Tokens per second of each use, in the best of some alternating rounds of `count` steps."""
    rates = dict.fromkeys(steps, 0.0)
    for use in [*steps] * _ROUNDS:
        torch.set_num_threads(use.threads)
        seconds, tokens = steps[use].take(count)
        rates[use] = max(rates[use], tokens / seconds)
    return rates


def _is_long(training: Training, total_steps: int | None, seconds_per_step: float) -> bool:
    """True for a run of at least `_LEAST_RUN` seconds, if a step takes this long."""
    ends = [] if total_steps is None else [total_steps * seconds_per_step]
    ends += [] if training.max_minutes is None else [60 * training.max_minutes]
    return min(ends, default=math.inf) >= _LEAST_RUN


def _halvings(number: int) -> list[int]:
    """The number, half of it, a quarter of it, down to 1."""
    return [number] if number == 1 else [number, *_halvings(number // 2)]


def _several(
    training: Training, facts: RunFacts, alone: TimedSteps, num_steps: int, threads: int
) -> _Measurement | None:
    """The measurement of several processes; None if they would take other steps than one process.

    Batches may be divided into more parts unless the recipe sets their number, or a step depends on
    it. All processes must fit into the memory.
    """
    may_divide = training.batch_parts is None and not alone.depends_on_parts()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    for count in _halvings(min(threads, _MAX_PROCESSES)):
        accumulated, batch_parts = training.gradient_accumulation, facts.batch_parts
        if may_divide:
            batch_parts = parts_per_batch(accumulated, count)
        has_equal_shares = accumulated * batch_parts % count == 0
        if count > 1 and has_equal_shares and count * peak <= host_memory():
            return _Measurement(CoreUse(count, threads // count), _ROUNDS, num_steps, batch_parts)
    return None
