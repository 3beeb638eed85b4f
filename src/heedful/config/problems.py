"""One line for the first wrong key of a recipe, from pydantic's list of errors."""

import re
from collections.abc import Mapping, Sequence
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from heedful.config.keys import keys_of, type_name
from heedful.plugins import nearest

_OTHER_NAMES = {  # last parts of keys in other toolkits, and ours
    "batch_size": "batch_tokens",
    "epochs": "max_epochs",
    "lr": "learning_rate",
    "steps": "max_steps",
    "warmup": "warmup_steps",
}
_OF_TYPE = ("_type", "_parsing", "literal_error", "int_from_float")  # kinds of pydantic's errors


def wrong_key(error: ValidationError, model: type[BaseModel], section: str = "") -> tuple[str, str]:
    """The first wrong key, and one line on its problem.

    Args:
        model: the recipe, or its section with the dotted name `section`.
    """
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for problem in error.errors():
        by_key.setdefault(_key_path(problem["loc"], model), []).append(problem)
    keys, problems = next(iter(by_key.items()))
    key = ".".join([section, *keys] if section else keys)
    more = f" (and {len(by_key) - 1} more)" if len(by_key) > 1 else ""
    first = next(
        (problem for problem in problems if not problem["type"].endswith(_OF_TYPE)), problems[0]
    )
    if first["type"] == "extra_forbidden":
        known = _fields_at(keys[:-1], model)
        return key, f"unknown key {key}; {_hint(key, known, model)}{more}"
    if len(problems) > 1 and first["type"].endswith(_OF_TYPE):  # of no member of a union
        expected = type_name(_fields_at(keys[:-1], model)[keys[-1]].annotation)
        return key, f"{key}: expected {expected}, not {first['input']!r}{more}"
    if first["type"] == "model_type":
        return key, f"{key}: expected a mapping of keys, not {first['input']!r}{more}"
    if first["type"] == "literal_error":
        options = re.findall("'([^']+)'", first["ctx"]["expected"])
        value = str(first["input"])
        return key, f"{key}: unknown value {value}; {nearest(value, options)}{more}"
    return key, f"{key + ': ' if key else ''}{problem_text(first)}{more}"


def problem_text(problem: ErrorDetails) -> str:
    """The problem of a value, in words that do not name pydantic's parser."""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    message = message.partition(", unable to parse")[0]
    return f"{message[0].lower()}{message[1:]}, not {problem['input']!r}"


def _hint(key: str, known: Mapping[str, FieldInfo], model: type[BaseModel]) -> str:
    """The key of a recipe that an unknown one may mean: near in its section, or in another."""
    last = key.rpartition(".")[2]
    hint = nearest(last, known)
    if hint.startswith("did you mean"):
        return hint
    last = _OTHER_NAMES.get(last, last)
    keys = [name for name, _, is_section in keys_of(model) if not is_section]
    matches = [name for name in keys if name.rpartition(".")[2] == last]
    return f"did you mean {matches[0]}?" if len(matches) == 1 else hint


def _key_path(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, ...]:
    """The keys of an error's location, without indices of lists and names of union members."""
    keys: list[str] = []
    for part in location:
        fields = {} if isinstance(part, int) else _fields_at(keys, model)
        is_name = _is_mapping_at(keys, model)
        keys.append(str(part))
        if not isinstance(part, int | float) and not (
            is_name or (part in fields and _models_in(fields[part]))
        ):
            break
    return tuple(keys)


def _fields_at(keys: Sequence[str], model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of the section at some keys, or of the sections in the mapping there."""
    field: FieldInfo | None = None
    for key in keys:
        if field is not None and get_origin(field.annotation) is dict:
            field = None  # a name in a mapping of sections
        elif not key.isdigit():
            field = model.model_fields[key]
            model = _models_in(field)[0]
    return dict(model.model_fields)


def _is_mapping_at(keys: Sequence[str], model: type[BaseModel]) -> bool:
    """True if the keys lead to a mapping from names to sections."""
    if not keys:
        return False
    field = _fields_at(keys[:-1], model).get(keys[-1])
    return (
        field is not None
        and get_origin(field.annotation) is dict
        and not _is_mapping_at(keys[:-1], model)
    )


def _models_in(field: FieldInfo) -> list[type[BaseModel]]:
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
