"""Gemma 3 in GGUF: its metadata, and its norms as llama.cpp multiplies by them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from heedful.zoo.gguf import LAYER, Metadata, refuse, rotary_to_gguf
from heedful.zoo.rotary import GLOBAL, head_width, hidden_width

_LAYERS_27B = 62  # llama.cpp recognizes the size, whose scores are scaled otherwise, by its layers
GEMMA3_LAYER = LAYER | {
    "self_attention.output_norm": "post_attention_norm",
    "feedforward.output_norm": "post_ffw_norm",
}


def gemma3_to_gguf(config: Any, layer_types: Sequence[str]) -> Metadata:
    """Metadata of GGUF; raises UserError for a setting that llama.cpp does not support."""
    for key, supported in (("attention_bias", False), ("score_softcap", None)):
        if (value := getattr(config, key)) != supported:
            raise refuse("Gemma 3", key, value, supported)
    scaling = config.rope_scaling
    if scaling is not None and scaling.type not in ("linear", "ntk"):
        raise refuse("Gemma 3", "rope_scaling of type", scaling.type, "linear and ntk")
    cap = {} if config.logit_softcap is None else {"final_logit_softcapping": config.logit_softcap}
    return rotary_to_gguf(config, hidden_width(config), "geglu_tanh") | {
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": [kind != GLOBAL for kind in layer_types],
        "rope.freq_base_swa": config.local_rope_base,
        **cap,
    }


def gemma3_tensor(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Norms are written as 1 + weight; those of queries with the ratio of the scales of scores."""
    if not name.endswith("norm.weight"):
        return tensor
    width = head_width(config)
    if config.num_layers == _LAYERS_27B:
        width = config.d_model // config.num_heads
    ratio = (width / config.query_scalar) ** 0.5 if name.endswith("attn_q_norm.weight") else 1.0
    return (1 + tensor) * ratio
