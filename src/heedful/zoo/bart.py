"""BART (Lewis et al. 2020, "BART: Denoising Sequence-to-Sequence Pre-training").

| sec. 2.1 and 5 | layers, each side | d_model | heads (their code) | parameters (their code) |
|----------------|-------------------|---------|--------------------|-------------------------|
| base           | 6                 | 768     | 12                 | 139M                    |
| large          | 12                | 1024    | 16                 | 406M                    |

The Transformer of 2017 with exact GELUs and weights from N(0, 0.02²) (sec. 2.1); in their code
positions are trained, and a norm stands over the embeddings of either side. Source, target and
output share one matrix. The bias on the logits is that of the Hugging Face format, where it is zero
in the authors' own models; it is not in the figures above.
"""

import math
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, normal
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned
from heedful.parts.residual import PostNorm
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names

OFFSET = 2  # rows of the position tables that stand before that of the first token


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are its smaller model.

    Args:
        src_vocab_size, tgt_vocab_size: of one vocabulary, and therefore equal.
        num_heads, d_ff: of both stacks, unless the decoder has its own.
        num_decoder_heads, decoder_d_ff: the decoder's; None: as the encoder's.
        max_length: longest source and longest target, in tokens.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout, activation_dropout: on attention weights and on hidden units.
        scale_embeddings: multiply them by √d_model.
    """

    src_vocab_size: int = 50265
    tgt_vocab_size: int = 50265
    d_model: int = 768
    num_heads: int = 12
    num_decoder_heads: int | None = None
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int = 3072
    decoder_d_ff: int | None = None
    max_length: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    activation: Activation = "gelu"
    scale_embeddings: bool = False

    def __post_init__(self) -> None:
        check_stacks(self)
        check_one_vocabulary(self)


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {
        "d_model": 1024,
        "num_heads": 16,
        "num_encoder_layers": 12,
        "num_decoder_layers": 12,
        "d_ff": 4096,
    },
}


def build(config: Config) -> EncoderDecoder:
    """A new model, its weights drawn from torch's generator once, after tying: all N(0, 0.02²)."""
    tokens = nn.Embedding(config.src_vocab_size, config.d_model)
    net = EncoderDecoder(
        _embedding(config, tokens),
        encoder(config),
        _embedding(config, tokens),
        decoder(config),
        OutputProjection(tokens.weight, bias=logits_bias(config)),
    )
    init_weights(net, normal(0.02))
    return net


def _embedding(config: Config, tokens: nn.Embedding) -> TokenEmbedding:
    return TokenEmbedding(
        tokens,
        Learned(OFFSET).build(config.max_length, config.d_model),
        scale=math.sqrt(config.d_model) if config.scale_embeddings else 1.0,
        dropout=config.dropout,
        norm=LayerNorm().build(config.d_model),
    )


# What follows is Marian's too: both are Transformers of 2017 between embeddings and logits, and
# their files say the same of it. `config` has the keys of the Config above.


def encoder(config: Any) -> Stack:
    """The stack that reads the source."""
    sizes = config.num_heads, config.d_ff
    return Stack(_block(config, *sizes, cross=False) for _ in range(config.num_encoder_layers))


def decoder(config: Any) -> Stack:
    """The stack that writes the target."""
    sizes = config.num_decoder_heads or config.num_heads, config.decoder_d_ff or config.d_ff
    return Stack(_block(config, *sizes, cross=True) for _ in range(config.num_decoder_layers))


def logits_bias(config: Any) -> Tensor:
    """The bias on the logits, to be initialised."""
    return nn.Parameter(torch.empty(config.tgt_vocab_size))


def _block(config: Any, num_heads: int, d_ff: int, *, cross: bool) -> Block:
    width = config.d_model

    def attention() -> PostNorm:
        dropout = config.attention_dropout
        return residual(Attention(width, num_heads, dropout=dropout))

    def residual(sublayer: nn.Module) -> PostNorm:
        return PostNorm(sublayer, LayerNorm().build(width), dropout=config.dropout)

    mlp = Mlp(width, d_ff, config.activation, dropout=config.activation_dropout)
    return Block(attention(), attention() if cross else None, residual(mlp))


def check_stacks(config: Any) -> None:
    """Refuse sizes that no model can have; raises ValueError naming the key."""
    check_sizes(config)
    heads = config.num_decoder_heads
    if heads is not None and config.d_model % heads:
        raise ValueError(f"d_model {config.d_model} is not divisible by num_decoder_heads {heads}")


