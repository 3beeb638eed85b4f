"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

| Table 2 | layers | d_model | heads (their code) | parameters as counted here |
|---------|--------|---------|--------------------|----------------------------|
| small   | 12     | 768     | 12                 | 124M                       |
| medium  | 24     | 1024    | 16                 | 355M                       |
| large   | 36     | 1280    | 20                 | 774M                       |
| xl      | 48     | 1600    | 25                 | 1,558M                     |

GPT with the norms moved before the sub-layers and one more after the last (sec. 2.3), a context of
1024 tokens and byte-level BPE. Output and input share one matrix.
"""

from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, normal, shrink_residuals
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned
from heedful.parts.residual import PreNorm
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are its smallest model.

    Args:
        d_ff: width of the feed-forward's hidden units; None: 4 · d_model.
        max_length: longest text, in tokens.
        dropout: on embeddings, sub-layers' outputs and attention weights.
        tie_embeddings: one matrix for input and output.
        bias: in attention, feed-forward and norms (nanoGPT trains without).
    """

    vocab_size: int = 50257
    d_model: int = 768
    num_heads: int = 12
    num_layers: int = 12
    d_ff: int | None = None
    max_length: int = 1024
    dropout: float = 0.1
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "medium": {"d_model": 1024, "num_heads": 16, "num_layers": 24},
    "large": {"d_model": 1280, "num_heads": 20, "num_layers": 36},
    "xl": {"d_model": 1600, "num_heads": 25, "num_layers": 48},
}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying.

    All weights N(0, 0.02²), those that end a residual branch divided by √(2L) (sec. 2.3).
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    positions = Learned().build(config.max_length, config.d_model)
    head = tokens.weight if config.tie_embeddings else nn.Parameter(tokens.weight.clone())
    net = DecoderOnly(
        TokenEmbedding(tokens, positions, dropout=config.dropout),
        Stack((_block(config) for _ in range(config.num_layers)), _norm(config)),
        OutputProjection(head),
    )
    init_weights(net, normal(0.02))
    shrink_residuals(net)
    return net


def _block(config: Config) -> Block:
    width, dropout, bias = config.d_model, config.dropout, config.bias
    attention = Attention(width, config.num_heads, dropout=dropout, bias=bias, out_bias=bias)
    mlp = Mlp(width, config.d_ff or 4 * width, config.activation, bias=bias)
    return Block(
        PreNorm(attention, _norm(config), dropout=dropout),
        None,
        PreNorm(mlp, _norm(config), dropout=dropout),
    )


def _norm(config: Config) -> nn.Module:
    return LayerNorm(config.norm_eps, config.bias).build(config.d_model)


# Their format always has biases: of a model without any they are zeros, and this key says so.
NO_BIAS = "heedful_bias"

HF = HfFormat(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": {}, "GPT2Model": {}},
    keys={
        "vocab_size": "vocab_size",
        "n_embd": "d_model",
        "n_head": "num_heads",
        "n_layer": "num_layers",
        "n_inner": "d_ff",
        "n_positions": "max_length",
        "resid_pdrop": "dropout",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    values={
        "activation_function": (
            "activation",
            {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
        )
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    defaults={"activation_function": "gelu_new", "n_inner": None, "tie_word_embeddings": True},
    read=lambda given: {"bias": given.get(NO_BIAS, True)},
    write=lambda config: {
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        **({} if config.bias else {NO_BIAS: False}),
    },
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    layer, block = "transformer.h.{i}.", "decoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    names = [
        Name("embedding.tokens.weight", "transformer.wte.weight"),
        Name("embedding.positions.weight", "transformer.wpe.weight"),
    ]
    zeros = {}
    for ours, theirs, transposed in (
        (f"{attention}norm", f"{layer}ln_1", False),
        (f"{attention}sublayer.qkv", f"{layer}attn.c_attn", True),
        (f"{attention}sublayer.out", f"{layer}attn.c_proj", True),
        (f"{mlp}norm", f"{layer}ln_2", False),
        (f"{mlp}sublayer.up", f"{layer}mlp.c_fc", True),
        (f"{mlp}sublayer.down", f"{layer}mlp.c_proj", True),
        ("decoder.final_norm", "transformer.ln_f", False),
    ):
        names.append(Name(f"{ours}.weight", f"{theirs}.weight", transposed=transposed))
        if config.bias:
            names.append(Name(f"{ours}.bias", f"{theirs}.bias"))
        else:
            zeros[f"{theirs}.bias"] = f"{ours}.weight"
    if not config.tie_embeddings:
        names.append(Name("head.weight", "lm_head.weight"))
    return Names(
        tuple(names),
        prefix="transformer.",
        aliases={"lm_head.weight": "transformer.wte.weight"} if config.tie_embeddings else {},
        zeros=zeros,
        buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    )
