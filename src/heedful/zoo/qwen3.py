"""Qwen3 (Yang et al. 2025, "Qwen3 Technical Report"), the dense models.

LLaMA with grouped-query attention and norms of queries and keys, over each head, before the
rotation; no bias of queries, keys and values as in Qwen2 (sec. 2). The length is that of the
released configurations.
"""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block
from heedful.parts.positions import Llama3Scaling
from heedful.zoo import gguf
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.rotary import (
    Base,
    gated_feedforward,
    head_width,
    hf_names,
    hidden_width,
    read_rotary,
    rotary_attention,
    rotary_block,
    rotary_decoder,
    rotary_module,
    sizes_to_hf,
)


@model_config
class Config(Base):
    """Keys as in LLaMA with the values of the report; the defaults are 0.6B.

    Args:
        attention_bias: bias of all matrices of attention.
    """

    vocab_size: int = 151936
    d_model: int = 1024
    num_heads: int = 16
    num_kv_heads: int | None = 8
    head_dim: int | None = 128
    num_layers: int = 28
    d_ff: int | None = 3072
    max_length: int = 40960
    rope_base: float = 1000000.0
    attention_bias: Annotated[bool, Hf("attention_bias")] = False
    tie_embeddings: bool = True


def _size(num_layers: int, d_model: int, num_heads: int, d_ff: int, tied: bool) -> dict[str, Any]:
    sizes = {"num_layers": num_layers, "d_model": d_model, "num_heads": num_heads}
    return {**sizes, "d_ff": d_ff, "tie_embeddings": tied}


SIZES: dict[str, dict[str, Any]] = {  # Table 1, and the parameters of each
    "0.6b": {},
    "1.7b": _size(28, 2048, 16, 6144, True),
    "4b": _size(36, 2560, 32, 9728, True),
    "8b": _size(36, 4096, 32, 12288, False),
    "14b": _size(40, 5120, 40, 17408, False),
    "32b": _size(64, 5120, 64, 25600, False),
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in `llama.build`."""
    position = rotary_module(config)
    norm = partial(nn.RMSNorm, head_width(config), eps=config.norm_eps)

    def block() -> Block:
        norms: Any = {"query_norm": norm(), "key_norm": norm()}
        attention = rotary_attention(config, position, bias=config.attention_bias, **norms)
        return rotary_block(config, attention, gated_feedforward(config))

    return rotary_decoder(config, block)


HF = HfConfig(
    model_type="qwen3",
    classes={"Qwen3ForCausalLM": {}, "Qwen3Model": {}},
    fixed={"use_sliding_window": False},
    defaults={"d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "num_layers": 32}
    | {
        "d_ff": 22016,
        "max_length": 32768,
        "rope_base": 10000.0,
        "tie_embeddings": False,
    },
    read=read_rotary,
    write=sizes_to_hf,
)


def _to_gguf(config: Config) -> gguf.Metadata:
    if config.attention_bias:
        raise gguf.refuse("Qwen3", "attention_bias", True, False)
    if isinstance(config.rope_scaling, Llama3Scaling):
        raise gguf.refuse("Qwen3", "rope_scaling of type", "llama3", "linear, ntk and yarn")
    return gguf.rotary_to_gguf(config, hidden_width(config))


GGUF = gguf.GgufConfig("qwen3", _to_gguf)
GGUF_FORMAT = Format(GGUF, gguf.rotary_names, gguf.in_layout("qwen3", "half"))
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": GGUF_FORMAT}
ARCHITECTURE = Architecture("qwen3", Config, build, SIZES, FORMATS)
