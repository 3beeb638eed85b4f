"""mBART-50 (Tang et al. 2020, "Multilingual Translation with Extensible Multilingual Pretraining
and Finetuning"), the model of mBART (Liu et al. 2020) for 50 languages.

| size  | layers, each side | d_model | d_ff | heads | vocabulary | parameters |
|-------|-------------------|---------|------|-------|------------|------------|
| large | 12                | 1024    | 4096 | 16    | 250,054    | 611M       |

BART's Transformer with pre-norm, a final norm in each stack, and scaled embeddings (Liu et al.,
sec. 2.2). A source begins with the token of its language, and a target, after the start token </s>,
with that of its own; mBART-25, which has it behind a text, is not supported.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import Activation
from heedful.parts.init import normal
from heedful.parts.residual import PreNorm
from heedful.zoo import bart
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import encoder_decoder
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.hf_tables import (
    BART_DEFAULTS,
    BART_FIXED,
    LAYER_DROPS,
    bart_names,
    final_norm_names,
)
from heedful.zoo.names import Names


@model_config
class Config(bart.Config):
    """Keys as in BART; the defaults are mBART-50."""

    src_vocab_size: Annotated[int, Hf("vocab_size")] = 250054
    tgt_vocab_size: Annotated[int, Hf("vocab_size")] = 250054
    d_model: int = 1024
    num_heads: int = 16
    num_encoder_layers: int = 12
    num_decoder_layers: int = 12
    d_ff: int = 4096
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Activation = "relu"
    scale_embeddings: bool = True


SIZES: dict[str, dict[str, Any]] = {"large": {}}


def build(config: Config) -> EncoderDecoder:
    """A new model with weights N(0, 0.02²) from torch's random generator."""
    return encoder_decoder(
        config,
        *bart.stacks(config, PreNorm, final_norm=True),
        tie="all",
        scale_embeddings=config.scale_embeddings,
        positions=partial(LearnedTable, offset=bart.OFFSET),
        bias=True,
        norm=nn.LayerNorm,
        initializer=normal(0.02),
    )


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names: those of BART, and final norms."""
    names = bart_names(shared=True)
    return replace(names, names=[*names.names, *final_norm_names()])


HF = HfConfig(
    model_type="mbart",
    classes={"MBartForConditionalGeneration": {}, "MBartModel": {}},
    fixed={key: BART_FIXED[key] for key in BART_FIXED.keys() - LAYER_DROPS.keys()}
    | {"normalize_before": True, "add_final_layer_norm": True}
    | {"tie_word_embeddings": True, "normalize_embedding": True},
    idle=LAYER_DROPS,
    defaults={**BART_DEFAULTS, "src_vocab_size": 50265, "tgt_vocab_size": 50265}
    | {"activation": "gelu", "scale_embeddings": False},
)
ARCHITECTURE = Architecture("mbart", Config, build, SIZES, {"hf": Format(HF, hf_names)})
