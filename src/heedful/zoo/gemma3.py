"""Gemma 3 (Gemma Team 2025, "Gemma 3 Technical Report"), its text models.

A decoder with norms (of scale 1 + weight) before and after each sub-layer, GeGLU, norms of queries
and keys in place of the capped scores of Gemma 2, and embeddings multiplied by √d_model, which are
also the output matrix. Every sixth layer is global, with a rotary base of 1,000,000; the others
attend to the last `window` tokens, with a base of 10,000 (sec. 2). From 4B on, positions of the
global layers are divided by 8.
"""

from functools import partial
from typing import Annotated, Any, Literal

from torch import Tensor

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.feedforward import Gate
from heedful.parts.positions import RotaryPositions
from heedful.parts.residual import SandwichNorm, ZeroCenteredRMSNorm
from heedful.zoo import gguf, rotary
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import GATES, Hf, HfConfig
from heedful.zoo.names import Names
from heedful.zoo.rotary import (
    GLOBAL,
    Base,
    LocalLayers,
    divided_sizes_to_hf,
    gated_feedforward,
    head_width,
    hidden_width,
    rotary_attention,
)


@model_config
class Config(Base):
    """Keys as in LLaMA with the values of the report; the defaults are 1B.

    Args:
        window: number of keys that a query of a local layer attends to, itself included.
        global_every: period k of global layers: those with number k, 2k and so on, from 1.
        rope_base: base of the rotary frequencies of global layers.
        rope_scaling: scaling of the rotary positions of global layers, as in LLaMA.
        local_rope_base: base of the rotary frequencies of local layers.
        query_scalar: scores are divided by its square root.
        score_softcap: cap of the scores; None: no cap, as in all published models. The Hugging Face
            format has a key for it, which transformers ignores: both directions refuse it.
        logit_softcap: cap of the logits; None: no cap.
        attention_bias: bias of all matrices of attention.
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
    score_softcap: float | None = None
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
    """A new model, initialized from torch's random generator."""
    norm, width = partial(ZeroCenteredRMSNorm, eps=config.norm_eps), config.d_model
    residual, head = partial(SandwichNorm, dropout=config.dropout), head_width(config)
    global_rope = RotaryPositions(head, config.rope_base, scaling=config.rope_scaling)
    local_rope = RotaryPositions(head, config.local_rope_base)

    def block(kind: str) -> Block:
        attention = rotary_attention(
            config,
            global_rope if kind == GLOBAL else local_rope,
            window=None if kind == GLOBAL else config.window,
            scale=config.query_scalar**-0.5,
            softcap=config.score_softcap,
            query_norm=norm(head),
            key_norm=norm(head),
            bias=config.attention_bias,
        )
        feedforward = gated_feedforward(config)
        return Block(residual(attention, norm(width)), None, residual(feedforward, norm(width)))

    return decoder_only(
        config,
        Stack(map(block, LAYERS.types(config)), norm(width)),
        scale=config.d_model**0.5,
        round_scale=True,
        softcap=config.logit_softcap,
        shrink_residuals=False,
    )


HF_LAYER = rotary.HF_LAYER | {
    "self_attention.output_norm": "post_attention_layernorm",
    "feedforward.norm": "pre_feedforward_layernorm",
    "feedforward.output_norm": "post_feedforward_layernorm",
}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    return rotary.hf_names(config, HF_LAYER)


def _to_hf(config: Config) -> dict[str, Any]:
    """Keys of `config.json` without an annotation; raises UserError for a cap of the scores."""
    if config.score_softcap is not None:
        raise UserError(
            f"score_softcap is {config.score_softcap}, which transformers does not apply in "
            "Gemma 3: its outputs would differ; supported: null"
        )
    return divided_sizes_to_hf(config) | LAYERS.write(config)


HF = HfConfig(
    model_type="gemma3_text",
    classes={"Gemma3ForCausalLM": {}, "Gemma3TextModel": {}},
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    defaults={"vocab_size": 262208, "d_model": 2304, "num_heads": 8, "num_kv_heads": 4}
    | {"d_ff": 9216, "max_length": 131072, "window": 4096},
    read=LAYERS.read,
    write=_to_hf,
)
_LAYERS_27B = 62  # llama.cpp recognizes the size, whose scores are scaled otherwise, by its layers
GGUF_LAYER = gguf.LAYER | {
    "self_attention.output_norm": "post_attention_norm",
    "feedforward.output_norm": "post_ffw_norm",
}


def _to_gguf(config: Config) -> gguf.Metadata:
    """Metadata of GGUF; raises UserError for a setting that llama.cpp does not support."""
    for key, supported in (("attention_bias", False), ("score_softcap", None)):
        if (value := getattr(config, key)) != supported:
            raise gguf.refuse("Gemma 3", key, value, supported)
    scaling = config.rope_scaling
    if scaling is not None and scaling.type not in ("linear", "ntk"):
        raise gguf.refuse("Gemma 3", "rope_scaling of type", scaling.type, "linear and ntk")
    cap = {} if config.logit_softcap is None else {"final_logit_softcapping": config.logit_softcap}
    return gguf.rotary_to_gguf(config, hidden_width(config), "geglu_tanh") | {
        "attention.sliding_window": config.window,
        # The period, since versions of llama.cpp ignore a list with one value per layer.
        "attention.sliding_window_pattern": config.global_every,
        "rope.freq_base_swa": config.local_rope_base,
        **cap,
    }


def _gguf_tensor(config: Config, name: str, tensor: Tensor) -> Tensor:
    """Norms are written as 1 + weight; those of queries with the ratio of the scales of scores."""
    if not name.endswith("norm.weight"):
        return tensor
    width = head_width(config)
    if config.num_layers == _LAYERS_27B:
        width = config.d_model // config.num_heads
    ratio = (width / config.query_scalar) ** 0.5 if name.endswith("attn_q_norm.weight") else 1.0
    return (1 + tensor) * ratio


GGUF = gguf.GgufConfig("gemma3", _to_gguf, _gguf_tensor)
GGUF_FORMAT = Format(GGUF, partial(gguf.rotary_names, layer=GGUF_LAYER))
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": GGUF_FORMAT}
ARCHITECTURE = Architecture("gemma3", Config, build, SIZES, FORMATS)
