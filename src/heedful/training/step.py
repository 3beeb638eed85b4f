"""One optimizer step: batches read ahead, forward and backward passes, update of the weights.

In this order: `LossNet` and `TrainedNet`, a net with its loss; `step_batches`, the batches of a
step; `WeightUpdates`, whose `take` is the step.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from heedful import openmp
from heedful.config import Training
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.kernels import library as kernels
from heedful.models.stack import Stack
from heedful.parts.experts import Experts, balance_loss, record_router_logits
from heedful.parts.losses import LossSum, gradient_factor
from heedful.processes import Processes
from heedful.training.averaging import MovingAverage
from heedful.training.block_compiler import BlockCompiler
from heedful.training.freed_memory import keep_freed_memory
from heedful.training.optimizer import (
    AUTOCAST,
    load_optimizer_tensors,
    load_scaler_tensors,
    make_optimizer,
    optimizer_tensors,
    scaler_tensors,
)
from heedful.zoo.saved import trainable

Item = TypeVar("Item")
Position: TypeAlias = tuple[int, int]  # epoch and batch
STEPS_AHEAD = 4  # whose batches are read while a step is computed

LossFunction = Callable[[Any, Batch], LossSum]


class LossNet(nn.Module):
    """A net and its training loss: the module that DDP, FSDP2 and `torch.compile` wrap.

    For a net with experts, their load-balancing loss is added. It is a mean over the tokens of the
    batch, multiplied by the number of targets, since the trainer divides the sum by that number.

    Args:
        loss: (net, batch) -> sums over the targets of the batch, differentiable.
        activation_checkpointing: store only the input of each block, and compute its activations
            again in the backward pass.
    """

    def __init__(
        self, net: nn.Module, loss: LossFunction, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self._activation_checkpointing = activation_checkpointing
        for module in net.modules():
            if isinstance(module, Stack):
                module.activation_checkpointing = activation_checkpointing
                module.skips_padding = True
        experts = [module for module in net.modules() if isinstance(module, Experts)]
        self._balanced = [module for module in experts if module.balance_weight]

    def with_net(self, net: nn.Module) -> "LossNet":
        """The same loss of another net."""
        return LossNet(net, self.loss, activation_checkpointing=self._activation_checkpointing)

    def forward(self, batch: Batch) -> LossSum:
        """Sums over the targets of a batch on the net's device."""
        if not self._balanced:
            return self.loss(self.net, batch)
        with record_router_logits(self._balanced) as logits:
            sums = self.loss(self.net, batch)
        experts, real = self._balanced[0], batch.tokens.real
        if logits[0].shape[:2] != batch.tokens.ids.shape and batch.tokens.real_index is not None:
            # The stack skips padding: one row of the real tokens and then some padding.
            columns = torch.arange(logits[0].size(1), device=logits[0].device)
            real = columns[None] < batch.tokens.real_index.size(0)
        balance = experts.balance_weight * balance_loss(logits, experts.top_k, real)
        return sums._replace(loss=sums.loss + sums.tokens * balance)


