"""Mistral 7B (Jiang et al. 2023).

| 7B   | layers | d_model | heads | k/v heads | head_dim | d_ff  | window | rope base | parameters |
|------|--------|---------|-------|-----------|----------|-------|--------|-----------|------------|
| v0.1 | 32     | 4096    | 32    | 8         | 128      | 14336 | 4096   | 10,000    | 7.24B      |
| v0.2 | 32     | 4096    | 32    | 8         | 128      | 14336 | none   | 1,000,000 | 7.24B      |
| v0.3 | 32     | 4096    | 32    | 8         | 128      | 14336 | none   | 1,000,000 | 7.25B      |

LLaMA with grouped key heads and a sliding window: a query of any layer sees the last W keys, its
own counted, and through L layers W · L tokens back (sec. 2). The length is that of the released
configuration; the window alone does not limit it.
"""

from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.feedforward import Gate
from heedful.parts.rotary import Layout
from heedful.zoo import llama
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Names
from heedful.zoo.rope import RopeScaling, check_rope, rope_from_hf


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are version 0.1.

    Args:
        num_kv_heads: heads of keys and values; None: num_heads.
        head_dim: width of a head; None: d_model / num_heads.
        d_ff: width of the hidden units; None: 8/3 · d_model, rounded up to a multiple of 256.
        max_length: longest text that we accept, in tokens.
        window: keys that a query sees, its own counted; None: all before it.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout: on the attention weights.
        activation: the gate of the feed-forward.
        rope_base, rope_layout, rope_scaling: as in `llama.Config`.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: int = 32000
    d_model: int = 4096
    num_heads: int = 32
    num_kv_heads: int | None = 8
    head_dim: int | None = 128
    num_layers: int = 32
    d_ff: int | None = 14336
    max_length: int = 32768
    window: int | None = 4096
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Gate = "swiglu"
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_layout: Layout = "half"
    rope_scaling: RopeScaling = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        check_rope(self)


SIZES: dict[str, dict[str, Any]] = {
    "7b": {},
    "7b-v0.2": {"window": None, "rope_base": 1000000.0},
    "7b-v0.3": {"vocab_size": 32768, "window": None, "rope_base": 1000000.0},
}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn as `llama.build` draws them."""
    return llama.build(_llama(config), window=config.window)


def _llama(config: Config) -> llama.Config:
    """The same model but for its window."""
    return llama.Config(**{key: value for key, value in asdict(config).items() if key != "window"})


def _read(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("layer_types"):
        raise UserError(
            "config.json: layer_types is set, but all layers of heedful's mistral are alike; "
            "sliding_window says of which kind"
        )
    return rope_from_hf(given)


HF = HfFormat(
    model_type="mistral",
    classes={"MistralForCausalLM": {}, "MistralModel": {}},
    keys={**llama.HF_KEYS, "sliding_window": "window"},
    values={"hidden_act": ("activation", llama.HF_GATES)},
    defaults={
        **llama.HF_DEFAULTS,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    read=_read,
    write=llama.sizes_to_hf,
)


def hf_names(config: Config) -> Names:
    """LLaMA's names."""
    return llama.hf_names(_llama(config))
