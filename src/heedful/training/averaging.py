"""The weights of a run averaged over its steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heedful.zoo.names import trainable

_PREFIX = "average."  # of its tensors in a checkpoint


class MovingAverage:
    """The exponential moving average of trained weights: w̄ ← d · w̄ + (1 - d) · w after a step.

    Polyak and Juditsky 1992 average all iterates alike; Tarvainen and Valpola 2017, eq. 1, so that
    later ones count more. d is `decay`, and less in the first steps, (1 + n) / (10 + n) after n of
    them, so that the weights that the run began with are soon forgotten.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = trainable(net)
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, counted from 1; waits for no device."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_([*self._means.values()], [*self._weights.values()], 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The net has the average for its weights; afterwards its own again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """The average, to be part of a checkpoint."""
        return {f"{_PREFIX}{name}": mean for name, mean in self._means.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, mean in self._means.items():
            mean.copy_(tensors[f"{_PREFIX}{name}"])

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            own = weight.clone()
            weight.copy_(self._means[name])
            self._means[name].copy_(own)
