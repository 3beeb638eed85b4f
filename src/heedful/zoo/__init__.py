"""Published models, one file a paper. Each has a `Config` and a `build(config) -> net`."""

import difflib
from importlib import import_module
from typing import Any

from heedful.errors import UserError

ARCHITECTURES = (
    "vaswani2017",
    "gpt2",
    "bert",
    "roberta",
    "distilbert",
    "bart",
    "marian",
    "t5",
    "llama",
    "mistral",
    "gpt",
    "gpt3",
)


def architecture(name: str) -> Any:
    """The module of an architecture by its name; raises UserError naming the nearest."""
    if name not in ARCHITECTURES:
        close = difflib.get_close_matches(name, ARCHITECTURES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(ARCHITECTURES)}"
        raise UserError(f"no architecture {name}; {hint}")
    return import_module(f"heedful.zoo.{name}")


def __getattr__(name: str) -> Any:
    """`heedful.zoo.NAME` without an import of its own."""
    if name in ARCHITECTURES:
        return architecture(name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
