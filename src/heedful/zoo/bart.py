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

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.feedforward import Activation
from heedful.parts.init import normal
from heedful.parts.positions import LearnedTable
from heedful.parts.residual import PostNorm
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.build import AttentionSpec, BlockSpec, FeedForwardSpec, encoder_decoder, two_stacks
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.hf_seq2seq import DEFAULTS, FIXED, bart_names
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Names

OFFSET = 2  # unused rows of the position tables before that of the first token


@model_config
class Config:
    """The paper's sizes and choices; the defaults are its smaller model.

    Args:
        src_vocab_size, tgt_vocab_size: equal, since source and target share a vocabulary.
        num_heads, d_ff: of both stacks, or of the encoder only.
        num_decoder_heads, decoder_d_ff: of the decoder; None: as in the encoder.
        max_length: longest source and longest target, in tokens.
        dropout: on embeddings and on outputs of sub-layers.
        attention_dropout, activation_dropout: on attention weights and on hidden units.
        scale_embeddings: multiply them by √d_model.
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


def decoder_block(config: Config, block: BlockSpec) -> BlockSpec:
    """The encoder's block with the heads and the feed-forward width of the decoder."""
    heads, d_ff = config.num_decoder_heads, config.decoder_d_ff
    return replace(
        block,
        attention=replace(block.attention, num_heads=heads or block.attention.num_heads),
        feedforward=replace(block.feedforward, d_ff=d_ff or block.feedforward.d_ff),
    )


def build(config: Config) -> EncoderDecoder:
    """A new model with weights N(0, 0.02²) from torch's random generator."""
    block = BlockSpec(
        PostNorm,
        nn.LayerNorm,
        AttentionSpec(config.num_heads, dropout=config.attention_dropout),
        FeedForwardSpec(config.d_ff, config.activation, dropout=config.activation_dropout),
        dropout=config.dropout,
    )
    return encoder_decoder(
        config,
        *two_stacks(config, block, decoder_block=decoder_block(config, block)),
        tie="all",
        scale_embeddings=config.scale_embeddings,
        positions=partial(LearnedTable, offset=OFFSET),
        bias=True,
        norm=nn.LayerNorm,
        initializer=normal(0.02),
    )


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    return bart_names(shared=True)


HF = HfConfig(
    model_type="bart",
    classes={"BartForConditionalGeneration": {}, "BartModel": {}},
    fixed=FIXED | {"tie_word_embeddings": True, "normalize_embedding": True},
    defaults=DEFAULTS,
)
ARCHITECTURE = Architecture("bart", Config, build, SIZES, {"hf": Format(HF, hf_names)})
