"""The error of a run whose loss is not finite."""

import shlex

from heedful.config import Training
from heedful.errors import UserError
from heedful.training.checkpoint import Checkpoints


def divergence_error(
    problem: str,
    settings: Training,
    checkpoints: Checkpoints,
    *,
    precision: str,
    is_temporary: bool,
) -> UserError:
    """The error for a loss that is not finite, with a command that resumes more carefully.

    Args:
        problem: the step and the loss.
        checkpoints, precision, is_temporary: as in `Trainer`.
    """
    path, schedule, changes = checkpoints.newest(), settings.schedule, []
    if schedule.learning_rate is None:
        changes.append(f"training.schedule.warmup_steps={2 * schedule.warmup_steps}")
    else:
        changes.append(f"training.schedule.learning_rate={schedule.learning_rate / 10:g}")
    if settings.clip_norm is None or settings.clip_norm > 1:
        changes.append("training.clip_norm=1.0")
    if precision != "fp32":
        changes.append("training.precision=fp32")
    if is_temporary:
        return UserError(f"{problem}; train again with out=FOLDER and {', '.join(changes)}")
    command = ["heedful", "train", str(checkpoints.directory.parent)]
    command += ["--resume"] if path else []
    command += [word for change in changes for word in ("--set", change)]
    last = f"the last good checkpoint is {path}" if path else "no checkpoint was written yet"
    return UserError(f"{problem}; {last}; try: {shlex.join(command)}")
