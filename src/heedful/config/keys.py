"""Keys of a recipe as text: dotted names in nested sections, types and values."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES = {NoneType: "null", Any: "any"}


class Key(NamedTuple):
    """One key: its dotted name, its field, and whether it is a section of keys."""

    name: str
    field: FieldInfo
    is_section: bool


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys of a model, each section before the keys in it."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        section = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield Key(f"{prefix}{name}", field, section)
        if section:
            yield from keys_of(kind, f"{prefix}{name}.")  # type: ignore[arg-type]


def set_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys that were set explicitly."""
    for name in type(section).model_fields:
        if name in section.model_fields_set:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                yield from set_keys(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def set_key(content: dict[str, Any], name: str, value: Any) -> None:
    """Set a key by its dotted name; a value where a section is needed is replaced by one."""
    *parents, last = name.split(".")
    for parent in parents:
        if not isinstance(content.get(parent), dict):
            content[parent] = {}
        content = content[parent]
    content[last] = value


def type_name(kind: Any) -> str:
    """A type in a recipe's words: `int | null`, `drop | truncate | error`, `list of str`."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _NAMES:
        return _NAMES[kind]
    if origin is Annotated:
        return type_name(inside[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, inside))
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin is list:
        is_section = isinstance(inside[0], type) and issubclass(inside[0], BaseModel)
        return "list" if is_section else f"list of {type_name(inside[0])}"
    if origin is tuple:
        names = [*map(type_name, inside)]
        is_uniform = len(set(names)) == 1
        return f"list of {len(names)} {names[0]}" if is_uniform else f"[{', '.join(names)}]"
    return "mapping" if origin is dict else str(getattr(kind, "__name__", kind))


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
