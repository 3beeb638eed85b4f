"""Times of training steps that are really taken, and of their matrix products."""

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from heedful.config import Training
from heedful.cost.flops import ProductCounter
from heedful.data.collate import Batch
from heedful.training.optimizer import AUTOCAST, make_optimizer
from heedful.training.step import LossNet, prepare_cpu
from heedful.zoo.saved import trainable

Value = TypeVar("Value")
MEASURED_STEPS = 5  # at least, after one that is not counted
MEASURED_SECONDS = 0.3  # at least
MAX_MEASURED_SECONDS = 20.0  # then no further step is measured


class StepTimer:
    """Takes optimizer steps of a run, uncompiled, and times them.

    Args:
        loss_net: with its net on the device.
        precision: fp32, bf16 or fp16.
    """

    def __init__(
        self, loss_net: LossNet, settings: Training, precision: str, device: torch.device
    ) -> None:
        self.loss_net, self.settings, self.device = loss_net.train(), settings, device
        if device.type == "cpu":
            prepare_cpu()
        self.optimizer = make_optimizer(
            loss_net.net, settings.optimizer, layer_decay=settings.layer_lr_decay
        )
        self._parameters = [*trainable(loss_net.net).values()]
        self._is_mixed = precision != "fp32"
        self._dtype = AUTOCAST[precision]

    def take(self, batches: Sequence[Batch]) -> float:
        """Seconds of a step over some batches; the gradients are left to `clear`."""
        began = time.perf_counter()
        num_targets = max(1, sum(batch.num_targets for batch in batches))
        for batch in batches:
            with torch.autocast(self.device.type, self._dtype, enabled=self._is_mixed):
                sums = self.loss_net(batch)
            (sums.loss / num_targets).backward()
        # As `count_step` of `trace.py`, and as `WeightUpdates.take` of `training/step.py`.
        used = [p for p in self._parameters if p.grad is not None]
        if self.settings.clip_norm is not None and used:
            nn.utils.clip_grad_norm_(used, self.settings.clip_norm)
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def clear(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


class ProductTimer(ProductCounter):
    """Times the matrix products of the steps in the block, on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before, began = self.flops, time.perf_counter()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.flops > before:
            self._seconds += time.perf_counter() - began
        return out

    @property
    def rate(self) -> float:
        """FLOP/s of the products."""
        return self.flops / self._seconds


def is_enough(seconds: Sequence[float]) -> bool:
    """True if enough steps are measured, by their seconds; the first one is not counted."""
    total = sum(seconds)
    is_measured = len(seconds) > MEASURED_STEPS and total - seconds[0] >= MEASURED_SECONDS
    return is_measured or total > MAX_MEASURED_SECONDS


def without_first(values: Sequence[Value]) -> Sequence[Value]:
    """The values of the counted steps: all but the first, unless it is the only one."""
    return values[1:] if len(values) > 1 else values
