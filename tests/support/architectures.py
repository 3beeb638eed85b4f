"""A tiny net of every architecture, by the fields that its Config has."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from hypothesis import reject
from hypothesis import strategies as st

from heedful.zoo import ARCHITECTURES, architecture
from option_space import VOCAB, randomized

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
    "rope_fraction": 0.5,
}


def tiny(name: str, **keys: Any) -> Any:
    """A random net in fp64 and eval mode."""
    config = config_of(name, SIZES, keys)
    torch.manual_seed(0)
    return randomized(architecture(name).build(config).double())


def config_of(name: str, sizes: dict[str, Any], keys: dict[str, Any]) -> Any:
    """An architecture's Config with these keys, and with those of the sizes that it has."""
    config = architecture(name).config
    known = {field.name for field in fields(config)}
    return config(**{key: value for key, value in sizes.items() if key in known} | keys)


def one_layer(name: str) -> dict[str, int]:
    """Keys of `tiny` for one layer per stack."""
    names = (field.name for field in fields(architecture(name).config))
    return {key: 1 for key in names if key in SIZES and key.endswith("layers")}


def decodes(name: str) -> bool:
    """True for architectures that generate text: all except encoders."""
    return "head" not in {field.name for field in fields(architecture(name).config)}


DECODERS = [name for name in ARCHITECTURES if decodes(name)]


# Values of fields with an open choice: those that change shapes, and limits that no tensor shows.
OPEN = {
    "src_vocab_size": (40, 40, 31),
    "tgt_vocab_size": (40,),
    "vocab_size": (13, 40),
    "d_model": (8, 24, 64),
    "num_heads": (1, 2, 4),
    "num_decoder_heads": (None, 2),
    "num_kv_heads": (None, 1, 2),
    "head_dim": (None, 2, 10),
    "d_ff": (None, 1, 12, 300),
    "decoder_d_ff": (None, 7),
    "num_layers": (1, 2, 3),
    "num_encoder_layers": (1, 2),
    "num_decoder_layers": (1, 3),
    "max_length": (6, 48, 5_000),
    "window": (None, 1, 4_096, 2**31 - 1),
    "window_from": (1, 2, 29),
    "rope_fraction": (0.5, 1.0),
    "global_every": (1, 2, 1_000),
    "num_experts": (1, 3),
    "top_k": (1, 2),
    "num_labels": (1, 2, 50),
    "type_vocab_size": (1, 2, 3),
    "position_offset": (1, 2, 9),
    "query_scalar": (1, 256),
    "num_buckets": (8, 32),
    "max_distance": (20, 10**6),
    "dropout": (0.0, 0.5),
    "norm_eps": (1e-12, 1e-3),
    "rope_scaling": (None, {"type": "linear", "factor": 2.0}, {"type": "ntk", "factor": 3.0}),
}


@st.composite
def configs_of(draw: st.DrawFn, name: str) -> Any:
    """Any Config of an architecture: closed choices by their types, others from `OPEN`."""
    config = architecture(name).config
    keys: dict[str, Any] = {}
    for key, kind in get_type_hints(config).items():
        options = get_args(kind)
        if key in OPEN:
            is_open = type(None) in options
            keys[key] = draw(st.sampled_from([o for o in OPEN[key] if o is not None or is_open]))
        elif kind is bool or bool in options or get_origin(kind) is Literal:
            keys[key] = draw(st.from_type(kind))
    try:
        return config(**keys)
    except ValueError:
        reject()
