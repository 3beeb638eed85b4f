"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017).

| Table 3 | N | d_model | d_ff | h | dropout | parameters |
|---------|---|---------|------|---|---------|------------|
| base    | 6 | 512     | 2048 | 8 | 0.1     | 65M        |
| big     | 6 | 1024    | 4096 | 16| 0.3     | 213M       |

Both share one vocabulary of about 37,000 entries, and one matrix, between source, target and
output (sec. 3.4). `tiny` is the size of Wu et al. 2021 for Multi30k.
"""

import math
from typing import Any, Literal

import torch
from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Stack
from heedful.parts.attention import Attention, CrossAttention
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.init import init_weights
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned, NoPositions, Positions, Sinusoidal
from heedful.parts.residual import PLACEMENTS, NormPlacement
from heedful.zoo.build import Tying, encoder_decoder, stack
from heedful.zoo.checks import check_one_vocabulary, model_config

POSITIONS: dict[str, Positions] = {
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "none": NoPositions(),
}


@model_config
class Config:
    """The paper's sizes and choices; the defaults are its base model.

    Args:
        dropout: on every sub-layer's output and on the embeddings (sec. 5.4).
        attention_dropout, activation_dropout: on the attention weights and on the feed-forward's
            hidden units; None: as `dropout`.
        max_length: longest source and longest target, in tokens with EOS or BOS.
        norm_placement: post norm(x + f(x)), pre x + f(norm(x)), output x + norm(f(x)).
        final_norm: a norm after each stack; None: where the placement leaves its sum unnormalised
            (all but post).
        tie_embeddings: none; decoder: target and output; all: source, target and output.
        bias: in attention and feed-forward; the output projection has none.
        scale_embeddings: multiply them by √d_model.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int = 2048
    dropout: float = 0.1
    max_length: int = 512
    norm_placement: NormPlacement = "post"
    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    activation: Activation = "relu"
    tie_embeddings: Tying = "all"
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    final_norm: bool | None = None
    norm_eps: float = 1e-5
    bias: bool = True
    scale_embeddings: bool = True

    def check(self) -> None:
        """Refuse two vocabularies with one matrix."""
        if self.tie_embeddings == "all":
            check_one_vocabulary(self)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "d_model": 128,
        "num_heads": 4,
        "num_encoder_layers": 4,
        "num_decoder_layers": 4,
        "d_ff": 256,
        "dropout": 0.3,
    },
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout": 0.3},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, its weights drawn from torch's generator once, after tying."""
    net = encoder_decoder(
        config,
        _stack(config, config.num_encoder_layers, cross=False),
        _stack(config, config.num_decoder_layers, cross=True),
        positions=POSITIONS[config.positions],
        tie=config.tie_embeddings,
        scale=math.sqrt(config.d_model) if config.scale_embeddings else 1.0,
    )
    init_weights(net)
    return net


def _stack(config: Config, num_layers: int, *, cross: bool) -> Stack:
    width, bias, dropout = config.d_model, config.bias, config.dropout
    on_weights = dropout if config.attention_dropout is None else config.attention_dropout
    on_hidden = dropout if config.activation_dropout is None else config.activation_dropout
    final_norm = config.final_norm
    if final_norm is None:
        final_norm = config.norm_placement != "post"

    sizes: dict[str, Any] = {"d_model": width, "num_heads": config.num_heads}
    sizes |= {"dropout": on_weights, "bias": bias, "out_bias": bias}
    return stack(
        num_layers,
        width=width,
        residual=PLACEMENTS[config.norm_placement],
        norm=LayerNorm(config.norm_eps),
        attention=lambda layer: Attention(**sizes),
        cross=(lambda: CrossAttention(**sizes)) if cross else None,
        feedforward=lambda: Mlp(
            width, config.d_ff, config.activation, dropout=on_hidden, bias=bias
        ),
        dropout=dropout,
        final_norm=final_norm,
    )


# torch.nn.Transformer's names, left, and ours: the map of `from_torch`, read as prefixes.
TORCH_NAMES: dict[str, str] = {
    "self_attn.in_proj_": "self_attention.sublayer.qkv.",
    "self_attn.out_proj.": "self_attention.sublayer.out.",
    "multihead_attn.out_proj.": "cross_attention.sublayer.out.",
    "q_": "cross_attention.sublayer.q.",
    "kv_": "cross_attention.sublayer.kv.",
    "linear1.": "feedforward.sublayer.up.",
    "linear2.": "feedforward.sublayer.down.",
    "norm1.": "self_attention.norm.",
}


def from_torch(net: EncoderDecoder, transformer: nn.Transformer) -> EncoderDecoder:
    """Copy the weights of a `torch.nn.Transformer` into a net of the same sizes.

    It has neither embeddings nor an output: those of `net` stay. Its default has a norm after each
    stack even with `norm_first=False`: build the net with `final_norm=True` for it. Built with
    `bias=False` its norms have no bias either: ours are then zero.

    Raises:
        ValueError: a weight of the one has no counterpart in the other; nothing is copied then.
    """
    state = net.state_dict()
    left = {name for name in state if name.startswith(("encoder.", "decoder."))}
    theirs = transformer.state_dict()
    for name in [name for name in theirs if ".multihead_attn.in_proj_" in name]:
        stem, _, end = name.partition(".multihead_attn.in_proj_")
        query, *others = theirs.pop(name).chunk(3)
        theirs |= {f"{stem}.q_{end}": query, f"{stem}.kv_{end}": torch.cat(others)}
    for name, value in theirs.items():
        ours = _from_torch_name(name)
        if ours not in state or state[ours].shape != value.shape:
            raise ValueError(f"{name} {tuple(value.shape)} has no place in the net ({ours})")
        state[ours] = value
        left.discard(ours)
    for name in sorted(left):
        if not name.endswith("norm.bias"):
            raise ValueError(f"the torch.nn.Transformer has nothing for {name} of the net")
        state[name] = torch.zeros_like(state[name])
    net.load_state_dict(state)
    return net


def _from_torch_name(name: str) -> str:
    side, rest = name.split(".", 1)
    if rest.startswith("norm."):
        return f"{side}.final_norm.{rest.removeprefix('norm.')}"
    _, index, inner = rest.split(".", 2)
    norms = {"norm2.": "feedforward.norm."}
    if side == "decoder":
        norms = {"norm2.": "cross_attention.norm.", "norm3.": "feedforward.norm."}
    for theirs, ours in (TORCH_NAMES | norms).items():
        if inner.startswith(theirs):
            return f"{side}.blocks.{index}.{ours}{inner.removeprefix(theirs)}"
    raise ValueError(f"{name} is not a name of torch.nn.Transformer")
