"""LLaMA (Touvron et al. 2023a), Llama 2 (Touvron et al. 2023b) and Llama 3 (Dubey et al. 2024).

A pre-norm decoder with RMSNorm, SwiGLU and rotary positions (LLaMA, sec. 2.2), without biases and
dropout. The largest model of Llama 2 and all of Llama 3 have grouped-query attention; Llama 3 has a
rotary base of 500,000, 3.1 scales the low frequencies (`Llama3Scaling`), and the two small models
of 3.2 tie their embeddings.
"""

from typing import Annotated, Any

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block
from heedful.zoo import gguf
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.rotary import (
    Base,
    divided_sizes_to_hf,
    gated_feedforward,
    hf_names,
    hidden_width,
    read_rotary,
    rotary_attention,
    rotary_block,
    rotary_decoder,
    rotary_module,
)


@model_config
class Config(Base):
    """Keys of `rotary.Base`, and biases.

    Args:
        attention_bias: bias of all matrices of attention.
        mlp_bias: bias of all matrices of the feed-forward.
    """

    attention_bias: Annotated[bool, Hf("attention_bias")] = False
    mlp_bias: Annotated[bool, Hf("mlp_bias")] = False


_LLAMA_2: dict[str, Any] = {"max_length": 4096, "norm_eps": 1e-5}
_LLAMA_3: dict[str, Any] = {"vocab_size": 128256, "num_kv_heads": 8, "max_length": 8192}
_LLAMA_3 |= {"norm_eps": 1e-5, "rope_base": 500000.0}
_LLAMA_3_1 = _LLAMA_3 | {"max_length": 131072, "rope_scaling": {"type": "llama3"}}
_LLAMA_3_2 = _LLAMA_3_1 | {"d_ff": 8192, "tie_embeddings": True}
_LLAMA_3_2 |= {"rope_scaling": {"type": "llama3", "factor": 32.0}}
_13B: dict[str, Any] = {"d_model": 5120, "num_heads": 40, "num_layers": 40}
_65B: dict[str, Any] = {"d_model": 8192, "num_heads": 64, "num_layers": 80}
_70B = _65B | {"num_kv_heads": 8, "d_ff": 28672}

SIZES: dict[str, dict[str, Any]] = {  # and their parameters
    "7b": {},  # 6.7B
    "13b": _13B,  # 13.0B
    "33b": {"d_model": 6656, "num_heads": 52, "num_layers": 60},  # 32.5B
    "65b": _65B,  # 65.3B
    "2-7b": _LLAMA_2,
    "2-13b": _LLAMA_2 | _13B,
    "2-70b": _LLAMA_2 | _70B,  # 69.0B
    "3-8b": _LLAMA_3 | {"d_ff": 14336},  # 8.0B
    "3-70b": _LLAMA_3 | _70B,  # 70.6B
    "3.1-8b": _LLAMA_3_1 | {"d_ff": 14336},
    "3.1-70b": _LLAMA_3_1 | _70B,
    "3.1-405b": _LLAMA_3_1  # 405.9B
    | {"d_model": 16384, "num_heads": 128, "num_layers": 126, "d_ff": 53248},
    "3.2-1b": _LLAMA_3_2 | {"d_model": 2048, "num_layers": 16},  # 1.24B
    "3.2-3b": _LLAMA_3_2 | {"d_model": 3072, "num_heads": 24, "num_layers": 28},  # 3.21B
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized from torch's random generator.

    The papers do not describe the initialization. As in GPT-2, weights are N(0, 0.02²), and the
    last one of each residual branch is divided by √(2L).
    """
    position = rotary_module(config)

    def block() -> Block:
        attention = rotary_attention(config, position, bias=config.attention_bias)
        return rotary_block(config, attention, gated_feedforward(config, bias=config.mlp_bias))

    return rotary_decoder(config, block)


HF = HfConfig(
    model_type="llama",
    classes={"LlamaForCausalLM": {}, "LlamaModel": {}},
    defaults={"d_ff": 11008},
    read=read_rotary,
    write=divided_sizes_to_hf,
)
GGUF = gguf.GgufConfig(
    "llama",
    lambda config: gguf.rotary_to_gguf(config, hidden_width(config)),
    more_tensors=gguf.rope_factors,
)
GGUF_FORMAT = Format(GGUF, gguf.rotary_names, gguf.in_layout("llama", "interleaved"))
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": GGUF_FORMAT}
ARCHITECTURE = Architecture("llama", Config, build, SIZES, FORMATS)