def check_one_vocabulary(config: Any) -> None:
    """Refuse two vocabularies where one matrix serves both; raises ValueError with both sizes."""
    if config.src_vocab_size != config.tgt_vocab_size:
        raise ValueError(
            "one matrix for source and target needs one vocabulary, but src_vocab_size is "
            f"{config.src_vocab_size} and tgt_vocab_size {config.tgt_vocab_size}; "
            "use a joint tokenizer"
        )


HF_KEYS = {
    "vocab_size": "src_vocab_size",
    "d_model": "d_model",
    "encoder_attention_heads": "num_heads",
    "encoder_layers": "num_encoder_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_ffn_dim": "d_ff",
    "max_position_embeddings": "max_length",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "scale_embedding": "scale_embeddings",
}
HF_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
}
# Those from `normalize_before` on are of files that were written for transformers 3 or before,
# where one class was BART, Marian and others.
HF_FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "encoder_layerdrop": (0.0,),
    "decoder_layerdrop": (0.0,),
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
}
# A file may leave out what is as transformers' own class has it: the large model's sizes.
HF_DEFAULTS: dict[str, Any] = {
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}


def read_decoder(given: dict[str, Any]) -> dict[str, Any]:
    """Our keys of what the decoder has for itself."""
    heads, d_ff = given["decoder_attention_heads"], given["decoder_ffn_dim"]
    return {
        "num_decoder_heads": None if heads == given["encoder_attention_heads"] else heads,
        "decoder_d_ff": None if d_ff == given["encoder_ffn_dim"] else d_ff,
    }


def write_decoder(config: Any) -> dict[str, Any]:
    """Their keys of it."""
    return {
        "decoder_attention_heads": config.num_decoder_heads or config.num_heads,
        "decoder_ffn_dim": config.decoder_d_ff or config.d_ff,
    }


HF = HfFormat(
    model_type="bart",
    classes={"BartForConditionalGeneration": {}, "BartModel": {}},
    keys=HF_KEYS,
    values={"activation_function": ("activation", HF_ACTIVATIONS)},
    fixed=HF_FIXED
    | {
        "tie_word_embeddings": (True,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
    },
    defaults=HF_DEFAULTS | {"vocab_size": 50265},
    read=lambda given: {"tgt_vocab_size": given["vocab_size"], **read_decoder(given)},
    write=write_decoder,
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    names = [Name("src_embedding.tokens.weight", "model.shared.weight"), *layer_names()]
    for ours, theirs in (("src_embedding", "model.encoder"), ("tgt_embedding", "model.decoder")):
        names += [
            Name(f"{ours}.positions.weight", f"{theirs}.embed_positions.weight"),
            Name(f"{ours}.norm.weight", f"{theirs}.layernorm_embedding.weight"),
            Name(f"{ours}.norm.bias", f"{theirs}.layernorm_embedding.bias"),
        ]
    aliases = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    return Names(
        tuple(names),
        prefix="model.",
        aliases={f"{alias}.weight": "model.shared.weight" for alias in aliases},
        buffers=(r"(model\.)?(encoder|decoder)\.version",),
        optional=("head.bias",),
    )


def layer_names() -> list[Name]:
    """The layers' tensors, and the bias on the logits, which base models' files lack."""
    names = [Name("head.bias", "final_logits_bias", row=True)]
    for stack in ("encoder", "decoder"):
        ours, theirs = f"{stack}.blocks.{{i}}", f"model.{stack}.layers.{{i}}"
        attentions = [("self_attention", "self_attn")]
        if stack == "decoder":
            attentions.append(("cross_attention", "encoder_attn"))
        pairs: list[tuple[str, str | tuple[str, ...]]] = []
        for one, other in attentions:
            parts = tuple(f"{theirs}.{other}.{part}_proj" for part in "qkv")
            pairs += [
                (f"{ours}.{one}.sublayer.qkv", parts),
                (f"{ours}.{one}.sublayer.out", f"{theirs}.{other}.out_proj"),
                (f"{ours}.{one}.norm", f"{theirs}.{other}_layer_norm"),
            ]
        pairs += [
            (f"{ours}.feedforward.sublayer.up", f"{theirs}.fc1"),
            (f"{ours}.feedforward.sublayer.down", f"{theirs}.fc2"),
            (f"{ours}.feedforward.norm", f"{theirs}.final_layer_norm"),
        ]
        names += [_named(*pair, end) for pair in pairs for end in ("weight", "bias")]
    return names


def _named(ours: str, theirs: str | tuple[str, ...], end: str) -> Name:
    if isinstance(theirs, str):
        return Name(f"{ours}.{end}", f"{theirs}.{end}")
    return Name(f"{ours}.{end}", tuple(f"{part}.{end}" for part in theirs))
