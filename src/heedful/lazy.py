"""Packages whose names are imported on first access, so that importing a package is cheap."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for a package (PEP 562) that imports its modules and names on first access.

    Args:
        names: public names by the module of the package that defines them.
    """
    homes = {name: f"{package}.{home}" for home, public in names.items() for name in public}

    def __getattr__(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package} has no attribute {name}") from None

    return __getattr__
