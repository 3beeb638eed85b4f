"""Frozen dataclasses whose values pydantic checks, with `UserError` for wrong ones."""

from dataclasses import fields
from functools import wraps
from numbers import Real
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from heedful.errors import UserError, describe
from heedful.plugins import nearest

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def checked_dataclass(cls: type[T]) -> type[T]:
    """A frozen dataclass whose constructor raises UserError, naming the class and the key."""
    result: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    initialize = result.__init__
    names = [field.name for field in fields(result)]

    @wraps(initialize)
    def __init__(self: Any, *args: Any, **keys: Any) -> None:
        try:
            initialize(self, *args, **keys)
        except ValidationError as error:
            key, message = first_problem(error, names)
            where = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
            if key in keys and key not in names:
                raise UserError(f"{where}: unknown key {key}; {nearest(key, names)}") from None
            raise UserError(f"{where}: {f'{key}: ' if key else ''}{message}") from None

    result.__init__ = __init__
    return cast(type[T], result)


def check_positive(**values: Any) -> None:
    """Raises UserError for an argument that is no number above 0; None is not checked."""
    for name, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            raise UserError(f"{name} must be a number above 0, not {describe(value)}")


def first_problem(error: ValidationError, names: list[str]) -> tuple[str, str]:
    """The dotted key and the message of the first problem.

    Args:
        names: the fields, by which arguments without a keyword are named.
    """
    first = error.errors()[0]
    place = list(map(str, first["loc"]))
    if place and place[0].isdecimal() and int(place[0]) < len(names):
        place[0] = names[int(place[0])]
    return ".".join(place), first["msg"].removeprefix("Value error, ")
