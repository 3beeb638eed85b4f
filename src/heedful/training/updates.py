"""Updates of the weights: gradients of micro-batches, clipping, optimizer, loss scale, average."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful import openmp
from heedful.config import Training
from heedful.kernels import training as kernels
from heedful.parts.losses import gradient_factor
from heedful.processes import Processes
from heedful.training.averaging import MovingAverage
from heedful.training.block_compiler import BlockCompiler
from heedful.training.freed_memory import keep_freed_memory
from heedful.training.micro_batches import MicroBatch
from heedful.training.optimizer import load_optimizer_tensors, make_optimizer, optimizer_tensors
from heedful.training.parallel import TrainedNet
from heedful.training.precision import AUTOCAST, load_scaler_tensors, scaler_tensors
from heedful.training.tensors import whole_tensor
from heedful.zoo.names import trainable


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
        self._compiler, self._precision = compiler, precision
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
            keep_freed_memory()
            kernels.load()
            openmp.watch()
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
        if not self._trained.net.training:
            self._trained.net.train()
        names = [*micro_batches[0].corpora]
        counts = [
            [rows.num_targets, rows.num_tokens, *rows.corpora.values()] for rows in micro_batches
        ]
        targets, tokens, *by_corpus = self._processes.sum([*map(sum, zip(*counts, strict=True))])
        total = torch.zeros(2, device=self.device)
        for index, rows in enumerate(micro_batches):
            total += self._backward(rows, targets, is_last=index == len(micro_batches) - 1)
        total = self._trained.sum(total)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        statistics = torch.cat([total, norm[None]])
        must_be_finite = total if self.scaler.is_enabled() else statistics
        self._has_failed.logical_or_(~must_be_finite.isfinite().all())
        self._is_skipped.copy_(self._has_failed.logical_or(~norm.isfinite()))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(step)
        return StepSums(statistics, targets, tokens, dict(zip(names, by_corpus, strict=True)))

    def _backward(self, rows: MicroBatch, targets: int, *, is_last: bool) -> Tensor:
        """Add the gradient of a micro-batch; (2,): its loss and its negative log-likelihood."""
        self._seed(rows.seed)
        is_autocast = self._precision != "fp32"
        factor: Tensor | None = None
        if self.scaler.is_enabled():  # that of the sum in the loss below
            whole = torch.full((), float(self._trained.gradient_factor), device=self.device)
            factor = self.scaler.scale(whole) / max(1, targets)
        with (
            gradient_factor(factor),
            nullcontext() if self._compiler is None else self._compiler.step(rows.batch),
            self._trained.exchange(is_last=is_last),
        ):
            with torch.autocast(self.device.type, AUTOCAST[self._precision], enabled=is_autocast):
                sums = self._trained.step(rows.batch)
            loss = sums.loss / max(1, targets)
            if (weight := rows.is_counted * self._trained.gradient_factor) != 1:
                loss = loss * weight
            self.scaler.scale(loss).backward()
        return torch.stack([sums.loss.detach(), sums.nll]) * rows.is_counted

    def _seed(self, seed: int) -> None:
        """Seed the random numbers of a pass, without the stack trace that torch stores for GPUs."""
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _clip(self) -> Tensor:
        """Clip the gradient, and return its norm over all parameters before clipping."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = whole_tensor(nn.utils.get_total_norm(gradients))
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clip_norm, norm)
        return norm

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
