"""Published models, one file a paper, each of which defines its `ARCHITECTURE`."""

from typing import TYPE_CHECKING

from heedful import plugins
from heedful.lazy import lazily

if TYPE_CHECKING:
    from heedful.zoo.architectures import Architecture

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
plugins.architecture.declare({name: f"heedful.zoo.{name}:ARCHITECTURE" for name in ARCHITECTURES})


def architecture(name: str) -> "Architecture":
    """The architecture of a name, also a plugin's; raises UserError naming the nearest."""
    found: Architecture = plugins.architecture.get(name)
    return found


__getattr__ = lazily(__name__, {})
