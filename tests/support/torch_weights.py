"""Weights of a `torch.nn.Transformer` for a net of `vaswani2017`."""

import torch
from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.zoo.names import Names, from_hf, layer_names

_LAYER = {
    "self_attention.sublayer.qkv": "self_attn.in_proj",
    "self_attention.sublayer.out": "self_attn.out_proj",
    "self_attention.norm": "norm1",
    "cross_attention.sublayer.q": "multihead_attn.q",
    "cross_attention.sublayer.kv": "multihead_attn.kv",
    "cross_attention.sublayer.out": "multihead_attn.out_proj",
    "feedforward.sublayer.up": "linear1",
    "feedforward.sublayer.down": "linear2",
}
_NORMS = {
    "encoder": {"feedforward.norm": "norm2"},
    "decoder": {"cross_attention.norm": "norm2", "feedforward.norm": "norm3"},
}


def from_torch(net: EncoderDecoder, transformer: nn.Transformer) -> EncoderDecoder:
    """Copy the weights of a `torch.nn.Transformer` into a net of the same sizes.

    It has neither embeddings nor an output: those of `net` stay. Its default has a norm after each
    stack even with `norm_first=False`: build the net with `final_norm=True` for it. Built with
    `bias=False` its norms have no bias either: ours are then zero.

    Raises:
        UserError: a weight of the one has no counterpart in the other; nothing is copied then.
    """
    state = {
        name.replace("in_proj_", "in_proj."): weight
        for name, weight in transformer.state_dict().items()
    }
    for name in [name for name in state if "multihead_attn.in_proj." in name]:
        query, *others = state.pop(name).chunk(3)
        state[name.replace("in_proj", "q")] = query
        state[name.replace("in_proj", "kv")] = torch.cat(others)
    names = []
    for side, norms in _NORMS.items():
        names += layer_names(f"{side}.blocks.{{i}}", f"{side}.layers.{{i}}", _LAYER | norms)
        names += layer_names(side, side, {"final_norm": "norm"})
    stacks = nn.ModuleDict({"encoder": net.encoder, "decoder": net.decoder})
    has_bias = any(name.endswith("norm1.bias") for name in state)
    optional = "" if has_bias else r".*norm\.bias"
    from_hf(stacks, state, Names(names, optional=optional), "the torch.nn.Transformer")
    if not has_bias:
        for name, parameter in stacks.named_parameters():
            if name.endswith("norm.bias"):
                nn.init.zeros_(parameter)
    return net
