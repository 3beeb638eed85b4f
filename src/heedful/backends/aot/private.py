"""The private symbols of torch that ahead-of-time compilation uses, each in one function.

Tried with torch 2.13; earlier versions are refused. A symbol that a later version lacks or has
changed is an error of this file alone: `heedful optimize` then reports that the net cannot be
compiled.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

OLDEST_TORCH = "2.13"


def unsupported_reason() -> str | None:
    """The reason why this torch compiles no nets ahead of time; None: it does."""
    if torch.__version__ >= OLDEST_TORCH:  # compared as versions
        return None
    return f"compiled nets need torch {OLDEST_TORCH} or later, this is {torch.__version__}"


def compile_graph(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """The files of an exported module compiled by Inductor, weights excluded."""
    from torch._inductor import aot_compile

    files: Any = aot_compile(module, args, options=options)
    return [str(file) for file in files]


def link_libraries(names: list[str]) -> AbstractContextManager[Any]:
    """Link compiled graphs with libraries on LIBRARY_PATH."""
    from torch._inductor import config

    patch: AbstractContextManager[Any] = config.patch({"aot_inductor.custom_op_libs": names})
    return patch


def write_package(path: Path, graphs: dict[str, Any]) -> None:
    """Write the files of compiled graphs as one package."""
    from torch._inductor.package.package import package_aoti

    package_aoti(str(path), graphs)


def load_graph(path: Path, name: str) -> Any:
    """One graph of a package, without its constants; raises RuntimeError for a broken package.

    `torch._inductor.aoti_load_package` compiles test programs only to word a warning.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), name, True, 1, -1)


def c_shims(functions: dict[Any, list[str]]) -> dict[Any, list[str]]:
    """Custom operators with the C declarations of their kernels, as Inductor takes them."""
    return {operator._opoverload: lines for operator, lines in functions.items()}
