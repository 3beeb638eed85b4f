"""T5 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning"), versions 1.0 and 1.1.

| sec. 3.7  | layers, each side | d_model | d_ff   | heads | head width | parameters |
|-----------|-------------------|---------|--------|-------|------------|------------|
| small     | 6                 | 512     | 2,048  | 8     | 64         | 60M        |
| base      | 12                | 768     | 3,072  | 12    | 64         | 220M       |
| large     | 24                | 1024    | 4,096  | 16    | 64         | 770M       |
| 3b        | 24                | 1024    | 16,384 | 32    | 128        | 2.8B       |
| 11b       | 24                | 1024    | 65,536 | 128   | 128        | 11B        |
| 1.1-small | 8                 | 512     | 1,024  | 6     | 64         | 77M        |
| 1.1-base  | 12                | 768     | 2,048  | 12    | 64         | 250M       |
| 1.1-large | 24                | 1024    | 2,816  | 16    | 64         | 780M       |
| 1.1-xl    | 24                | 2048    | 5,120  | 32    | 64         | 3B         |
| 1.1-xxl   | 24                | 4096    | 10,240 | 64    | 64         | 11B        |

Norms without mean or bias before every sub-layer, no bias anywhere, scores of attention that are
not divided by √E but have a trained number added for each head and range of distances, which all
layers of a stack share (sec. 2.1). 1.0 has ReLU and one matrix for source, target and output, whose
states are multiplied by 1/√D; 1.1 has gated GELUs (Shazeer 2020) and an output matrix of its own.
"""

import math
from typing import Any, get_args

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.dropout import Dropout
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Gate, feedforward
from heedful.parts.heads import OutputProjection
from heedful.parts.init import Draw, init_weights
from heedful.parts.norms import RMSNorm
from heedful.parts.positions import NoPositions
from heedful.parts.relative import BucketScores, RelativeBuckets
from heedful.parts.residual import PreNorm
from heedful.zoo.bart import check_one_vocabulary
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are version 1.0, small.

    Args:
        src_vocab_size, tgt_vocab_size: of one vocabulary, and therefore equal.
        head_dim: width of a head, whatever d_model / num_heads is.
        max_length: longest source and longest target that we accept, in tokens; the model itself
            has no limit.
        dropout: on embeddings, sub-layers' outputs, attention weights, hidden units and states.
        activation: of the feed-forward: relu in 1.0, geglu_tanh in 1.1.
        num_buckets, max_distance: of the scores by distance (`RelativeBuckets`).
        tie_embeddings: one matrix for source, target and output, as in 1.0; false: one for source
            and target and one for the output, whose states are not scaled, as in 1.1.
    """

    src_vocab_size: int = 32128
    tgt_vocab_size: int = 32128
    d_model: int = 512
    num_heads: int = 8
    head_dim: int = 64
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int = 2048
    max_length: int = 512
    dropout: float = 0.1
    activation: Activation | Gate = "relu"
    num_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        check_one_vocabulary(self)
        if self.num_buckets < 4:
            raise ValueError(f"num_buckets must be at least 4, not {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance must be above {self.num_buckets // 2}, half of num_buckets, "
                f"not {self.max_distance}"
            )


def _size(layers: int, d_model: int, d_ff: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_encoder_layers": layers,
        "num_decoder_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        "num_heads": num_heads,
        "head_dim": head_dim,
    }


_V1_1: dict[str, Any] = {"activation": "geglu_tanh", "tie_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {
    "small": _size(6, 512, 2048, 8, 64),
    "base": _size(12, 768, 3072, 12, 64),
    "large": _size(24, 1024, 4096, 16, 64),
    "3b": _size(24, 1024, 16384, 32, 128),
    "11b": _size(24, 1024, 65536, 128, 128),
    "1.1-small": _size(8, 512, 1024, 6, 64) | _V1_1,
    "1.1-base": _size(12, 768, 2048, 12, 64) | _V1_1,
    "1.1-large": _size(24, 1024, 2816, 16, 64) | _V1_1,
    "1.1-xl": _size(24, 2048, 5120, 32, 64) | _V1_1,
    "1.1-xxl": _size(24, 4096, 10240, 64, 64) | _V1_1,
}


def build(config: Config) -> EncoderDecoder:
    """A new model, its weights drawn from torch's generator once, after tying."""
    width = config.d_model
    tokens = nn.Embedding(config.src_vocab_size, width)
    head = tokens.weight if config.tie_embeddings else nn.Parameter(torch.empty_like(tokens.weight))
    net = EncoderDecoder(
        _embedding(config, tokens),
        _stack(config, config.num_encoder_layers, is_decoder=False),
        _embedding(config, tokens),
        _stack(config, config.num_decoder_layers, is_decoder=True),
        OutputProjection(head, scale=width**-0.5 if config.tie_embeddings else 1.0),
    )
    init_weights(net, draw(width))
    _shrink_queries(net)
    return net


def draw(d_model: int) -> Draw:
    """As the authors' code (Mesh TensorFlow): matrices N(0, 1/fan-in), embeddings N(0, 1).

    The scores by distance are N(0, 1/D). An output matrix of its own is a matrix like any other:
    transformers draws it from N(0, 1) instead, which makes logits of size √D.
    """

    def fill(module: nn.Module, name: str, parameter: Tensor) -> None:
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(parameter)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(parameter)
        elif isinstance(module, BucketScores):
            nn.init.normal_(parameter, std=d_model**-0.5)
        else:
            nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)

    return fill


@torch.no_grad()
def _shrink_queries(net: nn.Module) -> None:
    """Divide the queries' matrices by √E once and for all: the scores are not divided by it."""
    for module in net.modules():
        if isinstance(module, Attention):
            module.qkv.weight[: module.split_sizes[0]] /= math.sqrt(module.head_dim)