class TrainedNet:
    """The net of a run in one process.

    Attributes:
        whole: the net that is evaluated and saved.
        net: the net whose parameters are trained; with sharded parameters another one than `whole`.
        loss_net: the `LossNet` of `net`, wrapped if processes share it.
        loss_factor: factor of a loss, after which the gradient is that of the sum of the losses
            of all processes.
        is_sharded: the parameters of `net` are sharded over the processes (`DTensor`).
        evaluates_in_all: in an evaluation each process has the whole net.
    """

    loss_factor = 1
    is_sharded = False
    evaluates_in_all = True

    def __init__(self, loss_net: LossNet) -> None:
        self.whole = self.net = loss_net.net
        self.loss_net: nn.Module = loss_net

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        """A context for a forward and backward pass; after the last one of a step the gradients
        are those of all processes."""
        return nullcontext()

    def gather(self) -> None:
        """Copy the weights of `net` to `whole` in the main process."""

    def scatter(self) -> None:
        """Copy the weights of `whole` in the main process to `net` in all."""

    def whole_in_all(self) -> AbstractContextManager[None]:
        """In the block `whole` has the main process's weights in all processes."""
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes of a tensor on the run's device."""
        return tensor

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients of all parameters."""
        return nn.utils.get_total_norm(gradients)


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
    def counts(self) -> list[int]:
        """Targets that the loss is divided by, tokens that are not padding, tokens by corpus."""
        batch = self.batch
        counts = [batch.num_targets, batch.num_tokens, *batch.corpora.values()]
        return [count * self.is_counted for count in counts]


def parts_per_batch(num_batches: int, num_processes: int) -> int:
    """The least number of parts per batch for which all processes have equally many per step."""
    return num_processes // gcd(num_batches, num_processes)


def step_batches(
    plan_epoch: Callable[[int], Sequence[Any]],
    load_batch: Callable[[int, Any], Batch],
    processes: Processes,
    *,
    num_batches: int,
    num_parts: int,
    seed: int,
    device: torch.device,
    start: Position = (0, 0),
    num_epochs: int | None = None,
) -> Iterator[tuple[list[MicroBatch], Position]]:
    """The micro-batches of this process step by step, and the position of the step after.

    They are the parts of a step's planned batches, dealt to the processes, of which every one has
    equally many. A step has the same parts with the same random numbers for any number of
    processes, so its gradient depends on that number only by the order of sums.

    Args:
        plan_epoch, load_batch: as in `Trainer`.
        num_batches: planned batches per step, fewer at the end of an epoch.
        num_parts: parts that the rows of a batch are divided into.
        seed: the run's.
        start: where the first step begins.
        num_epochs: epochs of the run; None: no end.

    Raises:
        UserError: an epoch without rows.
    """
    epoch, first = start
    while num_epochs is None or epoch < num_epochs:
        batches = plan_epoch(epoch)
        if not len(batches):
            raise UserError(
                f"epoch {epoch} has no training rows; raise the weight of a corpus, or end the "
                "run before, by training.max_epochs"
            )
        for step in range(first, len(batches), num_batches):
            end = min(step + num_batches, len(batches))
            parts = [(index, part) for index in range(step, end) for part in range(num_parts)]
            own = [(*indices, True) for indices in parts[processes.rank :: processes.count]]
            if len(own) < -(-len(parts) // processes.count):
                own.append((*parts[0], False))
            loaded = {
                index: load_batch(epoch, batches[index])
                for index in dict.fromkeys(index for index, *_ in own)
            }
            of_step = []
            for index, part, has_share in own:
                rows = loaded[index].part(part, num_parts)
                is_counted = has_share and rows is not None
                if rows is None:  # the batch has fewer rows than parts
                    rows = loaded[index].part(num_parts - 1, num_parts)
                assert rows is not None, "the last part has rows"
                seeds = np.random.SeedSequence([seed, epoch, index, part])
                number = int(seeds.generate_state(1, np.uint64)[0])
                of_step.append(MicroBatch(rows.to(device), is_counted, number))
            yield of_step, ((epoch, end) if end < len(batches) else (epoch + 1, 0))
        epoch, first = epoch + 1, 0


def read_ahead(items: Iterator[Item], count: int = STEPS_AHEAD) -> Generator[Item, None, None]:
    """The items in their order, of which a thread makes up to `count` before they are needed.

    An error of `items` is raised at its place. The thread ends with the items, or when this
    iterator is closed.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, items, None) for _ in range(count + 1))
        try:
            while (item := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, items, None))
                yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class StepSums(NamedTuple):
    """Sums over the micro-batches of a step, of all processes.

    Attributes:
        statistics: (3,), loss, negative log-likelihood and gradient norm, on the device.
        targets: number of targets.
        tokens: number of tokens.
        corpora: number of tokens by corpus, for data of several.
    """

    statistics: Tensor
    targets: int
    tokens: int
    corpora: Mapping[str, int]


def prepare_cpu() -> None:
    """Prepare this process for steps on a CPU: memory, kernels, and threads that wait."""
    keep_freed_memory()
    kernels.load()
    openmp.watch()


