"""Checks of annotated shapes, switched on and off between tests.

While they are on, the modules and classes of heedful, and the modules of tests, hold checked
versions of the functions that have shapes in their annotations. While they are off, they hold the
functions themselves, so that other tests pay nothing. The first calls of a function in each test
are checked: the steps of a run call each a thousand times with the same kinds of shapes.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from beartype import beartype
from jaxtyping import jaxtyped

import heedful

_FOLDERS = (str(Path(heedful.__file__).parent), str(Path(__file__).parents[1]))
_DESCRIPTORS = (staticmethod, classmethod)
CHECKED_CALLS = 20  # of each function after `check_shapes(True)`
# Directories and files of tests that run with annotated shapes checked, which takes about as long
# as a small net: at least one file for each package.
SHAPES_CHECKED = (
    *("parts", "data", "evaluation", "models/test_properties.py", "models/test_packed.py"),
    *("generation/test_search.py", "generation/test_sampling.py", "generation/test_logits.py"),
    *("generation/test_constrained.py", "generation/test_diverse_beam.py"),
    *("zoo/test_gemma3.py", "zoo/test_modernbert.py", "zoo/test_t5.py"),
    *("zoo/test_vaswani2017.py", "zoo/test_initialization.py"),
    *("insight/test_verify.py", "deploy/test_convert.py", "backends/test_coverage.py"),
    *("pipelines/test_scoring.py", "export/test_import_export.py", "tasks/test_inputs.py"),
    *("tasks/test_masking.py", "tasks/test_noise.py", "tasks/test_classification.py"),
    *("tasks/test_denoising.py", "tasks/test_distillation.py"),
)


class _Place(NamedTuple):
    """An attribute that holds a function with shapes in its annotations."""

    owner: ModuleType | type
    name: str
    plain: Any
    checked: Any


class _ShapeChecks:
    """The places of all functions with shapes in modules that were imported at the last switch."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        # Each function and its checked version, by the ids of both, which the places keep alive.
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._searched: set[str] = set()  # names of modules
        self._calls: dict[int, int] = {}  # of each function since the last switch, by its id
        self._are_on = False

    def switch(self, enabled: bool) -> None:
        """Switch the checks on or off in all modules that are imported by now."""
        self._calls.clear()
        has_new = enabled and self._search_new_modules()
        if enabled == self._are_on and not has_new:
            return
        for place in self._places:
            value = place.checked if enabled else place.plain
            if vars(place.owner).get(place.name) in (place.plain, place.checked):
                setattr(place.owner, place.name, value)
        self._are_on = enabled

    def _search_new_modules(self) -> bool:
        """Add the places of new modules; returns whether there are any."""
        names = [name for name in [*sys.modules] if name not in self._searched]
        self._searched.update(names)
        modules = [module for name in names if _is_ours(module := sys.modules[name])]
        count = len(self._places)
        for module in modules:
            for owner in (module, *_classes(module)):
                for name, value in [*vars(owner).items()]:
                    if name == "__new__" or not _has_shapes(value):
                        continue
                    if id(value) not in self._pairs:  # a module may import a checked version
                        pair = (value, self._checked(value))
                        self._pairs |= dict.fromkeys(map(id, pair), pair)
                    self._places.append(_Place(owner, name, *self._pairs[id(value)]))
        return len(self._places) > count

    def _checked(self, value: Any) -> Any:
        """A function, method or property that checks shapes; of functions the first calls do."""
        checked = jaxtyped(value, typechecker=beartype)
        if not isinstance(value, FunctionType):
            return checked
        calls, key = self._calls, id(value)

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[key] = number = calls.get(key, 0) + 1
            return (checked if number <= CHECKED_CALLS else value)(*args, **kwargs)

        return call


def _is_ours(module: ModuleType | None) -> bool:
    return str(getattr(module, "__file__", None)).startswith(_FOLDERS)


def _classes(module: ModuleType) -> Iterator[type]:
    """The classes that a module defines."""
    for value in [*vars(module).values()]:
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield value


def _has_shapes(value: Any) -> bool:
    """True for functions and methods of heedful with a shape in their annotations."""
    if isinstance(value, property):
        return _has_shapes(value.fget)
    function = value.__func__ if isinstance(value, _DESCRIPTORS) else value
    if not isinstance(function, FunctionType) or not function.__module__.startswith("heedful"):
        return False
    inner = inspect.unwrap(function)
    if inner is not function and inspect.isgeneratorfunction(inner):  # a context manager
        return False
    return any("jaxtyping" in repr(item) for item in function.__annotations__.values())


check_shapes = _ShapeChecks().switch
