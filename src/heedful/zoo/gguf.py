"""Metadata and tensor names of GGUF, the file format of llama.cpp."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.positions import (
    Layout,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RotaryPositions,
    YarnScaling,
)
from heedful.zoo.names import Name, Names, layer_names
from heedful.zoo.rotary import head_width, to_layout

Metadata = dict[str, Any]  # of int, float, bool, str, and lists of one of them

EMBEDDING, LAYER_PATH = Name("embedding.tokens", "token_embd"), "decoder.blocks.{i}"
HEAD = (Name("decoder.final_norm", "output_norm"), Name("head.out", "output"))
LAYER = {
    "self_attention.norm": "attn_norm",
    "self_attention.sublayer.qkv": "attn_{q,k,v}",
    "self_attention.sublayer.query_norm": "attn_q_norm",
    "self_attention.sublayer.key_norm": "attn_k_norm",
    "self_attention.sublayer.out": "attn_output",
    "feedforward.norm": "ffn_norm",
    "feedforward.sublayer.up": "ffn_{gate,up}",
    "feedforward.sublayer.down": "ffn_down",
}


@dataclass(frozen=True)
class GgufConfig:
    """Conversion of a Config to the metadata of a GGUF file.

    Args:
        architecture: name of the architecture in llama.cpp.
        write: keys of the metadata, without the architecture before them, from a Config. A
            `context_length` below the Config's `max_length` is the length up to which llama.cpp
            computes the same. Raises UserError for a setting that llama.cpp does not support.
        tensor: a tensor as it is written, from the Config, its name and the tensor of the net.
        more_tensors: further tensors, which the Config determines.
    """

    architecture: str
    write: Callable[[Any], Metadata]
    tensor: Callable[[Any, str, Tensor], Tensor] = lambda config, name, tensor: tensor
    more_tensors: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}


def refuse(architecture: str, setting: str, value: object, supported: object) -> UserError:
    """The error for a setting that llama.cpp does not support."""
    return UserError(
        f"llama.cpp does not support {setting} {value} for {architecture}, only {supported}; "
        "export another format (heedful export hf)"
    )


def sizes_to_gguf(config: Any) -> Metadata:
    """Sizes that all decoders have."""
    return {
        "block_count": config.num_layers,
        "context_length": config.max_length,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff or 4 * config.d_model,
        "attention.head_count": config.num_heads,
        "vocab_size": config.vocab_size,
    }


def rotary_to_gguf(config: Any, hidden: int, activation: str = "swiglu") -> Metadata:
    """Metadata of LLaMA and its descendants.

    Args:
        hidden: width of the feed-forward.
        activation: the only one that llama.cpp supports for the architecture.
    """
    if config.activation != activation:
        raise refuse("this architecture", "the activation", config.activation, activation)
    return {
        **sizes_to_gguf(config),
        "feed_forward_length": hidden,
        "attention.head_count_kv": config.num_kv_heads or config.num_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": head_width(config),
        "attention.value_length": head_width(config),
        "rope.dimension_count": head_width(config),
        **_rope_to_gguf(config),
    }


def _rope_to_gguf(config: Any) -> Metadata:
    """Base and scaling of the rotary positions."""
    scaling, base = config.rope_scaling, {"rope.freq_base": config.rope_base}
    if isinstance(scaling, NtkScaling):
        return {"rope.freq_base": scaling.scaled_base(config.rope_base, head_width(config))}
    if scaling is None or isinstance(scaling, Llama3Scaling):
        return base  # for Llama3Scaling see `rope_factors`
    base |= {"rope.scaling.type": scaling.type, "rope.scaling.factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return base
    assert isinstance(scaling, YarnScaling)
    if not scaling.truncate:
        raise refuse("YaRN", "truncate", False, True)
    own = rotary_factor(scaling, config)
    default = rotary_factor(YarnScaling(scaling.factor, scaling.original_length), config)
    return base | {
        "rope.scaling.original_context_length": scaling.original_length,
        "rope.scaling.attn_factor": own / default,
        "rope.scaling.yarn_beta_fast": scaling.fast,
        "rope.scaling.yarn_beta_slow": scaling.slow,
    }


def rotary_factor(scaling: YarnScaling, config: Any) -> float:
    """The factor of cosines and sines."""
    return RotaryPositions(head_width(config), config.rope_base, scaling=scaling).factor


def rope_factors(config: Any) -> dict[str, Tensor]:
    """`rope_freqs`: divisors of the frequencies, for the scaling of Llama 3."""
    if not isinstance(config.rope_scaling, Llama3Scaling):
        return {}
    plain = RotaryPositions(head_width(config), config.rope_base)
    scaled = RotaryPositions(head_width(config), config.rope_base, scaling=config.rope_scaling)
    return {"rope_freqs.weight": plain.table / scaled.table}


def rotary_names(config: Any, layer: Mapping[str, str] = LAYER) -> Names:
    """Tensor names of LLaMA and its descendants."""
    return Names([EMBEDDING, *layer_names(LAYER_PATH, "blk.{i}", layer), *HEAD])


def in_layout(name: str, layout: Layout) -> Callable[[Any, nn.Module], tuple[str, Any, nn.Module]]:
    """`Format.export_as` for an architecture whose rotary positions have this layout there."""

    def convert(config: Any, net: Any) -> tuple[str, Any, nn.Module]:
        net, config = to_layout(net, config, layout)
        return name, config, net

    return convert
