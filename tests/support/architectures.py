"""A tiny net of every architecture, by the fields that its Config has."""

from dataclasses import fields
from typing import Any

import torch

from heedful.zoo import ARCHITECTURES, architecture
from option_space import VOCAB, randomised

SIZES = {
    "vocab_size": VOCAB,
    "src_vocab_size": VOCAB,
    "tgt_vocab_size": VOCAB,
    "d_model": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "num_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "d_ff": 12,
    "max_length": 48,
    "window": 3,
    "global_every": 2,
    "num_experts": 3,
    "type_vocab_size": 2,
    "head": "mlm",
}


def tiny(name: str, **keys: Any) -> Any:
    """A random net in fp64 and eval mode."""
    config = config_of(name, SIZES, keys)
    torch.manual_seed(0)
    return randomised(architecture(name).build(config).double())


def config_of(name: str, sizes: dict[str, Any], keys: dict[str, Any]) -> Any:
    """An architecture's Config of these keys, and of those sizes that it has."""
    config = architecture(name).Config
    known = {field.name for field in fields(config)}
    return config(**{key: value for key, value in sizes.items() if key in known} | keys)


def one_layer(name: str) -> dict[str, int]:
    """Keys of `tiny` for one layer a stack."""
    names = (field.name for field in fields(architecture(name).Config))
    return {key: 1 for key in names if key in SIZES and key.endswith("layers")}


def decodes(name: str) -> bool:
    """Whether it writes: all but the encoders."""
    return "head" not in {field.name for field in fields(architecture(name).Config)}


DECODERS = [name for name in ARCHITECTURES if decodes(name)]
