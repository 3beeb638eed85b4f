"""Learning rate schedules."""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from heedful import plugins
from heedful.config import Schedule
from heedful.errors import UserError

LearningRate = Callable[[int], float]  # from the step, counted from 1


class MakeSchedule(Protocol):
    """A registered schedule, which returns the learning rate as a function of the step."""

    def __call__(
        self, settings: Schedule, *, d_model: int, max_steps: int | None
    ) -> LearningRate: ...


def make_schedule(settings: Schedule, *, d_model: int, max_steps: int | None) -> LearningRate:
    """The learning rate as a function of the step, counted from 1.

    All schedules except `noam` rise linearly to `learning_rate` over `warmup_steps`, and then

    * `inverse_sqrt`: fall with 1/√step;
    * `cosine`: fall along half a cosine to `min_lr_ratio` of it at the last step (Loshchilov and
      Hutter 2017, without restarts);
    * `linear`: fall linearly to `min_lr_ratio` of it at the last step;
    * `constant`: stay constant.

    `noam` is Vaswani et al. 2017, eq. 3: d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5).
    It has no peak learning rate, so that `learning_rate` must be null.

    Raises:
        UserError: an unknown schedule, or one with missing or superfluous settings.
    """
    make: MakeSchedule = plugins.schedule.get(settings.name)
    return make(settings, d_model=d_model, max_steps=max_steps)


def _noam(settings: Schedule, *, d_model: int, max_steps: int | None) -> LearningRate:
    warmup = settings.warmup_steps
    if settings.learning_rate is not None:
        raise UserError(
            "training.schedule: noam computes the rate from d_model and warmup_steps; set "
            "learning_rate to null, or use inverse_sqrt, which rises to a learning_rate"
        )
    if warmup < 1:
        raise UserError("training.schedule: noam needs warmup_steps of at least 1")
    return lambda step: d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def _after_warmup(
    shape: Callable[[Schedule, int, float], float],
    settings: Schedule,
    *,
    d_model: int,
    max_steps: int | None,
) -> LearningRate:
    """Linear warm-up, and then `learning_rate` · shape(settings, step, progress).

    `progress` rises from 0 after the warm-up to 1 at the last step.
    """
    peak, warmup, end = settings.learning_rate, settings.warmup_steps, max_steps or 0
    if peak is None:
        raise UserError(f"training.schedule: {settings.name} needs a learning_rate")

    def learning_rate(step: int) -> float:
        if step < warmup:
            return peak * (step / warmup)
        progress = min(1.0, (step - warmup) / max(1, end - warmup))
        return peak * shape(settings, step, progress)

    return learning_rate


def _falling(settings: Schedule, fraction: float) -> float:
    """A factor that falls from 1 to `min_lr_ratio` as `fraction` falls from 1 to 0."""
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * fraction


plugins.schedule.declare(
    {
        "noam": _noam,
        "inverse_sqrt": partial(
            _after_warmup, lambda s, step, _: math.sqrt(max(1, s.warmup_steps) / step)
        ),
        "cosine": partial(
            _after_warmup, lambda s, _, t: _falling(s, (1 + math.cos(math.pi * t)) / 2)
        ),
        "linear": partial(_after_warmup, lambda s, _, t: _falling(s, 1 - t)),
        "constant": partial(_after_warmup, lambda s, step, t: 1.0),
    }
)
