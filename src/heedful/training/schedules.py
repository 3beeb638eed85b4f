"""The learning rate at every step: the one place that decides it."""

import math
from collections.abc import Callable

from heedful.config import Schedule
from heedful.errors import UserError

Rate = Callable[[int], float]


def make_schedule(schedule: Schedule, *, d_model: int, max_steps: int | None) -> Rate:
    """A function from the step, counted from 1, to the learning rate.

    All but `paper` rise linearly to `learning_rate` over `warmup_steps`, and then

    * `inverse_sqrt`: fall with 1/√step;
    * `cosine`: fall along half a cosine to `final_fraction` of it at `max_steps` (Loshchilov and
      Hutter 2017, without restarts);
    * `linear`: fall in a line to `final_fraction` of it at `max_steps`;
    * `constant`: stay.

    `paper` is Vaswani et al. 2017, eq. 3: d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5).
    It sets its own height, so a learning rate beside it is refused.
    """
    warmup = schedule.warmup_steps
    if schedule.name == "paper":
        if schedule.learning_rate is not None:
            raise UserError(
                "training.schedule: paper sets the rate from d_model and warmup_steps; set "
                "learning_rate to null, or use inverse_sqrt, which rises to a learning_rate"
            )
        if warmup < 1:
            raise UserError("training.schedule: paper needs warmup_steps of at least 1")
        return lambda step: d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    peak = schedule.learning_rate
    if peak is None:
        raise UserError(f"training.schedule: {schedule.name} needs a learning_rate")
    end, low = max_steps or 0, schedule.final_fraction

    def progress(step: int) -> float:
        return min(1.0, (step - warmup) / max(1, end - warmup))

    after: dict[str, Rate] = {
        "inverse_sqrt": lambda step: math.sqrt(max(1, warmup) / step),
        "cosine": lambda step: low + (1 - low) * (1 + math.cos(math.pi * progress(step))) / 2,
        "linear": lambda step: low + (1 - low) * (1 - progress(step)),
        "constant": lambda step: 1.0,
    }
    shape = after[schedule.name]
    return lambda step: peak * (step / warmup if step < warmup else shape(step))
