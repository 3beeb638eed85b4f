"""An exponential moving average of the weights over the steps of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heedful.training.shards import shard_like
from heedful.zoo.saved import trainable

_PREFIX = "average."  # of the tensor names in a checkpoint


class MovingAverage:
    """The exponential moving average of trained weights: w̄ ← d · w̄ + (1 - d) · w after a step.

    Tarvainen and Valpola 2017, eq. 1; Polyak and Juditsky 1992 weight all steps equally. After n
    steps d is min(`decay`, (1 + n) / (10 + n)), so that the initial weights soon have no influence.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = trainable(net)
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update by the weights after `step`, counted from 1; does not wait for the device."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([*self._means.values()], [*self._weights.values()], 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In the block the net has the average as its weights; then they are restored exactly."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """The average, as tensors of a checkpoint."""
        return {f"{_PREFIX}{name}": mean for name, mean in self._means.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`."""
        for name, mean in self._means.items():
            mean.copy_(shard_like(tensors[f"{_PREFIX}{name}"], mean))

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            current = weight.clone()
            weight.copy_(self._means[name])
            self._means[name].copy_(current)
