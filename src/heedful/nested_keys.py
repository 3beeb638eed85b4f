"""Dotted names of the keys of nested pydantic models and mappings."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo


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
