"""T5 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning"), versions 1.0 and 1.1.

Pre-norm with RMSNorm, no biases, attention scores that are not scaled by 1/√E and have relative
position biases, which all layers of a stack share (sec. 2.1). 1.0 has ReLU and one matrix for
source, target and output, with output states multiplied by 1/√D; 1.1 has gated GELUs (Shazeer 2020)
and a separate output matrix.
"""

import math
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.feedforward import Activation, FeedForward, Gate
from heedful.parts.heads import Scale
from heedful.parts.positions import RelativePositionBias
from heedful.parts.residual import Dropout, PreNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import encoder_decoder
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.hf_tables import T5_FEEDFORWARDS, read_t5, t5_names


@model_config
class Config:
    """The paper's sizes and choices; the defaults are version 1.0, small.

    Args:
        src_vocab_size, tgt_vocab_size: entries of the vocabulary that source and target share.
        head_dim: width of a head; need not be d_model / num_heads.
        max_length: longest source and target, in tokens; a limit of heedful, not of the model.
        dropout: dropout probability of embeddings, outputs of sub-layers, attention weights, hidden
            units and final states.
        activation: activation of the feed-forward: relu in 1.0, geglu_tanh in 1.1.
        num_buckets: number of buckets of relative positions, see `RelativePositionBias`.
        max_distance: distance in tokens from which on all positions share one bucket.
        tie_embeddings: one matrix for source, target and output, as in 1.0; false: one for source
            and target and one for the output, whose states are not scaled, as in 1.1.
    """

    src_vocab_size: Annotated[int, Hf("vocab_size")] = 32128
    tgt_vocab_size: Annotated[int, Hf("vocab_size")] = 32128
    d_model: Annotated[int, Hf("d_model")] = 512
    num_heads: Annotated[int, Hf("num_heads")] = 8
    head_dim: Annotated[int, Hf("d_kv")] = 64
    num_encoder_layers: Annotated[int, Hf("num_layers")] = 6
    num_decoder_layers: Annotated[int, Hf("num_decoder_layers")] = 6
    d_ff: Annotated[int, Hf("d_ff")] = 2048
    max_length: Annotated[int, Hf("n_positions")] = 512
    dropout: Annotated[float, Hf("dropout_rate")] = 0.1
    activation: Annotated[Activation | Gate, Hf("feed_forward_proj", values=T5_FEEDFORWARDS)] = (
        "relu"
    )
    num_buckets: Annotated[int, Hf("relative_attention_num_buckets")] = 32
    max_distance: Annotated[int, Hf("relative_attention_max_distance")] = 128
    norm_eps: Annotated[float, Hf("layer_norm_epsilon")] = 1e-6
    tie_embeddings: Annotated[bool, Hf("scale_decoder_outputs")] = True


def _size(layers: int, d_model: int, d_ff: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_heads": num_heads, "head_dim": head_dim}
    return {"num_encoder_layers": layers, "num_decoder_layers": layers, **sizes}


_V1_1: dict[str, Any] = {"activation": "geglu_tanh", "tie_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {  # sec. 3.7, and the parameters of each
    "small": _size(6, 512, 2048, 8, 64),  # 60M
    "base": _size(12, 768, 3072, 12, 64),  # 220M
    "large": _size(24, 1024, 4096, 16, 64),  # 770M
    "3b": _size(24, 1024, 16384, 32, 128),  # 2.8B
    "11b": _size(24, 1024, 65536, 128, 128),  # 11B
    "1.1-small": _size(8, 512, 1024, 6, 64) | _V1_1,  # 77M
    "1.1-base": _size(12, 768, 2048, 12, 64) | _V1_1,  # 250M
    "1.1-large": _size(24, 1024, 2816, 16, 64) | _V1_1,  # 780M
    "1.1-xl": _size(24, 2048, 5120, 32, 64) | _V1_1,  # 3B
    "1.1-xxl": _size(24, 4096, 10240, 64, 64) | _V1_1,  # 11B
}


def build(config: Config) -> EncoderDecoder:
    """A new model, initialized from torch's random generator."""
    width, heads, dropout = config.d_model, config.num_heads, config.dropout
    norm = partial(nn.RMSNorm, width, eps=config.norm_eps)
    residual = partial(PreNorm, dropout=dropout)
    options: Any = {"head_dim": config.head_dim, "scale": 1.0, "dropout": dropout}
    options |= {"bias": False, "out_bias": False}

    def stack(num_layers: int, *, causal: bool) -> Stack:
        """The encoder, or the causal decoder; all its layers share the position biases."""
        position = RelativePositionBias(
            heads, config.num_buckets, config.max_distance, causal=causal
        )
        blocks = (block(position, cross=causal) for _ in range(num_layers))
        return Stack(blocks, norm(), final_dropout=Dropout(dropout))

    def block(position: nn.Module, *, cross: bool) -> Block:
        attention = Attention(width, heads, position=position, **options)
        memory = CrossAttention(width, heads, **options) if cross else None
        feedforward = FeedForward(
            width, config.d_ff, config.activation, dropout=dropout, bias=False
        )
        return Block(
            residual(attention, norm()),
            None if memory is None else residual(memory, norm()),
            residual(feedforward, norm()),
        )

    tied = config.tie_embeddings
    net = encoder_decoder(
        config,
        stack(config.num_encoder_layers, causal=False),
        stack(config.num_decoder_layers, causal=True),
        tie="all" if tied else "embeddings",
        transform=Scale(width**-0.5) if tied else None,
        initializer=partial(init_weight, d_model=width),
    )
    _shrink_queries(net)
    return net


def init_weight(module: nn.Module, name: str, parameter: Tensor, *, d_model: int) -> None:
    """Matrices N(0, 1/fan-in), embeddings N(0, 1), as in the authors' code (Mesh TensorFlow).

    Relative position biases are N(0, 1/D). A separate output matrix is initialized like the other
    matrices; transformers uses N(0, 1), which makes logits of size √D.
    """
    width = d_model if isinstance(module, RelativePositionBias) else parameter.size(-1)
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(parameter)
    else:
        nn.init.normal_(parameter, std=1 if isinstance(module, nn.Embedding) else width**-0.5)


@torch.no_grad()
def _shrink_queries(net: nn.Module) -> None:
    """Divide the query matrices by √E, since the scores are not divided by it."""
    for module in net.modules():
        if isinstance(module, Attention):
            module.qkv.weight[: module.split_sizes[0]] /= math.sqrt(module.head_dim)
        elif isinstance(module, CrossAttention):
            module.q.weight /= math.sqrt(module.head_dim)


HF = HfConfig(
    model_type="t5",
    classes={"T5ForConditionalGeneration": {}, "T5Model": {}},
    fixed={"is_encoder_decoder": True, "is_decoder": False},
    read=read_t5,
    write=lambda config: {"tie_word_embeddings": config.tie_embeddings},
)
ARCHITECTURE = Architecture("t5", Config, build, SIZES, {"hf": Format(HF, t5_names)})
