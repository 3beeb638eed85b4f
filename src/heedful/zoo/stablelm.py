"""StableLM (Bellagente et al. 2024, "Stable LM 2 1.6B Technical Report").

| size    | layers | d_model | heads | d_ff | vocabulary | parameters |
|---------|--------|---------|-------|------|------------|------------|
| 3b      | 32     | 2560    | 32    | 6912 | 50,304     | 2.80B      |
| 2-1.6b  | 24     | 2048    | 32    | 5632 | 100,352    | 1.64B      |

LLaMA with LayerNorms, and rotary positions on the first quarter of the dimensions of each head
(sec. 2.2); version 2 has a bias of queries, keys and values.
"""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.residual import PreNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.rotary import (
    Base,
    divided_sizes_to_hf,
    gated_feedforward,
    hf_names,
    implied_head_dim,
    read_rotary,
    rotary_attention,
    rotary_module,
    rotated_width,
)


@model_config
class Config(Base):
    """Keys as in LLaMA; the defaults are the first model, with 3B parameters.

    Args:
        qkv_bias: bias of queries, keys and values.
        rope_fraction: share of the dimensions of a head that are rotated, the first ones.
    """

    vocab_size: int = 50304
    d_model: int = 2560
    d_ff: int | None = 6912
    max_length: int = 4096
    norm_eps: Annotated[float, Hf("layer_norm_eps")] = 1e-5
    qkv_bias: Annotated[bool, Hf("use_qkv_bias")] = False
    rope_fraction: float = 0.25

    def check(self) -> None:
        """Raise ValueError for a share of the dimensions that are not pairs."""
        width = rotated_width(self)
        if self.rope_fraction > 1 or width % 2 or not width:
            raise ValueError(
                f"rope_fraction {self.rope_fraction} rotates {width} dimensions of a head; give an "
                "even number of them, at most all"
            )


SIZES: dict[str, dict[str, Any]] = {
    "3b": {},
    "2-1.6b": {"vocab_size": 100352, "d_model": 2048, "num_layers": 24, "d_ff": 5632}
    | {"qkv_bias": True},
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in `llama.build`."""
    position = rotary_module(config)
    norm = partial(nn.LayerNorm, config.d_model, eps=config.norm_eps)
    residual = partial(PreNorm, dropout=config.dropout)

    def block() -> Block:
        attention = rotary_attention(config, position, bias=config.qkv_bias, out_bias=False)
        return Block(residual(attention, norm()), None, residual(gated_feedforward(config), norm()))

    return decoder_only(config, Stack((block() for _ in range(config.num_layers)), norm()))


def _write(config: Config) -> dict[str, Any]:
    return {**divided_sizes_to_hf(config), "partial_rotary_factor": config.rope_fraction}


HF = HfConfig(
    model_type="stablelm",
    classes={"StableLmForCausalLM": {}, "StableLmModel": {}},
    fixed={"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0},
    defaults={"num_kv_heads": 32},
    read=lambda content, keys: implied_head_dim(keys) | read_rotary(content, keys),
    write=_write,
)
ARCHITECTURE = Architecture("stablelm", Config, build, SIZES, {"hf": Format(HF, hf_names)})
