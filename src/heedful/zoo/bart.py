"""BART (Lewis et al. 2020, "BART: Denoising Sequence-to-Sequence Pre-training").

| sec. 2.1 and 5 | layers, each side | d_model | heads (their code) | parameters (their code) |
|----------------|-------------------|---------|--------------------|-------------------------|
| base           | 6                 | 768     | 12                 | 139M                    |
| large          | 12                | 1024    | 16                 | 406M                    |

The Transformer of 2017 with exact GELUs and weights N(0, 0.02²) (sec. 2.1); in the authors' code,
positions are learned and both embeddings have a norm. Source, target and output share one matrix.
The bias of the logits comes from the Hugging Face format, where it is zero in the published models;
it is not counted above.
"""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.init import normal
from heedful.parts.residual import PostNorm, Residual
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import encoder_decoder
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.hf_tables import BART_DEFAULTS, BART_FIXED, bart_names
from heedful.zoo.names import Names

OFFSET = 2  # unused rows of the position tables before that of the first token


@model_config
class Config:
    """The paper's sizes and choices; the defaults are its smaller model.

    Args:
        src_vocab_size, tgt_vocab_size: entries of the vocabulary that source and target share.
        num_heads: attention heads per layer, in both stacks or in the encoder only.
        num_decoder_heads: attention heads per layer of the decoder; None: as in the encoder.
        d_ff: width of the hidden units of the feed-forward, in both stacks or in the encoder only.
        decoder_d_ff: width of the hidden units of the decoder's feed-forward; None: as in the
            encoder.
        max_length: longest source and longest target, in tokens.
    """

    src_vocab_size: Annotated[int, Hf("vocab_size")] = 50265
    tgt_vocab_size: Annotated[int, Hf("vocab_size")] = 50265
    d_model: Annotated[int, Hf("d_model")] = 768
    num_heads: Annotated[int, Hf("encoder_attention_heads")] = 12
    num_decoder_heads: Annotated[int | None, Hf("decoder_attention_heads", like="num_heads")] = None
    num_encoder_layers: Annotated[int, Hf("encoder_layers")] = 6
    num_decoder_layers: Annotated[int, Hf("decoder_layers")] = 6
    d_ff: Annotated[int, Hf("encoder_ffn_dim")] = 3072
    decoder_d_ff: Annotated[int | None, Hf("decoder_ffn_dim", like="d_ff")] = None
    max_length: Annotated[int, Hf("max_position_embeddings")] = 1024
    dropout: Annotated[float, Hf("dropout")] = 0.1
    attention_dropout: Annotated[float, Hf("attention_dropout")] = 0.1
    activation_dropout: Annotated[float, Hf("activation_dropout")] = 0.1
    activation: Annotated[Activation, Hf("activation_function", values=ACTIVATIONS)] = "gelu"
    scale_embeddings: Annotated[bool, Hf("scale_embedding")] = False


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"d_model": 1024, "num_heads": 16, "d_ff": 4096}
    | {"num_encoder_layers": 12, "num_decoder_layers": 12},
}


def build(config: Config) -> EncoderDecoder:
    """A new model with weights N(0, 0.02²) from torch's random generator."""
    return encoder_decoder(
        config,
        *stacks(config, PostNorm),
        tie="all",
        scale_embeddings=config.scale_embeddings,
        positions=partial(LearnedTable, offset=OFFSET),
        bias=True,
        norm=nn.LayerNorm,
        initializer=normal(0.02),
    )


def stacks(
    config: Config, placement: type[Residual], *, final_norm: bool = False
) -> tuple[Stack, Stack]:
    """Encoder and decoder of BART, Marian and PEGASUS."""
    width, norm = config.d_model, partial(nn.LayerNorm, config.d_model)
    residual = partial(placement, dropout=config.dropout)

    def stack(num_layers: int, num_heads: int, d_ff: int, *, cross: bool) -> Stack:
        blocks = (block(num_heads, d_ff, cross=cross) for _ in range(num_layers))
        return Stack(blocks, norm() if final_norm else None)

    def block(num_heads: int, d_ff: int, *, cross: bool) -> Block:
        options: Any = {"dropout": config.attention_dropout}
        memory = CrossAttention(width, num_heads, **options) if cross else None
        feedforward = FeedForward(width, d_ff, config.activation, dropout=config.activation_dropout)
        return Block(
            residual(Attention(width, num_heads, **options), norm()),
            None if memory is None else residual(memory, norm()),
            residual(feedforward, norm()),
        )

    heads, d_ff = config.num_heads, config.d_ff
    own_heads, own_d_ff = config.num_decoder_heads or heads, config.decoder_d_ff or d_ff
    return (
        stack(config.num_encoder_layers, heads, d_ff, cross=False),
        stack(config.num_decoder_layers, own_heads, own_d_ff, cross=True),
    )


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    return bart_names(shared=True)


HF = HfConfig(
    model_type="bart",
    classes={"BartForConditionalGeneration": {}, "BartModel": {}},
    fixed=BART_FIXED | {"tie_word_embeddings": True, "normalize_embedding": True},
    defaults=BART_DEFAULTS,
)
ARCHITECTURE = Architecture("bart", Config, build, SIZES, {"hf": Format(HF, hf_names)})
