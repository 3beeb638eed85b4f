"""A run before it begins: its data prepared, and its size, memory and time estimated."""

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean

import torch
from torch import Tensor

from heedful.config import Recipe
from heedful.cost.flops import ProductCounter
from heedful.cost.parameters import parameters_by_part
from heedful.cost.timing import StepTimer, is_enough, without_first
from heedful.data.collate import Batch
from heedful.kernels import library as kernels
from heedful.pipelines import choose_device
from heedful.progress import PrintLine
from heedful.recipe_files import with_absolute_paths
from heedful.tasks.run_data import DataSummary, RunData
from heedful.tasks.start import (
    PreparedRun,
    checked_task,
    count_data,
    new_run,
    prepare_data,
)
from heedful.training.optimizer import resolve_precision

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss


@dataclass(frozen=True)
class RunEstimate:
    """The size of a run and its cost.

    Attributes:
        examples: number by split, in units of `unit`.
        num_parameters: of the net, and by the name of its parts.
        steps_per_epoch: optimizer steps of the first epoch.
        total_steps: at the first of max_steps and max_epochs; None without both.
        epochs: in `total_steps`, which differ where weights of corpora change.
        tokens_per_step: mean of the measured steps, padding not counted.
        flops_per_token: of the matrix products of the measured steps.
        state_bytes: weights, gradients, and state of the optimizer.
        peak_bytes: largest memory in the measured steps: of the GPU, or of the process on a CPU.
        seconds_per_step: mean of the measured steps, uncompiled and without evaluations.
        seconds: of all steps, at most max_minutes; None without any end but early stopping.
    """

    task: str
    device: str
    precision: str
    unit: str
    examples: dict[str, int]
    architecture: str
    num_parameters: dict[str, int]
    steps_per_epoch: int
    total_steps: int | None
    epochs: float | None
    tokens_per_step: float
    flops_per_token: float
    state_bytes: int
    peak_bytes: int
    seconds_per_step: float
    seconds: float | None


def prepare_run(recipe: Recipe, print_line: PrintLine) -> RunData:
    """Prepare the data of a run, so that it begins at once; raises UserError as the run does."""
    return prepare_data(checked_task(with_absolute_paths(recipe)), print_line)


def count_run(recipe: Recipe) -> DataSummary:
    """The counts of all data of a run, which are not stored; raises UserError as the run does."""
    return count_data(checked_task(with_absolute_paths(recipe)))


def estimate_run(recipe: Recipe, print_line: PrintLine) -> RunEstimate:
    """Prepare data and net of a run, take a few steps, and return the run's size and cost.

    No folder is written but the cache. Raises UserError as the run does.
    """
    recipe = with_absolute_paths(recipe)
    task = checked_task(recipe)
    if recipe.training.compile:
        print_line("the steps are measured without training.compile, in the shapes that it pads to")
    for line in task.notes():
        print_line(line)
    device = choose_device(recipe.training.device)
    precision = resolve_precision(str(recipe.training.precision), device)
    run = new_run(task, None, device, print_line)
    net, epochs = run.model.net.to(device), run.epochs
    plan = epochs.plan_epoch(0)
    size = recipe.training.gradient_accumulation
    steps = [plan[start : start + size] for start in range(0, len(plan), size)]
    parts = recipe.training.batch_parts or 1
    batches = (
        [part.to(device) for item in items for part in _parts(epochs.load_batch(0, item), parts)]
        for items in cycle(steps)
    )
    cost = _measure(run, batches, device, precision)
    total = epochs.total_steps()
    ends = [] if total is None else [total * cost.seconds]
    ends += [] if recipe.training.max_minutes is None else [60 * recipe.training.max_minutes]
    return RunEstimate(
        task=recipe.task,
        device=str(device),
        precision=precision,
        unit=task.unit,
        examples={name: task.split_size(run.data, name) for name in run.data.splits},
        architecture=run.model.metadata.architecture,
        num_parameters=parameters_by_part(net),
        steps_per_epoch=len(steps),
        total_steps=total,
        epochs=None if total is None else epochs.num_epochs(total),
        tokens_per_step=cost.tokens,
        flops_per_token=cost.flops / cost.tokens,
        state_bytes=cost.state_bytes,
        peak_bytes=cost.peak_bytes,
        seconds_per_step=cost.seconds,
        seconds=min(ends, default=None),
    )


@dataclass(frozen=True)
class _StepCost:
    seconds: float
    tokens: float
    flops: float
    state_bytes: int
    peak_bytes: int


def _measure(
    run: PreparedRun,
    steps: Iterable[list[Batch]],
    device: torch.device,
    precision: str,
) -> _StepCost:
    """Means over some steps, each of one or more batches; the first is not counted.

    FLOPs are counted in passes over the last batches, after all steps.
    """
    settings, net = run.task.recipe.training, run.model.net
    timer = StepTimer(run.loss_net(), settings, precision, device)
    seconds: list[float] = []
    tokens: list[int] = []
    taken: list[list[Batch]] = []
    state_bytes = 0
    for batches in steps:
        seconds.append(timer.take(batches))
        state_bytes = _state_bytes(net, timer.optimizer)
        timer.clear()
        tokens.append(sum(batch.num_tokens for batch in batches))
        taken.append(batches)
        if is_enough(seconds):
            break
    seconds_per_step, mean_tokens = fmean(without_first(seconds)), fmean(without_first(tokens))
    peak_bytes = _peak_bytes(device)  # before more is computed without the kernels
    with kernels.unused(), ProductCounter() as products:
        for batch in taken[-1]:
            timer.loss_net(batch).loss.backward()
    flops = mean_tokens * products.flops / tokens[-1]
    return _StepCost(seconds_per_step, mean_tokens, flops, state_bytes, peak_bytes)


def _parts(batch: Batch, count: int) -> list[Batch]:
    """The parts of a batch that have rows, as a run computes them."""
    parts = (batch.part(index, count) for index in range(count))
    return [part for part in parts if part is not None]


def _state_bytes(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    parameters = [*net.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.nbytes for tensor in [*parameters, *gradients, *state])


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
