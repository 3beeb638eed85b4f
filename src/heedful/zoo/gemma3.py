"""Gemma 3 (Gemma Team 2025, "Gemma 3 Technical Report"), its text models.

A decoder with norms before and after each sub-layer, whose scale is 1 + weight, GeGLU, normalised
queries and keys in place of Gemma 2's capped scores, and embeddings multiplied by √d_model that are
also the output. Every sixth layer sees the whole text and has a rotary base of 1,000,000, the
others see the last `window` tokens and have one of 10,000 (sec. 2). The models from 4B on stretch
the global layers' positions by 8.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from heedful.models.decoder_only import DecoderOnly
from heedful.parts.feedforward import Gate
from heedful.parts.residual import SandwichNorm, ZeroCenteredRMSNorm
from heedful.parts.rotary import RotaryPositions
from heedful.zoo import rotary_decoder
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.build import StackSpec, decoder_only
from heedful.zoo.hf import GATES, Hf, HfConfig
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Names
from heedful.zoo.rope import GLOBAL, LocalLayers, head_width
from heedful.zoo.rotary_decoder import Base, divided_sizes_to_hf, rotary_block


@model_config
class Config(Base):
    """LLaMA's keys with the report's values; the defaults are 1B.

    Args:
        window: keys that a query of a local layer sees, its own counted.
        global_every: the layers of this number and its multiples, counted from 1, are global.
        rope_base, rope_scaling: of the global layers; local_rope_base: of the others.
        query_scalar: scores are divided by its square root.
        score_softcap: of the scores, which transformers itself leaves out; None: not capped.
        logit_softcap: of the logits; None: not capped.
        attention_bias: in all four matrices of attention.
    """

    vocab_size: int = 262144
    d_model: int = 1152
    num_heads: int = 4
    num_kv_heads: int | None = 1
    head_dim: int | None = 256
    num_layers: int = 26
    d_ff: int | None = 6912
    max_length: int = 32768
    activation: Annotated[Gate, Hf("hidden_activation", values=GATES)] = "geglu_tanh"
    window: Annotated[int, Hf("sliding_window")] = 512
    global_every: Annotated[int, Hf("sliding_window_pattern")] = 6
    rope_base: float = 1000000.0
    local_rope_base: Annotated[float, Hf("rope_local_base_freq")] = 10000.0
    rope_layout: Literal["half"] = "half"
    query_scalar: Annotated[int, Hf("query_pre_attn_scalar")] = 256
    score_softcap: Annotated[float | None, Hf("attn_logit_softcapping")] = None
    logit_softcap: Annotated[float | None, Hf("final_logit_softcapping")] = None
    attention_bias: Annotated[bool, Hf("attention_bias")] = False
    tie_embeddings: bool = True


def _size(width: int, d_ff: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    sizes = {"d_model": width, "d_ff": d_ff, "num_layers": layers, "num_heads": heads}
    return {**_LARGE, **sizes, "num_kv_heads": kv_heads}


_LARGE: dict[str, Any] = {"vocab_size": 262208, "window": 1024, "max_length": 131072}
_LARGE |= {"rope_scaling": {"type": "linear", "factor": 8.0}}
SIZES: dict[str, dict[str, Any]] = {  # Table 1
    "270m": {"d_model": 640, "d_ff": 2048, "num_layers": 18},
    "1b": {},
    "4b": _size(2560, 10240, 34, 8, 4),
    "12b": _size(3840, 15360, 48, 16, 8),
    "27b": _size(5376, 21504, 62, 32, 16) | {"head_dim": 128, "query_scalar": 168},
}

LAYERS = LocalLayers(counted_from=1)


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying."""
    norm, width = partial(ZeroCenteredRMSNorm, eps=config.norm_eps), head_width(config)
    far = RotaryPositions(width, config.rope_base, scaling=config.rope_scaling)
    near = RotaryPositions(width, config.local_rope_base)
    block = rotary_block(config, attention_bias=config.attention_bias)
    attention = replace(
        block.attention,
        scale=config.query_scalar**-0.5,
        softcap=config.score_softcap,
        qk_norm=norm,
    )
    block = replace(block, residual=SandwichNorm, norm=norm)
    whole = replace(block, attention=replace(attention, position=far))
    local = replace(block, attention=replace(attention, position=near, window=config.window))
    blocks = [whole if kind == GLOBAL else local for kind in LAYERS.types(config)]
    return decoder_only(
        config,
        StackSpec(config.d_model, blocks, final_norm=norm),
        scale=config.d_model**0.5,
        softcap=config.logit_softcap,
        shrinks=False,
    )


HF_LAYER = rotary_decoder.HF_LAYER | {
    "self_attention.output_norm": "post_attention_layernorm",
    "feedforward.norm": "pre_feedforward_layernorm",
    "feedforward.output_norm": "post_feedforward_layernorm",
}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    return rotary_decoder.hf_names(config, HF_LAYER)


HF = HfConfig(
    model_type="gemma3_text",
    classes={"Gemma3ForCausalLM": {}, "Gemma3TextModel": {}},
    fixed={"use_bidirectional_attention": False},
    defaults={"vocab_size": 262208, "d_model": 2304, "num_heads": 8, "num_kv_heads": 4}
    | {"d_ff": 9216, "max_length": 131072, "window": 4096},
    read=LAYERS.read,
    write=lambda config: divided_sizes_to_hf(config) | LAYERS.write(config),
)
ARCHITECTURE = Architecture("gemma3", Config, build, SIZES, {"hf": Format(HF, hf_names)})
