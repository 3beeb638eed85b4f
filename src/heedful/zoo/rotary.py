"""Shared by models with rotary positions: LLaMA's blocks, and their Hugging Face format."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.feedforward import FeedForward, Gate
from heedful.parts.positions import Layout, NtkScaling, RopeScaling, RotaryPositions
from heedful.parts.residual import PreNorm
from heedful.zoo.architectures import model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import GATES, Hf
from heedful.zoo.names import Name, Names, layer_names

AnyConfig = TypeVar("AnyConfig")
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of layers in `config.json`


@model_config
class Base:
    """Sizes and choices of LLaMA and its descendants; the defaults are LLaMA 7B.

    Args:
        num_kv_heads: heads of keys and values; None: num_heads.
        head_dim: width of a head; None: d_model / num_heads.
        d_ff: width of the hidden units; None: 8/3 · d_model (sec. 2.2), rounded up to a multiple of
            256 as in the authors' code.
        max_length: longest text, in tokens.
        activation: gate of the feed-forward.
        rope_base: base of the rotary frequencies.
        rope_layout: pairing of dimensions: half, as in the Hugging Face format, or interleaved, as
            in the authors' files.
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


def rotary_decoder(config: Base, block: Callable[[], Block]) -> DecoderOnly:
    """The net of LLaMA and its descendants: blocks of one kind, and a final RMSNorm."""
    norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return decoder_only(config, Stack((block() for _ in range(config.num_layers)), norm))


def rotary_block(config: Base, attention: Attention, feedforward: nn.Module) -> Block:
    """LLaMA's block: RMSNorm before both sub-layers."""
    norm = partial(nn.RMSNorm, config.d_model, eps=config.norm_eps)
    residual = partial(PreNorm, dropout=config.dropout)
    return Block(residual(attention, norm()), None, residual(feedforward, norm()))


def rotary_attention(
    config: Base,
    position: RotaryPositions,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    **options: Any,
) -> Attention:
    """Self-attention with the heads of a Config.

    Args:
        bias: of all matrices.
        out_bias: of the last one; None: as of the others.
        options: further ones of `Attention`.
    """
    return Attention(
        config.d_model,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        position=position,
        dropout=config.attention_dropout,
        bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        **options,
    )


def gated_feedforward(config: Base, *, bias: bool = False) -> FeedForward:
    """The feed-forward network of a Config."""
    return FeedForward(config.d_model, hidden_width(config), config.activation, bias=bias)