class WeightUpdates:
    """The optimizer steps of a run, and all state that they depend on besides the weights.

    A step does not wait for the device. If loss or gradient is not finite, this step and all later
    ones change nothing, by a flag that the optimizer reads on the device. In fp16, an overflow of
    the scaled gradient skips one step and halves the scale.

    Attributes:
        average: the moving average of the weights; None: the run keeps none.
    """

    def __init__(
        self,
        trained: TrainedNet,
        settings: Training,
        processes: Processes,
        *,
        precision: str,
        compiler: BlockCompiler | None,
    ) -> None:
        self._trained, self._processes = trained, processes
        self._compiler, self._dtype = compiler, AUTOCAST[precision]
        self._clip_norm = settings.clip_norm
        net = trained.net
        self._parameters = trainable(net)
        self.optimizer = make_optimizer(
            net, settings.optimizer, layer_decay=settings.layer_lr_decay
        )
        decay = settings.ema_decay
        self.average = None if decay is None else MovingAverage(net, decay)
        self.device = next(net.parameters()).device
        if self.device.type == "cpu":
            prepare_cpu()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        # On the device: 1 from the first step with a loss or gradient that is not finite.
        self._has_failed = torch.zeros((), device=self.device)
        # Read by fused optimizers: their step changes nothing where it is 1.
        self._is_skipped = torch.zeros((), device=self.device)
        self.optimizer.found_inf = self._is_skipped  # type: ignore[attr-defined]

    def take(self, micro_batches: Sequence[MicroBatch], lr: float, step: int) -> StepSums:
        """One optimizer step; the summed loss is divided by the number of targets of all processes.

        Args:
            micro_batches: those of this process.
            step: its number, from 1.
        """
        trained, scaler = self._trained, self.scaler
        if not trained.net.training:
            trained.net.train()
        counts = zip(*(rows.counts for rows in micro_batches), strict=True)
        targets, tokens, *by_corpus = self._processes.sum([*map(sum, counts)])
        factor: Tensor | None = None  # of the gradient in fp16, that of the sum in the loss below
        if scaler.is_enabled():
            whole = torch.full((), float(trained.loss_factor), device=self.device)
            factor = scaler.scale(whole) / max(1, targets)
        total = torch.zeros(2, device=self.device)  # of the loss and the negative log-likelihood
        for number, rows in enumerate(micro_batches, 1):
            self._seed(rows.seed)
            with (
                gradient_factor(factor),
                nullcontext() if self._compiler is None else self._compiler.step(rows.batch),
                trained.exchange(is_last=number == len(micro_batches)),
            ):
                is_autocast = self._dtype != torch.float32
                with torch.autocast(self.device.type, self._dtype, enabled=is_autocast):
                    sums = trained.loss_net(rows.batch)
                loss = sums.loss / max(1, targets)
                if (weight := rows.is_counted * trained.loss_factor) != 1:
                    loss = loss * weight
                scaler.scale(loss).backward()
            total += torch.stack([sums.loss.detach(), sums.nll]) * rows.is_counted
        total = trained.sum(total)

        scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = trained.gradient_norm(gradients)  # over all parameters, before clipping
        # The steps of `cost/trace.py` and `cost/timing.py` clip the same.
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clip_norm, norm)
        statistics = torch.cat([total, norm[None]])
        must_be_finite = total if scaler.is_enabled() else statistics
        self._has_failed.logical_or_(~must_be_finite.isfinite().all())
        self._is_skipped.copy_(self._has_failed.logical_or(~norm.isfinite()))

        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.optimizer.step()
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(step)
        corpora = dict(zip(micro_batches[0].batch.corpora, by_corpus, strict=True))
        return StepSums(statistics, targets, tokens, corpora)

    def _seed(self, seed: int) -> None:
        """Seed the random numbers of a pass, without the stack trace that torch stores for GPUs."""
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def may_overflow(self) -> bool:
        """True if a gradient that is not finite may be due to the loss scale; may wait."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= 1

    def averaged_weights(self) -> AbstractContextManager[None]:
        """In the block the net has the averaged weights, if the run keeps an average."""
        return nullcontext() if self.average is None else self.average.swapped_in()

    def tensors(self) -> dict[str, Tensor]:
        """The state of optimizer, loss scale and average, as tensors of a checkpoint."""
        tensors = optimizer_tensors(self._trained.net, self.optimizer)
        tensors |= scaler_tensors(self.scaler)
        return tensors if self.average is None else tensors | self.average.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`; raises KeyError, RuntimeError or ValueError."""
        load_optimizer_tensors(self._trained.net, self.optimizer, tensors)
        load_scaler_tensors(self.scaler, tensors)
        if self.average is not None:
            self.average.load(tensors)
