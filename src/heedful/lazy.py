"""Packages that hand out their names when these are asked for, so that importing one is cheap."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package (PEP 562).

    Args:
        homes: for each name the module that has it; a module's own last name is the module itself.
    """

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package} has no attribute {name}")
        module = import_module(home)
        return module if home.endswith(f".{name}") else getattr(module, name)

    return __getattr__
