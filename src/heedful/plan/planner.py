"""A plan of a run: parameters, FLOPs, memory, bytes sent and time, before anything is trained.

No weights are allocated. Lengths are those of the recipe's data if its files exist; without data
every input has the maximum length.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from heedful.config import Recipe
from heedful.cost.batches import first_rows, padded_tokens
from heedful.cost.devices import CPU, find_accelerator
from heedful.cost.parallelism import (
    Evenness,
    Parallel,
    RankMemory,
    bytes_sent,
    evenness,
    rank_memory,
)
from heedful.cost.parameters import active_parameters, parameters_by_part
from heedful.cost.timing import (
    MEASURED_STEPS,
    ProductTimer,
    StepTimer,
    is_enough,
    without_first,
)
from heedful.cost.trace import StepCost, trace_step, with_random_weights
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.plan.work import Work
from heedful.progress import PrintLine, track
from heedful.recipe_files import with_absolute_paths
from heedful.tasks.rdrop import RDropLoss
from heedful.training.optimizer import resolve_precision
from heedful.training.parallel import not_sharded_reason
from heedful.training.step import LossFunction, LossNet, parts_per_batch
from heedful.zoo.architectures import host_memory

GPUS_PER_MACHINE = 8
UTILIZATION = 0.4
_TRACED_BATCHES = 4  # whose FLOPs are counted
_USED_MEMORY = 0.8  # share of the memory for steps that are taken to measure their time
NETWORK = 50e9  # bytes/s of a GPU to other machines: 400 Gb/s each (NVIDIA DGX H100 data sheet)


@dataclass(frozen=True)
class PlanOptions:
    """The devices, their use and the amount of training that a run is planned for.

    Args:
        gpus: number of processes, one for each device.
        gpu: name of a device (`heedful.cost.devices`), or cpu: this machine.
        memory: bytes of a device; None: that of its data sheet, or of this machine.
        parallel: how processes share the net; None: as the recipe, ddp by default.
        tokens: training tokens in all; no data are read. None: those of the recipe's data and
            steps.
        utilization: share of a GPU's product rate that a step reaches; None: 0.4. The speed of
            this machine is measured.

    Raises:
        UserError: a value out of range, an unknown device, or a value without effect.
    """

    gpus: int = 1
    gpu: str = CPU
    memory: float | None = None
    parallel: Parallel | None = None
    tokens: int | None = None
    utilization: float | None = None

    def __post_init__(self) -> None:
        find_accelerator(self.gpu)
        if self.gpus < 1:
            raise UserError(f"gpus={self.gpus}: must be at least 1")
        if self.memory is not None and not self.memory > 0:
            raise UserError(f"memory={self.memory:g}: must be above 0 GB")
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"tokens={self.tokens}: must be at least 1")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise UserError(f"utilization={self.utilization:g}: must be above 0 and at most 1")
        if self.utilization is not None and self.gpu == CPU:
            raise UserError(
                f"utilization={self.utilization:g} is for GPUs, and the speed of the CPU is "
                "measured: give gpu=NAME too, or leave it out"
            )
        if self.parallel == "none" and self.gpus > 1:
            raise UserError(
                f"parallel=none is for one GPU, not {self.gpus}; use ddp or fsdp, or leave it out"
            )

    @property
    def parallelism(self) -> Parallel:
        """The kind of data parallelism: none, ddp or fsdp."""
        return "none" if self.gpus == 1 else self.parallel or "ddp"


@dataclass(frozen=True)
class Plan:
    """The cost of a run.

    Attributes:
        num_parameters: of the net ("total"), and by the name of its parts.
        active_parameters: without the experts that a token is not sent to.
        lengths: where the lengths of the inputs are from.
        flops_per_token: of the products of a step; tokens are those of all sides without padding.
        forward_per_token, backward_per_token: their parts, see `StepCost`.
        tokens_per_step: of all processes.
        memory: of the main process at the largest batch, by part.
        memory_peak: bytes at the peak of a step.
        memory_available: bytes of a device.
        remedies: if it does not fit, changes of settings with the peak that each leads to.
        bytes_sent: by each process in a step.
        seconds_per_step: at the stated utilization, or as measured on this CPU, uncompiled; None if
            a step does not fit in its memory, and so for the next three.
        product_rate: FLOP/s of products: of the data sheet, or measured on this CPU.
        product_share: share of that rate that a step reaches.
        total_steps, total_tokens, seconds: of the run, or of `PlanOptions.tokens`; None if it has
            no end, or no step was timed. Of a run with `training.max_minutes` at most those.
        ranks: how evenly the batches are shared by several processes; None for one.
    """

    task: str
    architecture: str
    device: str
    gpus: int
    parallel: Parallel
    precision: str
    num_parameters: dict[str, int]
    active_parameters: int
    lengths: str
    flops_per_token: float
    forward_per_token: float
    backward_per_token: float
    tokens_per_step: float
    memory: RankMemory
    memory_peak: int
    memory_available: float
    remedies: dict[str, int]
    bytes_sent: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    product_rate: float | None
    product_share: float | None
    total_steps: int | None
    total_tokens: float | None
    seconds: float | None
    ranks: Evenness | None

    @property
    def fits(self) -> bool:
        """True if the peak is at most the memory of the device."""
        return self.memory_peak <= self.memory_available


def make_plan(recipe: Recipe, options: PlanOptions, print_line: PrintLine) -> Plan:
    """Plan a run; raises UserError for an error in the recipe or its data."""
    recipe = with_absolute_paths(recipe)
    if options.parallel in ("ddp", "fsdp") and options.gpus == 1:
        raise UserError(
            f"parallel={options.parallel} is for several GPUs: give gpus=N too, or leave it out"
        )
    if options.parallel is None and recipe.training.parallel != "auto":
        options = replace(options, parallel=recipe.training.parallel)
    work = Work.open(recipe, uses_data=options.tokens is None, print_line=print_line)
    return _Planner(work, options).plan()


class _Planner:
    """The parts of a plan, in the order of their computation."""

    def __init__(self, work: Work, options: PlanOptions) -> None:
        self.work, self.options = work, options
        self.training = work.task.recipe.training
        self.accelerator = find_accelerator(options.gpu)
        precision = str(self.training.precision)
        if self.accelerator is None:
            self.precision = resolve_precision(precision, torch.device("cpu"))
        else:
            self.precision = self.accelerator.resolve_precision(precision)
        self.not_sharded = not_sharded_reason(self.training, self.precision)
        if self.not_sharded and options.parallelism == "fsdp":
            raise UserError(f"parallel=fsdp: {self.not_sharded}, or take ddp")
        accumulation = self.training.gradient_accumulation
        self.parts = self.training.batch_parts or parts_per_batch(accumulation, options.gpus)
        # Micro-batches of a step: of all processes, and of the one that has most.
        self.micro_batches = accumulation * self.parts
        self.per_rank = -(-self.micro_batches // options.gpus)

    def plan(self) -> Plan:
        """The whole plan."""
        work, options, net = self.work, self.options, self.work.net
        per_token = self.flops()
        mean_tokens = sum(batch.num_tokens for batch in work.batches) / len(work.batches)
        tokens = mean_tokens * self.training.gradient_accumulation
        step_cost = sum(per_token) * tokens
        memory = self.memory(self.training.activation_checkpointing, options.parallelism)
        available = self.available()
        sent = bytes_sent(
            net,
            options.parallelism,
            options.gpus,
            in_bf16=self.in_bf16,
            micro_batches=self.per_rank,
        )
        speed = self.measured() if self.accelerator is None else self.estimated(step_cost, sent)
        seconds, rate = speed or (None, None)
        used = None if speed is None else step_cost / (speed[0] * speed[1] * options.gpus)
        steps, total = self.totals(tokens, seconds)
        return Plan(
            task=work.task.recipe.task,
            architecture=work.architecture,
            device=options.gpu,
            gpus=options.gpus,
            parallel=options.parallelism,
            precision=self.precision,
            num_parameters=parameters_by_part(net),
            active_parameters=active_parameters(net),
            lengths="data" if work.tokens is not None else "maximum lengths",
            flops_per_token=sum(per_token),
            forward_per_token=per_token[0],
            backward_per_token=per_token[1],
            tokens_per_step=tokens,
            memory=memory,
            memory_peak=memory.peak,
            memory_available=available,
            remedies={} if memory.peak <= available else self.remedies(available),
            bytes_sent=sent,
            seconds_per_step=seconds,
            tokens_per_second=None if seconds is None else tokens / seconds,
            product_rate=rate,
            product_share=used,
            total_steps=steps,
            total_tokens=total,
            seconds=None if steps is None or seconds is None else steps * seconds,
            ranks=self.ranks(),
        )

    @property
    def in_bf16(self) -> bool:
        """FSDP gathers weights in bf16."""
        return self.precision == "bf16"

    def flops(self) -> tuple[float, float]:
        """FLOPs of the forward and of the backward pass for each token, by some batches."""
        stride = -(-len(self.work.batches) // _TRACED_BATCHES)
        batches = self.work.batches[::stride]
        checkpointed = self.training.activation_checkpointing
        costs = [self.step_cost([batch], checkpointed=checkpointed) for batch in batches]
        tokens = sum(batch.num_tokens for batch in batches)
        forward = sum(cost.forward_flops for cost in costs)
        return forward / tokens, sum(cost.backward_flops for cost in costs) / tokens

    def step_cost(self, batches: Sequence[Batch], *, checkpointed: bool) -> StepCost:
        """The cost of an optimizer step of a process that shares the net with no other."""
        loss_net = LossNet(
            deepcopy(self.work.net), self.loss(), activation_checkpointing=checkpointed
        )
        on_gpu = self.accelerator is not None
        return trace_step(loss_net, batches, self.training, self.precision, on_accelerator=on_gpu)

    def loss(self) -> LossFunction:
        """The loss of the run, without a teacher's."""
        smoothing = self.training.label_smoothing
        if self.training.r_drop:
            return RDropLoss(self.training.r_drop, smoothing)
        return partial(self.work.task.loss, label_smoothing=smoothing)

    def rank_batch(self, share: float = 1.0) -> Batch:
        """The largest batch that a process computes at once, or the first rows of it."""
        rows = -(-self.work.largest.tokens.ids.size(0) // self.parts)
        return first_rows(self.work.largest, max(1, int(rows * share)))

    def memory(self, checkpointed: bool, parallel: Parallel, share: float = 1.0) -> RankMemory:
        """Bytes of the main process at the largest batch, or at a share of it."""
        batches = [self.rank_batch(share)] * min(2, self.per_rank)
        memory = self.step_cost(batches, checkpointed=checkpointed)
        return rank_memory(
            memory,
            self.work.net,
            parallel,
            self.options.gpus,
            in_bf16=self.in_bf16,
            micro_batches=self.per_rank,
        )

    def available(self) -> float:
        """Bytes of a device."""
        if self.options.memory is not None:
            return self.options.memory
        return host_memory() if self.accelerator is None else self.accelerator.memory

    def remedies(self, available: float) -> dict[str, int]:
        """Changes of settings in the order of their cost, until one fits, with their peaks."""
        parallelism, gpus = self.options.parallelism, self.options.gpus
        peaks: dict[str, int] = {}
        checkpointed = self.training.activation_checkpointing
        if not checkpointed:
            peak = self.memory(True, parallelism).peak
            peaks["training.activation_checkpointing=true"] = peak
        can_shard = not self.not_sharded
        is_too_large = not min(peaks.values(), default=available + 1) <= available
        if parallelism == "ddp" and can_shard and is_too_large:
            peaks["--parallel fsdp"] = self.memory(True, "fsdp").peak
            parallelism = "fsdp"
        size = self.training.batch_tokens
        if size is not None:  # batch_sentences may allow fewer
            size = min(size, padded_tokens(self.work.largest))
        share = 0.5
        while size is not None and min(peaks.values(), default=available + 1) > available:
            if self.rank_batch().tokens.ids.size(0) * share < 1:
                break
            peak = self.memory(True, parallelism, share).peak
            peaks = {k: v for k, v in peaks.items() if not k.startswith("training.batch_tokens")}
            peaks[f"training.batch_tokens={int(size * share)}"] = peak
            share /= 2
        if gpus == 1 and can_shard and min(peaks.values(), default=available + 1) > available:
            several = replace(self.options, gpus=GPUS_PER_MACHINE, parallel="fsdp")
            peak = _Planner(self.work, several).memory(True, "fsdp").peak
            peaks[f"--gpus {GPUS_PER_MACHINE} --parallel fsdp"] = peak
        return peaks

    def estimated(self, flops: float, sent: int) -> tuple[float, float]:
        """Seconds of a step on GPUs, where communication overlaps with products, and their rate."""
        gpu, gpus = self.accelerator, self.options.gpus
        assert gpu is not None
        flops *= self.per_rank / self.micro_batches  # of the process that has most
        rate = gpu.fp32_flops if self.precision == "fp32" else gpu.flops
        link = gpu.link if gpus <= GPUS_PER_MACHINE else min(gpu.link, NETWORK)
        reached = rate * (self.options.utilization or UTILIZATION)
        return max(flops / reached, sent / link), rate

    def measured(self) -> tuple[float, float] | None:
        """Seconds of a step on this CPU, and its rate of products.

        Steps are taken with random weights; None if the memory is too small for them.
        """
        checkpointed = self.training.activation_checkpointing
        if self.memory(checkpointed, "none").peak > _USED_MEMORY * host_memory():
            return None
        loss_net = LossNet(
            with_random_weights(self.work.net), self.loss(), activation_checkpointing=checkpointed
        )
        timer = StepTimer(loss_net, self.training, self.precision, torch.device("cpu"))
        batches = sorted(self.work.batches, key=padded_tokens)
        mean = sum(map(padded_tokens, batches)) / len(batches)
        seconds = self.seconds_per_token(timer, batches) * mean
        with ProductTimer() as products:
            timer.take([self.part_of(batches[len(batches) // 2])])
        return seconds, products.rate

    def part_of(self, batch: Batch) -> Batch:
        """The part of a batch that a process computes at once."""
        return first_rows(batch, -(-batch.tokens.ids.size(0) // self.parts))

    def seconds_per_token(self, timer: StepTimer, batches: Sequence[Batch]) -> float:
        """Seconds for each token of a batch, padding included, by steps that are really taken.

        Args:
            batches: in order of their sizes.
        """
        seconds: list[float] = []
        tokens: list[float] = []
        num_parts = min(MEASURED_STEPS, len(batches))
        with track("measure steps", MEASURED_STEPS + 1) as advance:
            while not is_enough(seconds):
                # The middle batch of each of equal parts.
                share = (len(seconds) % num_parts + 0.5) / num_parts
                batch = batches[int(share * len(batches))]
                seconds.append(timer.take([self.part_of(batch)] * self.per_rank))
                timer.clear()
                tokens.append(padded_tokens(batch))
                if len(seconds) <= MEASURED_STEPS + 1:
                    advance(1)
        return sum(without_first(seconds)) / sum(without_first(tokens))

    def totals(
        self, tokens_per_step: float, seconds: float | None
    ) -> tuple[int | None, float | None]:
        """Optimizer steps and tokens of the run, whose steps take these seconds each."""
        training, tokens = self.training, self.work.tokens
        steps: int | None
        if self.options.tokens is not None:
            steps = max(1, round(self.options.tokens / tokens_per_step))
        elif tokens is None:
            steps = training.max_steps
        else:
            steps = self.work.total_steps
        if self.options.tokens is None and training.max_minutes is not None and seconds is not None:
            in_time = max(1, int(60 * training.max_minutes / seconds))
            steps = in_time if steps is None else min(steps, in_time)
        return steps, None if steps is None else steps * tokens_per_step

    def ranks(self) -> Evenness | None:
        """Evenness of an epoch, or of `PlanOptions.tokens`, over the processes; None for one."""
        if self.options.gpus == 1:
            return None
        tokens, accumulation = self.work.tokens, self.training.gradient_accumulation
        if tokens is None:
            size = padded_tokens(self.work.largest)
            steps, _ = self.totals(size * accumulation, None)
            count = min(100_000, (steps or 1) * accumulation)
            tokens = np.full(count, size, dtype=np.int64)
        of_steps = np.pad(tokens, (0, -len(tokens) % accumulation))
        rows = self.work.largest.tokens.ids.size(0)
        micro = np.repeat(of_steps, self.parts) * _part_shares(rows, self.parts, len(of_steps))
        # Processes that have a micro-batch less than others have one without tokens.
        missing = self.per_rank * self.options.gpus - self.micro_batches
        table = np.pad(micro.reshape(-1, self.micro_batches), ((0, 0), (0, missing)))
        return evenness(table.ravel(), self.options.gpus, self.per_rank)


def _part_shares(rows: int, parts: int, batches: int) -> Any:
    """The share of each part of equal batches in its rows: parts differ by one row at most."""
    sizes = rows // parts + (np.arange(parts) < rows % parts)
    return np.tile(sizes / rows, batches)
