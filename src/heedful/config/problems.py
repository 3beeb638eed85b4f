"""One line for the first wrong key of a recipe, from pydantic's list of errors."""

import re
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from heedful.plugins import nearest

# Keys by their earlier name; `objective` is the task's own section.
RENAMED = {
    "data.documents": "data.text_unit",
    "data.hold_out": "data.valid_size",
    "data.valid_fraction": "data.valid_size",
    "distillation.backward": "distillation.back_translation_models",
    "distillation.hard_weight": "distillation.cross_entropy_weight",
    "distillation.keep_targets": "distillation.include_references",
    "distillation.nearest": "distillation.select_by_chrf",
    "distillation.soft_weight": "distillation.distillation_weight",
    "objective.density": "objective.noise_density",
    "objective.fraction": "objective.mlm_probability",
    "objective.marks": "objective.add_bos_eos",
    "training.average_last": "training.average_checkpoints",
    "training.early_stopping": "training.patience",
    "training.schedule.final_fraction": "training.schedule.min_lr_ratio",
}


def wrong_key(error: ValidationError, model: type[BaseModel], section: str = "") -> tuple[str, str]:
    """The first wrong key of `model`, which is a section of a recipe, and what is wrong with it."""
    problems = error.errors()
    first = problems[0]
    keys = _written(first["loc"], model)
    key = ".".join([section, *keys] if section else keys)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(keys[:-1], model)
        new_name = RENAMED.get(key, "")
        if new_name.rpartition(".")[2] in known:
            return key, f"{key} is now {new_name}{more}"
        return key, f"unknown key {key}; {nearest(keys[-1], known)}{more}"
    if first["type"] == "literal_error":
        options = re.findall("'([^']+)'", first["ctx"]["expected"])
        value = str(first["input"])
        return key, f"{key}: unknown value {value}; {nearest(value, options)}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return key, f"{key + ': ' if key else ''}{message}{more}"
    message = message[0].lower() + message[1:]
    return key, f"{key}: {message}, not {first['input']!r}{more}"


def _written(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """The keys of an error's place, without pydantic's positions and names of union members."""
    keys: list[str] = []
    for part in location:
        fields = {} if isinstance(part, int) else _fields_at(keys, model)  # a place in a list
        keys.append(str(part))
        if not isinstance(part, int) and not (part in fields and _models_in(fields[part])):
            break
    return keys


def _fields_at(keys: list[str], model: type[BaseModel]) -> dict[str, FieldInfo]:
    for key in keys:
        if not key.isdigit():
            model = _models_in(model.model_fields[key])[0]
    return dict(model.model_fields)


def _models_in(field: FieldInfo) -> list[type[BaseModel]]:
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
