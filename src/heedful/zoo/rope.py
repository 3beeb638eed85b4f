"""Rotary positions from a Config, and their keys in the Hugging Face format."""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.attention import Attention
from heedful.parts.positions import Layout, NtkScaling, RotaryPositions

AnyConfig = TypeVar("AnyConfig")
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of layers in `config.json`


def head_width(config: Any) -> int:
    """E: `head_dim`, or d_model / num_heads."""
    width: int = getattr(config, "head_dim", None) or config.d_model // config.num_heads
    return width


def rotary_module(config: Any) -> RotaryPositions:
    """The rotary module that all layers share, from `rope_base`, `rope_layout`, `rope_scaling`."""
    scheme = (config.rope_base, config.rope_layout, config.rope_scaling)
    return RotaryPositions(head_width(config), *scheme)


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
    for partial in (inner.get("partial_rotary_factor"), content.get("partial_rotary_factor")):
        if partial not in (None, 1):
            raise UserError(
                f"config.json: partial_rotary_factor is {partial}, but heedful rotates all "
                "dimensions of a head"
            )
    if kind == "default":
        return {"rope_base": base, "rope_scaling": None}
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
    return {"rope_base": base, "rope_scaling": {"type": kind, **scaling}}


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
        base = scaling.scaled_base(config.rope_base, head_width(config))
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
        pairs = (attention.head_dim // 2, 2) if layout == "half" else (2, attention.head_dim // 2)
        for part in [*parts, *(norm.get_parameter("weight") for norm in norms)]:
            # To `half`: the even rows of a head, then the odd ones; and back.
            part.copy_(part.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2))
    return net, config
