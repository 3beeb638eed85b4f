"""Differences between two recipes of one run, and which of them a resumed run may have."""

import json
from typing import Any

from heedful.config import Recipe
from heedful.nested_keys import flatten

# Keys on which no step depends: when a run ends, and how it is shown and saved.
MAY_CHANGE = (
    "training.max_steps",
    "training.max_epochs",
    "training.max_minutes",
    "training.early_stopping",
    "training.log_every",
    "training.checkpoint_every",
    "training.checkpoint_every_minutes",
    "training.tensorboard",
    "evaluation.num_samples",
)


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
