"""Published models, one file a paper. Each has a `Config` and a `build(config) -> net`."""

from typing import Any

from heedful import plugins

ARCHITECTURES = (
    "vaswani2017",
    "gpt2",
    "bert",
    "roberta",
    "distilbert",
    "modernbert",
    "bart",
    "marian",
    "pegasus",
    "t5",
    "llama",
    "mistral",
    "qwen3",
    "gemma3",
    "mixtral",
    "gpt",
    "gpt3",
)


def architecture(name: str) -> Any:
    """The module of an architecture by its name, also a plugin's; UserError naming the nearest."""
    return plugins.architecture.get(name)


plugins.architecture.declare({name: f"heedful.zoo.{name}" for name in ARCHITECTURES})


def __getattr__(name: str) -> Any:
    """`heedful.zoo.NAME` without an import of its own."""
    if name in ARCHITECTURES:
        return architecture(name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