def hidden_width(config: Base) -> int:
    """`d_ff`, or its default by the authors' rule."""
    return config.d_ff or -(-(8 * config.d_model // 3) // 256) * 256


def head_width(config: Any) -> int:
    """E: `head_dim`, or d_model / num_heads."""
    width: int = getattr(config, "head_dim", None) or config.d_model // config.num_heads
    return width


def rotated_width(config: Any) -> int:
    """The dimensions of a head that are rotated: all, or the share `rope_fraction`."""
    return int(head_width(config) * getattr(config, "rope_fraction", 1.0))


def rotary_module(config: Any) -> RotaryPositions:
    """The rotary module that all layers share, from `rope_base`, `rope_layout`, `rope_scaling`."""
    scheme = (config.rope_base, config.rope_layout, config.rope_scaling)
    return RotaryPositions(rotated_width(config), *scheme)


# --- The Hugging Face format --------------------------------------------------------------------


# Supported types of `rope_scaling`: Hugging Face key -> argument of our class.
HF_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_slow": "slow",
        "beta_fast": "fast",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_BY_LENGTH = ("dynamic", "longrope")
_ORIGINAL = "original_max_position_embeddings"
# Further known keys: the base, names of the type, the rotated fraction of a head; for YaRN two keys
# that determine the attention factor, and one that the first YaRN models have.
_OTHER_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_OTHER_YARN_KEYS = {"mscale", "mscale_all_dim", "finetuned"}
# Entries that transformers before 5.19 writes beside the types of layers, where they mean nothing.
_WITHOUT_EFFECT = (("rope_theta", None), ("rope_type", "default"))


def rope_from_hf(content: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_base` and `rope_scaling` from `config.json`; raises UserError if it is unsupported.

    Old files have `rope_theta` and `rope_scaling`, those of transformers 5 `rope_parameters`, which
    includes the base.

    Args:
        content: of `config.json`.
        keys: keys of the Config read so far: `max_length`, and `rope_base` from an old file.
    """
    max_length = keys["max_length"]
    section = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    inner = content.get(section) or {}
    base = inner.get("rope_theta", keys["rope_base"])
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in HF_SCALINGS:
        reason = f"supported: {', '.join(HF_SCALINGS)}"
        if kind in _BY_LENGTH:
            reason = "it depends on the length of the text, which a cache of keys does not support"
        raise UserError(f"config.json: the rope_type of {section} is {kind!r}; {reason}")
    table = HF_SCALINGS[kind]
    for key in inner:
        if key not in table.keys() | _OTHER_KEYS | (_OTHER_YARN_KEYS if kind == "yarn" else set()):
            raise UserError(f"config.json: {key} of {section} is not supported for {kind}")
    fractions = [part.get("partial_rotary_factor") for part in (inner, content)]
    fraction = next((value for value in fractions if value is not None), None)
    if fraction not in (None, 1) and "rope_fraction" not in keys:
        raise UserError(
            f"config.json: partial_rotary_factor is {fraction}, but a {content.get('model_type')} "
            "rotates all dimensions of a head"
        )
    more = {} if fraction is None or "rope_fraction" not in keys else {"rope_fraction": fraction}
    if kind == "default":
        return {"rope_base": base, "rope_scaling": None, **more}
    values = {key: inner[key] for key in table if inner.get(key) is not None}
    if _ORIGINAL in table:
        # Older files have it outside of the section; without it the length did not change.
        values[_ORIGINAL] = content.get(_ORIGINAL) or values.get(_ORIGINAL) or max_length
    if kind == "yarn":
        values |= _yarn_from_hf(inner, values, max_length)
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key in table and key not in values:
            raise UserError(f"config.json: {section} of type {kind} lacks {key}")
    scaling = {table[key]: value for key, value in values.items()}
    return {"rope_base": base, "rope_scaling": {"type": kind, **scaling}, **more}


def _yarn_from_hf(
    inner: Mapping[str, Any], values: Mapping[str, Any], max_length: int
) -> dict[str, Any]:
    """Keys of YaRN that a file may lack, computed from others."""
    factor = values.get("factor") or max_length / values[_ORIGINAL]
    mscale, mscale_all_dim = inner.get("mscale"), inner.get("mscale_all_dim")
    if "attention_factor" in values or not (mscale and mscale_all_dim):
        return {"factor": factor}
    log_factor = math.log(factor) if factor > 1 else 0.0
    ratio = (0.1 * mscale * log_factor + 1) / (0.1 * mscale_all_dim * log_factor + 1)
    return {"factor": factor, "attention_factor": ratio}


def rope_to_hf(config: Any) -> dict[str, Any]:
    """Keys of `config.json` for rotary positions, in the old style, which all versions read.

    The format has no NTK scaling; it is written as the equivalent larger base.
    """
    scaling = config.rope_scaling
    if isinstance(scaling, NtkScaling):
        base = scaling.scaled_base(config.rope_base, rotated_width(config))
        return {"rope_theta": base, "rope_scaling": None}
    if scaling is None:
        return {"rope_scaling": None}
    arguments, table = asdict(scaling), HF_SCALINGS[scaling.type]
    values = {key: arguments[name] for key, name in table.items() if arguments[name] is not None}
    return {"rope_scaling": {"rope_type": scaling.type, **values}}


@dataclass(frozen=True)
class LocalLayers:
    """Layers with a window, except for every k-th (`global_every` of the Config).

    Args:
        counted_from: number of the first layer, 0 or 1; multiples of k are global.
    """

    counted_from: int

    def types(self, config: Any) -> list[str]:
        """`GLOBAL` or `LOCAL` for each layer."""
        return self._types(config.global_every, config.num_layers)

    def read(self, content: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
        """`global_every`, `rope_base`, `rope_scaling` and `local_rope_base` from `config.json`.

        Old files have bases and `rope_scaling`, those of transformers 5 `rope_parameters` for each
        type of layers.

        Raises:
            UserError: layers that do not follow such a rule, and as `rope_from_hf`.
        """
        parameters = (content.get("rope_parameters") or {}).items()
        sections = {key: value for key, value in parameters if (key, value) not in _WITHOUT_EFFECT}
        if unknown := sections.keys() - {GLOBAL, LOCAL}:
            raise UserError(
                f"config.json: {min(unknown)} of rope_parameters is not supported; it may hold "
                f"{GLOBAL} and {LOCAL}"
            )
        global_rope = rope_from_hf({**content, "rope_parameters": sections.get(GLOBAL)}, keys)
        local = {**content, "rope_parameters": sections.get(LOCAL), "rope_scaling": None}
        local_rope = rope_from_hf(local, {**keys, "rope_base": keys["local_rope_base"]})
        if local_rope["rope_scaling"] is not None:
            raise UserError(
                f"config.json: rope_type of {LOCAL} is {local_rope['rope_scaling']['type']}, but "
                "only global layers may scale their positions"
            )
        every, types = keys["global_every"], content.get("layer_types")
        if types is not None:
            known = (every, *range(1, len(types) + 2))
            every = next((k for k in known if [*types] == self._types(k, len(types))), None)
            if every is None:
                raise UserError(
                    f"config.json: layer_types is {', '.join(types)}, but every k-th layer must be "
                    f"{GLOBAL} and the others {LOCAL}"
                )
        return {"global_every": every, "local_rope_base": local_rope["rope_base"], **global_rope}

    def write(self, config: Any) -> dict[str, Any]:
        """The key of `config.json` for the types of the layers."""
        return {"layer_types": self.types(config)}

    def _types(self, every: int, count: int) -> list[str]:
        numbers = range(self.counted_from, self.counted_from + count)
        return [LOCAL if number % every else GLOBAL for number in numbers]


def read_rotary(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Rotary keys from `config.json`; raises UserError unless all layers are of one type."""
    kind = "sliding_attention" if keys.get("window") else "full_attention"
    if other := set(content.get("layer_types") or ()) - {kind}:
        raise UserError(f"config.json: layer_types has {min(other)}, but all layers must be {kind}")
    return rope_from_hf(content, keys)


def implied_head_dim(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`head_dim` for formats without it, in whose files it is written nevertheless."""
    is_implied = keys["head_dim"] == keys["d_model"] / keys["num_heads"]
    return {"head_dim": None} if is_implied else {}


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
            "heedful.zoo.rotary.to_layout(net, config, 'half')"
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


@torch.no_grad()
def to_layout(net: DecoderOnly, config: AnyConfig, layout: Layout) -> tuple[DecoderOnly, AnyConfig]:
    """A copy of a net with another rotary layout, and its Config; logits do not change.

    The query and key rows of each head are permuted: dimensions 2i and 2i + 1, which the layout
    `interleaved` pairs, are i and i + E/2 in the layout `half`. A net that has the layout is
    returned as it is. Works for every net with `rope_layout` in its Config.
    """
    if config.rope_layout == layout:  # type: ignore[attr-defined]
        return net, config
    net, config = copy.deepcopy(net), replace(config, rope_layout=layout)  # type: ignore[type-var]
    position = rotary_module(config)
    for block in net.decoder.blocks:
        attention = block.self_attention.sublayer  # type: ignore[union-attr]
        assert isinstance(attention, Attention)
        attention.position = position
        joint = [p for p in (attention.qkv.weight, attention.qkv.bias) if p is not None]
        parts = [part for p in joint for part in p.split(attention.split_sizes)[:2]]
        norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
        half = rotated_width(config) // 2
        pairs = (half, 2) if layout == "half" else (2, half)
        for part in [*parts, *(norm.get_parameter("weight") for norm in norms)]:
            # To `half`: the even rows of a head, then the odd ones; and back.
            heads = part.unflatten(0, (-1, attention.head_dim))
            rotated = heads[:, : 2 * half]
            rotated.copy_(rotated.unflatten(1, pairs).transpose(1, 2).flatten(1, 2))
    return net, config
