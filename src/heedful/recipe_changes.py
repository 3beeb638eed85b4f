"""Differences between two recipes of one run, and the changes that a resumed run accepts."""

import json
from collections.abc import Collection
from typing import Any

from heedful.config import Recipe
from heedful.config.keys import flatten
from heedful.config.training import SCHEDULES_WITHOUT_END
from heedful.errors import UserError
from heedful.task_keys import ENDS, MAY_CHANGE

# Keys that a resumed run changes if they are set explicitly; earlier steps stay as they were.
# Checkpoints and their position in the data depend on all other keys: sizes, text, batches, seed.
CHANGES_STEPS = (
    "training.device",
    "training.precision",
    "training.gradient_accumulation",
    "training.batch_parts",
    "training.optimizer.betas",
    "training.optimizer.eps",
    "training.optimizer.weight_decay",
    "training.schedule.name",
    "training.schedule.learning_rate",
    "training.schedule.warmup_steps",
    "training.schedule.min_lr_ratio",
    "training.label_smoothing",
    "training.r_drop",
    "training.word_dropout",
    "training.clip_norm",
    "training.evaluate_every",
    "training.average_checkpoints",
    "training.average_of",
)


def check_changes(before: Recipe, now: Recipe, explicit_keys: Collection[str], where: str) -> None:
    """Refuse a recipe that the run in `where` cannot be resumed with.

    Args:
        explicit_keys: keys, or sections of keys, that were set explicitly for the resumed run.

    Raises:
        UserError: a changed key that steps depend on and that was not set explicitly or cannot be
            changed.
    """
    refused, can_be_set = [], True
    for change in changed_keys(before, now):
        key = name_of(change)
        is_explicit = any(key == other or key.startswith(f"{other}.") for other in explicit_keys)
        if key in MAY_CHANGE or (key in CHANGES_STEPS and is_explicit):
            continue
        refused.append(change)
        can_be_set = can_be_set and key in CHANGES_STEPS
    if refused:
        advice = (
            "resume with its own recipe.yaml, or give the changed keys with overrides"
            if can_be_set
            else "start a new run, or resume with its own recipe.yaml"
        )
        raise UserError(
            f"cannot resume {where} with another recipe; changed: {', '.join(refused)}; {advice}"
        )


def check_started(started: dict[str, Any], now: Recipe, where: str) -> None:
    """Refuse a recipe.yaml that was edited since the run in `where` began.

    Args:
        started: the recipe of the run's last start, as JSON.

    Raises:
        UserError: a changed key that no resumed run may change.
    """
    may_change = {*MAY_CHANGE, *CHANGES_STEPS}
    refused = [c for c in changes_since_start(started, now) if name_of(c) not in may_change]
    if refused:
        raise UserError(
            f"cannot resume {where}: its recipe.yaml was edited since it began; changed: "
            f"{', '.join(refused)}; put the old values back, or start a new run"
        )


def changed_settings(started: dict[str, Any], now: Recipe) -> list[str]:
    """The changes since the start of a session that optimizer steps depend on."""
    without_effect = {*MAY_CHANGE}
    if now.training.schedule.name not in SCHEDULES_WITHOUT_END:
        without_effect -= {*ENDS}
    return [c for c in changes_since_start(started, now) if name_of(c) not in without_effect]


def changes_since_start(started: dict[str, Any], now: Recipe) -> list[str]:
    """The changes since the start of a session, as `changed_keys`.

    Keys that an earlier version of heedful did not have, and that `now` does not set, are left out.

    Args:
        started: the recipe of the session's start, as JSON.
    """
    given = flatten(now.model_dump(mode="json", exclude_unset=True))
    changes = changed_values(started, now.model_dump(mode="json"))
    return [c for c in changes if name_of(c) in flatten(started).keys() | given.keys()]


def name_of(change: str) -> str:
    """The key of an entry of `changed_keys`."""
    return change.partition(" ")[0]


def changed_keys(before: Recipe, now: Recipe) -> list[str]:
    """Dotted names of the keys whose values differ, with both values; `expect` is left out."""
    return changed_values(before.model_dump(mode="json"), now.model_dump(mode="json"))


def changed_values(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`changed_keys` of recipes as JSON."""
    old, new = flatten(before), flatten(now)
    return [
        f"{key} ({json.dumps(old.get(key))} -> {json.dumps(new.get(key))})"
        for key in sorted((old.keys() | new.keys()) - {"expect"})
        if old.get(key) != new.get(key)
    ]
