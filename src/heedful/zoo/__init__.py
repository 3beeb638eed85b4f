"""Published models, one file per paper: each defines a `Config`, `build` and its `ARCHITECTURE`.

Encoder-decoder
    `vaswani2017`, `bart`, `marian`, `pegasus`, `m2m100`, `mbart`, `t5`
Decoder-only
    `gpt`, `gpt2`, `gpt3`, `llama`, `mistral`, `mixtral`, `qwen2`, `qwen3`, `gemma3`, `stablelm`
Encoder-only
    `bert`, `roberta`, `xlm_roberta`, `distilbert`, `modernbert`

`architecture(name)` returns the `Architecture` of a name, also one of a plugin: for example
`architecture("gpt2").build(architecture("gpt2").config(num_layers=2))` builds a small GPT-2 with
initialized weights. `ARCHITECTURES` lists the names.

Names are imported on first use, so that `import heedful.zoo` alone imports no torch.
"""

from typing import TYPE_CHECKING

from heedful import plugins
from heedful.extras import lazily

if TYPE_CHECKING:
    from heedful.zoo.architectures import Architecture

__all__ = ["ARCHITECTURES", "Architecture", "architecture"]

ARCHITECTURES = (
    "vaswani2017",
    "gpt2",
    "bert",
    "roberta",
    "xlm_roberta",
    "distilbert",
    "modernbert",
    "bart",
    "marian",
    "pegasus",
    "m2m100",
    "mbart",
    "t5",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "stablelm",
    "mixtral",
    "gpt",
    "gpt3",
)
plugins.architecture.declare({name: f"heedful.zoo.{name}:ARCHITECTURE" for name in ARCHITECTURES})


def architecture(name: str) -> "Architecture":
    """The architecture of a name, also of a plugin; raises UserError with the nearest name.

    >>> gpt2 = architecture("gpt2")
    >>> net = gpt2.build(gpt2.config(vocab_size=100, d_model=16, num_heads=2, num_layers=1))
    >>> sum(weight.numel() for weight in net.parameters())
    21296
    """
    result: Architecture = plugins.architecture.get(name)
    return result


if not TYPE_CHECKING:
    __getattr__ = lazily(__name__, {"architectures": ("Architecture",)})


def __dir__() -> list[str]:
    return [*globals(), *__all__]
