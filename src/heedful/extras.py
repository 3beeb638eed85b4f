"""Packages that only some uses need: the extras of heedful, and names imported on first access."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from heedful.errors import UserError

EXTRAS = {  # their packages, as in pyproject.toml
    "demo": ("babel",),
    "documents": ("babel", "markdown-it-py", "polib", "sentencex"),
    "eval": ("sacrebleu", "sacremoses"),
    "fast": ("ctranslate2",),
    "gguf": ("gguf",),
    "grammar": ("llguidance",),
    "harness": ("lm_eval",),
    "import": ("sentencepiece", "protobuf"),
    "inspect": ("scikit-learn",),
    "langid": ("py3langid",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "parquet": ("pyarrow",),
    "ray": ("ray", "pyarrow"),
    "report": ("matplotlib", "pygments"),
    "serve": (
        *("fastapi", "uvicorn", "prometheus-client", "py3langid", "llguidance", "lxml"),
        "sentencex",
    ),
    "tensorboard": ("tensorboard",),
    "umap": ("umap-learn",),
}
_MODULES = {
    "markdown-it-py": "markdown_it",
    "protobuf": "google.protobuf.message",
    "prometheus-client": "prometheus_client",
    "scikit-learn": "sklearn",
    "umap-learn": "umap",
}  # of packages with another name


def install_command(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'heedful[{extra}]'"


def missing_packages(extra: str) -> str | None:
    """The packages of an extra that are not installed, and what installs them; None: all are."""
    names = [name for name in EXTRAS[extra] if not is_installed(_MODULES.get(name, name))]
    return f"{' and '.join(names)}: {install_command(extra)}" if names else None


def require(extra: str, use: str) -> None:
    """Check that the packages of an extra are installed, before they are imported.

    Args:
        use: subject of the error, such as "the metric bleu".

    Raises:
        UserError: a package is not installed, with the command that installs it.
    """
    if packages := missing_packages(extra):
        raise UserError(f"{use} needs {packages}")


def import_matplotlib() -> None:
    """Import matplotlib, whatever MPLBACKEND says.

    Its import fails for a backend that is not installed, such as the one that Jupyter names to the
    programs started in it. Figures here are drawn without a backend. An installed one stays set,
    for the caller's own.
    """
    if "matplotlib" in sys.modules:
        return
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


def is_installed(module: str) -> bool:
    """True if a module can be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package that it is in
        return False


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
