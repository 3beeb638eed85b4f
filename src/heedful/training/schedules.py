"""The learning rate at every step: the one place that decides it."""

import math
from collections.abc import Callable
from typing import Protocol

from heedful import plugins
from heedful.config import Schedule, Training
from heedful.errors import UserError

LearningRate = Callable[[int], float]


class MakeSchedule(Protocol):
    """What a schedule's name stands for, also a plugin's: the rate by the step, from 1."""

    def __call__(
        self, settings: Schedule, *, d_model: int, max_steps: int | None
    ) -> LearningRate: ...


def make_schedule(settings: Schedule, *, d_model: int, max_steps: int | None) -> LearningRate:
    """A function from the step, counted from 1, to the learning rate.

    All but `noam` rise linearly to `learning_rate` over `warmup_steps`, and then

    * `inverse_sqrt`: fall with 1/√step;
    * `cosine`: fall along half a cosine to `min_lr_ratio` of it at the last step (Loshchilov and
      Hutter 2017, without restarts);
    * `linear`: fall in a line to `min_lr_ratio` of it at the last step;
    * `constant`: stay.

    `noam` is Vaswani et al. 2017, eq. 3: d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5).
    It sets its own height, so a learning rate beside it is refused.
    """
    make: MakeSchedule = plugins.schedule.get(settings.name)
    return make(settings, d_model=d_model, max_steps=max_steps)


def total_steps(settings: Training, num_batches: int) -> int | None:
    """Steps to the first of `max_steps` and `max_epochs`; None where neither is set.

    Epochs are taken to have as many batches as the first.
    """
    per_epoch = math.ceil(num_batches / settings.gradient_accumulation)
    by_epochs = None if settings.max_epochs is None else settings.max_epochs * per_epoch
    return min((end for end in (settings.max_steps, by_epochs) if end is not None), default=None)


def _noam(settings: Schedule, *, d_model: int, max_steps: int | None) -> LearningRate:
    warmup = settings.warmup_steps
    if settings.learning_rate is not None:
        raise UserError(
            "training.schedule: noam sets the rate from d_model and warmup_steps; set "
            "learning_rate to null, or use inverse_sqrt, which rises to a learning_rate"
        )
    if warmup < 1:
        raise UserError("training.schedule: noam needs warmup_steps of at least 1")
    return lambda step: d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def _after_warmup(shape: Callable[[Schedule, int, float], float]) -> MakeSchedule:
    """A schedule whose height after the warm-up is `shape(settings, step, progress)`."""

    def make(settings: Schedule, *, d_model: int, max_steps: int | None) -> LearningRate:
        peak, warmup, end = settings.learning_rate, settings.warmup_steps, max_steps or 0
        if peak is None:
            raise UserError(f"training.schedule: {settings.name} needs a learning_rate")

        def rate(step: int) -> float:
            if step < warmup:
                return peak * (step / warmup)
            progress = min(1.0, (step - warmup) / max(1, end - warmup))
            return peak * shape(settings, step, progress)

        return rate

    return make


def _falling(settings: Schedule, share: float) -> float:
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * share


plugins.schedule.declare(
    {
        "noam": _noam,
        "inverse_sqrt": _after_warmup(lambda s, step, _: math.sqrt(max(1, s.warmup_steps) / step)),
        "cosine": _after_warmup(lambda s, _, done: _falling(s, (1 + math.cos(math.pi * done)) / 2)),
        "linear": _after_warmup(lambda s, _, done: _falling(s, 1 - done)),
        "constant": _after_warmup(lambda s, step, done: 1.0),
    }
)
