"""Qwen2 (Yang et al. 2024, "Qwen2 Technical Report") and Qwen2.5, the dense models.

| size | layers | d_model | heads | k/v heads | d_ff  | tied | parameters |
|------|--------|---------|-------|-----------|-------|------|------------|
| 0.5b | 24     | 896     | 14    | 2         | 4864  | yes  | 494M       |
| 1.5b | 28     | 1536    | 12    | 2         | 8960  | yes  | 1.54B      |
| 7b   | 28     | 3584    | 28    | 4         | 18944 | no   | 7.62B      |
| 72b  | 80     | 8192    | 64    | 8         | 29568 | no   | 72.7B      |

LLaMA with grouped-query attention and a bias of queries, keys and values (sec. 2.2.1); the norms of
Qwen3 are not there. Layers from a number on can have a sliding window.
"""

from typing import Any

from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import HfConfig
from heedful.zoo.rotary import (
    GLOBAL,
    LOCAL,
    Base,
    gated_feedforward,
    hf_names,
    implied_head_dim,
    rope_from_hf,
    rotary_attention,
    rotary_block,
    rotary_module,
    sizes_to_hf,
)


@model_config
class Config(Base):
    """Keys as in LLaMA with the values of the report; the defaults are 0.5B.

    Args:
        window: number of keys that a query of a local layer attends to, itself included; None: no
            layer is local.
        window_from: number of the first local layer, counted from 1.
    """

    vocab_size: int = 151936
    d_model: int = 896
    num_heads: int = 14
    num_kv_heads: int | None = 2
    num_layers: int = 24
    d_ff: int | None = 4864
    max_length: int = 32768
    rope_base: float = 1000000.0
    window: int | None = None
    window_from: int = 29
    tie_embeddings: bool = True


def _size(num_layers: int, d_model: int, heads: tuple[int, int], d_ff: int) -> dict[str, Any]:
    num_heads, num_kv_heads = heads
    sizes = {"num_layers": num_layers, "d_model": d_model, "d_ff": d_ff}
    return {**sizes, "num_heads": num_heads, "num_kv_heads": num_kv_heads}


SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {},
    "1.5b": _size(28, 1536, (12, 2), 8960),
    "7b": _size(28, 3584, (28, 4), 18944) | {"vocab_size": 152064, "tie_embeddings": False},
    "72b": _size(80, 8192, (64, 8), 29568) | {"vocab_size": 152064, "tie_embeddings": False},
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in `llama.build`."""
    position = rotary_module(config)

    def block(kind: str) -> Block:
        window = config.window if kind == LOCAL else None
        attention = rotary_attention(config, position, bias=True, out_bias=False, window=window)
        return rotary_block(config, attention, gated_feedforward(config))

    norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return decoder_only(config, Stack(map(block, _types(config)), norm))


def _types(config: Config) -> list[str]:
    """`GLOBAL` or `LOCAL` for each layer."""
    first = config.num_layers if config.window is None else config.window_from - 1
    return [GLOBAL if index < first else LOCAL for index in range(config.num_layers)]


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Window, its first layer, and rotary keys; raises UserError for another order of layers."""
    window = content.get("sliding_window", 4096) if content.get("use_sliding_window") else None
    types = content.get("layer_types") or []
    first = types.index(LOCAL) if LOCAL in types else len(types)
    if not types:
        first = content.get("max_window_layers", 28)
    ordered = [GLOBAL if index < first else LOCAL for index in range(len(types))]
    if types and ([*types] != ordered or (window is None and LOCAL in types)):
        raise UserError(
            f"config.json: layer_types is {', '.join(types)}, but layers with a window must follow "
            "all others, and need use_sliding_window"
        )
    more: dict[str, Any] = {} if window is None else {"window_from": first + 1}
    more |= implied_head_dim(keys)
    return {"window": window, **more, **rope_from_hf(content, keys)}


def _write(config: Config) -> dict[str, Any]:
    types = _types(config)
    return {
        **sizes_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.window_from - 1,
        "layer_types": types,
    }


HF = HfConfig(
    model_type="qwen2",
    classes={"Qwen2ForCausalLM": {}, "Qwen2Model": {}},
    defaults={"d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "num_layers": 32}
    | {"d_ff": 22016, "rope_base": 10000.0, "tie_embeddings": False},
    read=_read,
    write=_write,
)
ARCHITECTURE = Architecture("qwen2", Config, build, SIZES, {"hf": Format(HF, hf_names)})
