"""Published models, one file a paper. Each has a `Config` and a `build(config) -> net`."""

from heedful import plugins
from heedful.lazy import lazily

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
architecture = plugins.architecture.get  # the module of a name, also a plugin's
plugins.architecture.declare({name: f"heedful.zoo.{name}" for name in ARCHITECTURES})
__getattr__ = lazily(__name__, {})
