"""Shared by LLaMA and its descendants: Config, block, and Hugging Face keys and names."""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.errors import UserError
from heedful.parts.feedforward import Gate
from heedful.parts.positions import Layout, RopeScaling
from heedful.parts.residual import PreNorm
from heedful.zoo.build import AttentionSpec, BlockSpec, FeedForwardSpec
from heedful.zoo.hf import GATES, Hf
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Name, Names, layer_names
from heedful.zoo.rope import head_width, rope_from_hf, rope_to_hf, rotary_module


@model_config
class Base:
    """Sizes and choices of LLaMA and its descendants; the defaults are LLaMA 7B.

    Args:
        num_kv_heads: heads of keys and values; None: num_heads.
        head_dim: width of a head; None: d_model / num_heads.
        d_ff: width of the hidden units; None: 8/3 · d_model (sec. 2.2), rounded up to a multiple of
            256 as in the authors' code.
        max_length: longest text, in tokens.
        dropout: on embeddings and on outputs of sub-layers.
        attention_dropout: on the attention weights.
        activation: gate of the feed-forward.
        rope_base: base of the rotary frequencies.
        rope_layout: half, as in the Hugging Face format, or interleaved, as in the authors' files.
        rope_scaling: scaling of the rotary positions for longer texts: `type` (linear, ntk, yarn,
            llama3) and the arguments of that class in `parts/positions.py`; None: no scaling.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 32000
    d_model: Annotated[int, Hf("hidden_size")] = 4096
    num_heads: Annotated[int, Hf("num_attention_heads")] = 32
    num_kv_heads: Annotated[int | None, Hf("num_key_value_heads")] = None
    head_dim: Annotated[int | None, Hf("head_dim")] = None
    num_layers: Annotated[int, Hf("num_hidden_layers")] = 32
    d_ff: Annotated[int | None, Hf("intermediate_size")] = None
    max_length: Annotated[int, Hf("max_position_embeddings")] = 2048
    dropout: float = 0.0
    attention_dropout: Annotated[float, Hf("attention_dropout")] = 0.0
    activation: Annotated[Gate, Hf("hidden_act", values=GATES)] = "swiglu"
    norm_eps: Annotated[float, Hf("rms_norm_eps")] = 1e-6
    rope_base: Annotated[float, Hf("rope_theta")] = 10000.0
    rope_layout: Layout = "half"
    rope_scaling: RopeScaling = None
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = False


def rotary_block(
    config: Base, *, attention_bias: bool = False, mlp_bias: bool = False
) -> BlockSpec:
    """LLaMA's block: RMSNorm before the sub-layers, rotary positions, a gated feed-forward."""
    return BlockSpec(
        PreNorm,
        partial(nn.RMSNorm, eps=config.norm_eps),
        AttentionSpec(
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            position=rotary_module(config),
            dropout=config.attention_dropout,
            bias=attention_bias,
            out_bias=attention_bias,
        ),
        FeedForwardSpec(hidden_width(config), config.activation, bias=mlp_bias),
        dropout=config.dropout,
    )


def hidden_width(config: Base) -> int:
    """`d_ff`, or its default by the authors' rule."""
    return config.d_ff or -(-(8 * config.d_model // 3) // 256) * 256


def read_rotary(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Rotary keys from `config.json`; raises UserError unless all layers are of one type."""
    kind = "sliding_attention" if keys.get("window") else "full_attention"
    if other := set(content.get("layer_types") or ()) - {kind}:
        raise UserError(f"config.json: layer_types has {min(other)}, but all layers must be {kind}")
    return rope_from_hf(content, keys)


def sizes_to_hf(config: Base) -> dict[str, Any]:
    """Keys of `config.json` for sizes with a default rule, and for rotary positions."""
    return {
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": head_width(config),
        "intermediate_size": hidden_width(config),
        **rope_to_hf(config),
    }


def divided_sizes_to_hf(config: Base) -> dict[str, Any]:
    """`sizes_to_hf` for formats in which num_heads must divide d_model; raises UserError."""
    if config.d_model % config.num_heads:
        raise UserError(
            f"d_model {config.d_model} is not divisible by num_heads {config.num_heads}, which "
            "the Hugging Face format of this architecture requires even if head_dim is given"
        )
    return sizes_to_hf(config)


HF_LAYER = {
    "self_attention.norm": "input_layernorm",
    "self_attention.sublayer.qkv": "self_attn.{q,k,v}_proj",
    "self_attention.sublayer.query_norm": "self_attn.q_norm",
    "self_attention.sublayer.key_norm": "self_attn.k_norm",
    "self_attention.sublayer.out": "self_attn.o_proj",
    "feedforward.norm": "post_attention_layernorm",
    "feedforward.sublayer.up": "mlp.{gate,up}_proj",
    "feedforward.sublayer.down": "mlp.down_proj",
}


def hf_names(config: Base, layer: dict[str, str] = HF_LAYER) -> Names:
    """Hugging Face tensor names; raises UserError for the interleaved layout."""
    if config.rope_layout != "half":
        raise UserError(
            f"the Hugging Face format has no rope_layout {config.rope_layout}; convert the net by "
            "heedful.zoo.rope.to_layout(net, config, 'half')"
        )
    return Names(
        [
            Name("embedding.tokens", "model.embed_tokens"),
            *layer_names("decoder.blocks.{i}", "model.layers.{i}", layer),
            Name("decoder.final_norm", "model.norm"),
            Name("head.out", "lm_head"),
        ],
        prefix="model.",
        buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    )
