"""Rotary positions of a Config and its layers, and what the Hugging Face format says of them."""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.attention import Attention
from heedful.parts.rotary import NtkScaling, RotaryPositions

AnyConfig = TypeVar("AnyConfig")
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # layers, as they are called there


def head_width(config: Any) -> int:
    """E: `head_dim`, or what the heads leave each other of `d_model`."""
    width: int = getattr(config, "head_dim", None) or config.d_model // config.num_heads
    return width


def rotary_module(config: Any) -> RotaryPositions:
    """That all layers share, of a Config with `rope_base`, `rope_layout` and `rope_scaling`."""
    scheme = (config.rope_base, config.rope_layout, config.rope_scaling)
    return RotaryPositions(head_width(config), *scheme)


# For each of their types their keys and ours. What is not here is refused.
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
# Beside the table: the base, the type's names, whether all of a head is turned, how YaRN's
# attention factor follows from two others, and a remark of the first YaRN models.
_BESIDE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_BESIDE_YARN = {"mscale", "mscale_all_dim", "finetuned"}


def rope_from_hf(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Our rope keys from `config.json` of a model; raises UserError for what we do not build.

    Old files have the base and `rope_scaling`, those of transformers 5 `rope_parameters`, which
    holds the base too.

    Args:
        ours: what is known of our config: `max_length`, and the base of an old file.
    """
    max_length = ours["max_length"]
    place = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    inner = given.get(place) or {}
    base = inner.get("rope_theta", ours["rope_base"])
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in HF_SCALINGS:
        reason = f"known here: {', '.join(HF_SCALINGS)}"
        if kind in _BY_LENGTH:
            reason = "it changes with the text's length, so that keys in a cache no longer fit"
        raise UserError(f"config.json: the rope_type of {place} is {kind!r}; {reason}")
    table = HF_SCALINGS[kind]
    for key in inner:
        if key not in table.keys() | _BESIDE | (_BESIDE_YARN if kind == "yarn" else set()):
            raise UserError(f"config.json: {key} of {place} is not known here for {kind}")
    for partial in (inner.get("partial_rotary_factor"), given.get("partial_rotary_factor")):
        if partial not in (None, 1):
            raise UserError(
                f"config.json: partial_rotary_factor is {partial}, but here all of a head is turned"
            )
    if kind == "default":
        return {"rope_base": base, "rope_scaling": None}
    said = {key: inner[key] for key in table if inner.get(key) is not None}
    if _ORIGINAL in table:
        # In this order: it once stood beside the scaling, and is left out where nothing changed.
        said[_ORIGINAL] = given.get(_ORIGINAL) or said.get(_ORIGINAL) or max_length
    if kind == "yarn":
        said |= _yarn_from_hf(inner, said, max_length)
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key in table and key not in said:
            raise UserError(f"config.json: {place} of type {kind} lacks {key}")
    keys = {table[key]: value for key, value in said.items()}
    return {"rope_base": base, "rope_scaling": {"type": kind, **keys}}


def _yarn_from_hf(
    inner: Mapping[str, Any], said: Mapping[str, Any], max_length: int
) -> dict[str, Any]:
    """What YaRN's keys follow from where they are left out."""
    factor = said.get("factor") or max_length / said[_ORIGINAL]
    over, under = inner.get("mscale"), inner.get("mscale_all_dim")
    if "attention_factor" in said or not (over and under):
        return {"factor": factor}
    grown = math.log(factor) if factor > 1 else 0.0
    return {
        "factor": factor,
        "attention_factor": (0.1 * over * grown + 1) / (0.1 * under * grown + 1),
    }


def rope_to_hf(config: Any) -> dict[str, Any]:
    """What `config.json` says of our rope keys, in the old style, which all versions read.

    There is no NTK over there, but it is no more than a larger base.
    """
    scaling = config.rope_scaling
    if isinstance(scaling, NtkScaling):
        base = scaling.scaled_base(config.rope_base, head_width(config))
        return {"rope_theta": base, "rope_scaling": None}
    if scaling is None:
        return {"rope_scaling": None}
    ours, table = asdict(scaling), HF_SCALINGS[scaling.type]
    said = {key: ours[name] for key, name in table.items() if ours[name] is not None}
    return {"rope_scaling": {"rope_type": scaling.type, **said}}


@dataclass(frozen=True)
class LocalLayers:
    """Layers of which every k-th, k being the Config's `global_every`, sees the whole text.

    Args:
        counted_from: the number of the first layer, 0 or 1; the multiples of k are global.
    """

    counted_from: int

    def types(self, config: Any) -> list[str]:
        """`GLOBAL` or `LOCAL` for each layer."""
        return self._types(config.global_every, config.num_layers)

    def read(self, content: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """Our `global_every`, `rope_base`, `rope_scaling` and `local_rope_base`.

        Raises UserError for layers without such a rule, and as `rope_from_hf`; old files have bases
        and `rope_scaling`, those of transformers 5 `rope_parameters` for each type of layers.
        """
        given = content.get("rope_parameters") or {}
        if unknown := given.keys() - {GLOBAL, LOCAL}:
            raise UserError(
                f"config.json: {min(unknown)} of rope_parameters is not known here; it holds those "
                f"of {GLOBAL} and {LOCAL}"
            )
        far = rope_from_hf({**content, "rope_parameters": given.get(GLOBAL)}, ours)
        local = {**content, "rope_parameters": given.get(LOCAL), "rope_scaling": None}
        near = rope_from_hf(local, {**ours, "rope_base": ours["local_rope_base"]})
        if near["rope_scaling"] is not None:
            raise UserError(
                f"config.json: rope_type of {LOCAL} is {near['rope_scaling']['type']}, but here "
                "only the positions of global layers are stretched"
            )
        every, types = ours["global_every"], content.get("layer_types")
        if types is not None:
            known = (every, *range(1, len(types) + 2))
            every = next((k for k in known if [*types] == self._types(k, len(types))), None)
            if every is None:
                raise UserError(
                    f"config.json: layer_types is {', '.join(types)}, but here every k-th layer is "
                    f"{GLOBAL} and the others are {LOCAL}"
                )
        return {"global_every": every, "local_rope_base": near["rope_base"], **far}

    def write(self, config: Any) -> dict[str, Any]:
        """Their key of the type of each layer."""
        return {"layer_types": self.types(config)}

    def _types(self, every: int, count: int) -> list[str]:
        numbers = range(self.counted_from, self.counted_from + count)
        return [LOCAL if number % every else GLOBAL for number in numbers]


@torch.no_grad()
def to_half_layout(net: DecoderOnly, config: AnyConfig) -> tuple[DecoderOnly, AnyConfig]:
    """A copy whose rotary layout is half, and its Config; what is half already comes back itself.

    The rows of each head's query and key change places: dimensions 2i and 2i + 1, which the
    interleaved layout pairs, become i and i + E/2. Scores, and so logits, stay what they were.
    Works for every net with `rope_layout` in its Config.
    """
    if config.rope_layout == "half":  # type: ignore[attr-defined]
        return net, config
    net, config = copy.deepcopy(net), replace(config, rope_layout="half")  # type: ignore[type-var]
    position = rotary_module(config)
    for block in net.decoder.blocks:
        attention = block.self_attention.sublayer  # type: ignore[union-attr]
        assert isinstance(attention, Attention)
        attention.position = position
        joint = [p for p in (attention.qkv.weight, attention.qkv.bias) if p is not None]
        parts = [part for p in joint for part in p.split(attention.split_sizes)[:2]]
        norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
        for part in [*parts, *(norm.get_parameter("weight") for norm in norms)]:
            heads = part.unflatten(0, (-1, attention.head_dim // 2, 2))
            part.copy_(heads.transpose(1, 2).flatten(0, 2))  # the even rows, then the odd ones
    return net, config
