"""heedful with only the packages that its base installs: those of the extras are hidden.

As a program: runs commands in turn, each an argument, until one fails, and exits with its code.
"""

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from typing import Any

MODULES = {"protobuf": "google.protobuf"}


class _Hidden:
    """A finder that raises the error of a missing package for some modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.hides(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def hides(self, name: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for module in self.modules)


def hide(packages: Sequence[str]) -> None:
    """Let a process import none of some packages, also where it has imported them."""
    finder = _Hidden([MODULES.get(name, name) for name in packages])
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    find_spec = importlib.util.find_spec  # returns None for a package that is not installed
    importlib.util.find_spec = lambda name, package=None: (
        None if finder.hides(name) else find_spec(name, package)
    )
    for name in [name for name in sys.modules if finder.hides(name)]:
        del sys.modules[name]
    report = sys.modules.get("heedful.training.report")
    if report is not None:
        report.pages.cache_clear()


def main() -> None:
    from heedful.cli import main as heedful
    from heedful.extras import EXTRAS

    hide([package for packages in EXTRAS.values() for package in packages])
    hide(["transformers"])
    for line in sys.argv[1:]:
        sys.argv = ["heedful", *shlex.split(line)]
        try:
            heedful()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()
