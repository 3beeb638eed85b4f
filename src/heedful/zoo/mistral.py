"""Mistral 7B (Jiang et al. 2023).

| 7B   | layers | d_model | heads | k/v heads | head_dim | d_ff  | window | rope base | parameters |
|------|--------|---------|-------|-----------|----------|-------|--------|-----------|------------|
| v0.1 | 32     | 4096    | 32    | 8         | 128      | 14336 | 4096   | 10,000    | 7.24B      |
| v0.2 | 32     | 4096    | 32    | 8         | 128      | 14336 | none   | 1,000,000 | 7.24B      |
| v0.3 | 32     | 4096    | 32    | 8         | 128      | 14336 | none   | 1,000,000 | 7.25B      |

LLaMA with grouped-query attention and a sliding window: a query attends to the last W keys, itself
included, so that L layers reach W · L tokens back (sec. 2). The length is that of the released
configuration.
"""

from typing import Annotated, Any

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block
from heedful.zoo import gguf
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.rotary import (
    Base,
    gated_feedforward,
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
    """Keys as in LLaMA with the values of the paper; the defaults are version 0.1.

    Args:
        window: number of keys that a query attends to, itself included; None: no window.
    """

    num_kv_heads: int | None = 8
    head_dim: int | None = 128
    d_ff: int | None = 14336
    max_length: int = 32768
    window: Annotated[int | None, Hf("sliding_window")] = 4096
    norm_eps: float = 1e-5


SIZES: dict[str, dict[str, Any]] = {
    "7b": {},
    "7b-v0.2": {"window": None, "rope_base": 1000000.0},
    "7b-v0.3": {"vocab_size": 32768, "window": None, "rope_base": 1000000.0},
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in `llama.build`."""
    position = rotary_module(config)

    def block() -> Block:
        attention = rotary_attention(config, position, window=config.window)
        return rotary_block(config, attention, gated_feedforward(config))

    return rotary_decoder(config, block)


HF = HfConfig(
    model_type="mistral",
    classes={"MistralForCausalLM": {}, "MistralModel": {}},
    defaults={"head_dim": None, "max_length": 131072, "norm_eps": 1e-6},
    read=read_rotary,
    write=sizes_to_hf,
)


def to_gguf(config: Config) -> gguf.Metadata:
    """Metadata of GGUF. llama.cpp has no window here: longer texts would be read otherwise."""
    length = min(config.max_length, config.window or config.max_length)
    return gguf.rotary_to_gguf(config, hidden_width(config)) | {"context_length": length}


GGUF = gguf.GgufConfig("llama", to_gguf, more_tensors=gguf.rope_factors)
GGUF_FORMAT = Format(GGUF, gguf.rotary_names, gguf.in_layout("mistral", "interleaved"))
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": GGUF_FORMAT}
ARCHITECTURE = Architecture("mistral", Config, build, SIZES, FORMATS)