def _embedding(config: Config, tokens: nn.Embedding) -> TokenEmbedding:
    nowhere = NoPositions().build(config.max_length, config.d_model)
    return TokenEmbedding(tokens, nowhere, dropout=config.dropout)


def _stack(config: Config, num_layers: int, *, is_decoder: bool) -> Stack:
    scheme = RelativeBuckets(config.num_buckets, config.max_distance)
    return Stack(
        (_block(config, cross=is_decoder) for _ in range(num_layers)),
        _norm(config),
        relative=scheme.build(config.num_heads, config.head_dim, causal=is_decoder),
        final_dropout=Dropout(config.dropout),
    )


def _block(config: Config, *, cross: bool) -> Block:
    width, dropout = config.d_model, config.dropout
    network = feedforward(width, config.d_ff, config.activation, dropout=dropout, bias=False)
    return Block(
        _residual(config, _attention(config)),
        _residual(config, _attention(config)) if cross else None,
        _residual(config, network),
    )


def _attention(config: Config) -> Attention:
    return Attention(
        config.d_model,
        config.num_heads,
        head_dim=config.head_dim,
        scale=1.0,
        dropout=config.dropout,
        bias=False,
        out_bias=False,
    )


def _residual(config: Config, sublayer: nn.Module) -> PreNorm:
    return PreNorm(sublayer, _norm(config), dropout=config.dropout)


def _norm(config: Config) -> nn.Module:
    return RMSNorm(config.norm_eps).build(config.d_model)


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5 says by `scale_decoder_outputs` what older files say by `tie_word_embeddings`.

    It writes that all matrices are tied, whatever they are; only the tensors tell (`hf_names`).
    """
    _check_activation(given)
    tied = given["tie_word_embeddings"] is not False
    scaled = given.get("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise UserError(
            "config.json: scale_decoder_outputs is True where tie_word_embeddings is False; "
            "heedful's t5 scales the output of one shared matrix alone"
        )
    return {
        "tgt_vocab_size": given["vocab_size"],
        "num_decoder_layers": given["num_decoder_layers"] or given["num_layers"],
        "tie_embeddings": scaled,
    }


def _check_activation(given: dict[str, Any]) -> None:
    """Newer files repeat what `feed_forward_proj` says, and transformers goes by the repetition."""
    said = given["feed_forward_proj"]
    gate, _, name = said.rpartition("-")
    repeated = {
        "dense_act_fn": "gelu_new" if said == "gated-gelu" else name,
        "is_gated_act": gate == "gated",
    }
    for key, value in repeated.items():
        if given.get(key, value) != value:
            raise UserError(
                f"config.json: {key} is {given[key]!r}, which feed_forward_proj {said!r} is not"
            )


HF = HfFormat(
    model_type="t5",
    classes={"T5ForConditionalGeneration": {}, "T5Model": {}},
    keys={
        "vocab_size": "src_vocab_size",
        "d_model": "d_model",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "num_layers": "num_encoder_layers",
        "num_decoder_layers": "num_decoder_layers",
        "d_ff": "d_ff",
        "n_positions": "max_length",
        "dropout_rate": "dropout",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
    },
    values={
        "feed_forward_proj": (
            "activation",
            {
                "relu": "relu",
                "gelu": "gelu",
                "gelu_new": "gelu_tanh",
                "silu": "silu",
                "gated-relu": "reglu",
                "gated-gelu": "geglu_tanh",  # over there this is the approximation
                "gated-gelu_new": "geglu_tanh",
                "gated-gelu_python": "geglu",
                "gated-silu": "swiglu",
            },
        )
    },
    fixed={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    defaults={
        "vocab_size": 32128,
        "num_layers": 6,
        "num_decoder_layers": None,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": None,
    },
    read=_read,
    write=lambda config: {
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.tie_embeddings,
    },
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    names = [Name("src_embedding.tokens.weight", "shared.weight")]
    aliases = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tie_embeddings:
        aliases.append("lm_head.weight")
    else:
        names.append(Name("head.weight", "lm_head.weight"))
    gated = config.activation in get_args(Gate)
    for stack in ("encoder", "decoder"):
        names += _stack_names(stack, gated)
    cross = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    return Names(
        tuple(names),
        aliases=dict.fromkeys(aliases, "shared.weight"),
        copies={} if config.tie_embeddings else {"lm_head.weight": "shared.weight"},
        unused=(cross,),  # in the first files; no version of the model looks at it
    )


def _stack_names(stack: str, gated: bool) -> list[Name]:
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    names = [
        Name(f"{stack}.relative.weight", first),
        Name(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight"),
    ]
    sublayers = [("self_attention", "SelfAttention"), ("feedforward", "DenseReluDense")]
    if stack == "decoder":
        sublayers.insert(1, ("cross_attention", "EncDecAttention"))
    for number, (one, other) in enumerate(sublayers):
        ours = f"{stack}.blocks.{{i}}.{one}"
        theirs = f"{stack}.block.{{i}}.layer.{number}"
        names.append(Name(f"{ours}.norm.weight", f"{theirs}.layer_norm.weight"))
        parts: dict[str, str | tuple[str, ...]] = {"qkv": ("q", "k", "v"), "out": "o"}
        if one == "feedforward":
            parts = {"up": ("wi_0", "wi_1") if gated else "wi", "down": "wo"}
        for part, matrix in parts.items():
            whole = (matrix,) if isinstance(matrix, str) else matrix
            matrices = tuple(f"{theirs}.{other}.{each}.weight" for each in whole)
            names.append(Name(f"{ours}.sublayer.{part}.weight", matrices))
    return names
