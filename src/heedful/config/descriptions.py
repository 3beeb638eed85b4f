"""Types, descriptions and values of keys as text, and checks of names in a registry."""

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from heedful.errors import UserError
from heedful.plugins import Registry, nearest

_NAMES = {NoneType: "null", Any: "any"}


def registered_in(registry: Registry, *more: str) -> Callable[[str], str]:
    """A check that a name is in a registry, entries of later plugins included."""

    def check(name: str) -> str:
        if name not in more and name not in registry.names():
            raise UserError(f"unknown value {name}; {nearest(name, [*more, *registry.names()])}")
        return name

    return check


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
