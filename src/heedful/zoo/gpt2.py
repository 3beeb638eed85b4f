"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

| Table 2 | layers | d_model | heads (their code) | parameters as counted here |
|---------|--------|---------|--------------------|----------------------------|
| small   | 12     | 768     | 12                 | 124M                       |
| medium  | 24     | 1024    | 16                 | 355M                       |
| large   | 36     | 1280    | 20                 | 774M                       |
| xl      | 48     | 1600    | 25                 | 1,558M                     |

GPT with pre-norm and a final norm (sec. 2.3), a context of 1024 tokens and byte-level BPE. Output
and input share one matrix.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.residual import PreNorm
from heedful.zoo import gguf, gpt
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.names import Name, Names, layer_names


@model_config
class Config(gpt.Config):
    """GPT's keys; the defaults are the paper's smallest model.

    Args:
        bias: biases in attention, feed-forward and norms (nanoGPT has none).
    """

    vocab_size: int = 50257
    d_ff: Annotated[int | None, Hf("n_inner")] = None
    max_length: int = 1024
    activation: Annotated[Activation, Hf("activation_function", values=ACTIVATIONS)] = "gelu_tanh"  # type: ignore[assignment]  # GPT has fewer
    bias: bool = True


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "medium": {"d_model": 1024, "num_heads": 16, "num_layers": 24},
    "large": {"d_model": 1280, "num_heads": 20, "num_layers": 36},
    "xl": {"d_model": 1600, "num_heads": 25, "num_layers": 48},
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized from torch's random generator.

    Weights N(0, 0.02²); the last one of each residual branch is divided by √(2L) (sec. 2.3).
    """
    width, bias, dropout = config.d_model, config.bias, config.dropout
    norm = partial(nn.LayerNorm, width, eps=config.norm_eps, bias=bias)
    residual = partial(PreNorm, dropout=dropout)

    def block() -> Block:
        attention = Attention(width, config.num_heads, dropout=dropout, bias=bias, out_bias=bias)
        feedforward = FeedForward(width, config.d_ff, config.activation, bias=bias)
        return Block(residual(attention, norm()), None, residual(feedforward, norm()))

    decoder = Stack((block() for _ in range(config.num_layers)), norm())
    return decoder_only(config, decoder, positions=LearnedTable)


# The format always has biases: a model without biases is written with zeros and this key.
NO_BIAS = "heedful_bias"


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    buffers = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    return gpt.decoder_names(gpt.HF_LAYER, buffers, transposed=True, zero_bias=True)


HF = HfConfig(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": {}, "GPT2Model": {}},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=lambda content, keys: {"bias": content.get(NO_BIAS, True)},
    write=lambda config: {} if config.bias else {NO_BIAS: False},
)


def gguf_names(config: Config) -> Names:
    """Tensor names of GGUF."""
    layer = gguf.LAYER | {
        "self_attention.sublayer.qkv": "attn_qkv",
        "feedforward.sublayer.up": "ffn_up",
    }
    layers = layer_names(gguf.LAYER_PATH, "blk.{i}", layer, zero_bias=True)
    norm, head = gguf.HEAD
    positions = Name("embedding.positions", "position_embd")
    return Names([gguf.EMBEDDING, positions, *layers, replace(norm, zero_bias=True), head])


def _to_gguf(config: Config) -> gguf.Metadata:
    if config.activation != "gelu_tanh":
        raise gguf.refuse("GPT-2", "the activation", config.activation, "gelu_tanh")
    return gguf.sizes_to_gguf(config) | {"attention.layer_norm_epsilon": config.norm_eps}


GGUF = gguf.GgufConfig("gpt2", _to_gguf)
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": Format(GGUF, gguf_names)}
ARCHITECTURE = Architecture("gpt2", Config, build, SIZES, FORMATS)
