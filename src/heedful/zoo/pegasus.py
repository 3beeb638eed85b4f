"""PEGASUS (Zhang et al. 2020, "PEGASUS: Pre-training with Extracted Gap-sentences for Abstractive
Summarization").

| sec. 5 and 6 | layers, each side | d_model | d_ff | heads | parameters (96,103 entries) |
|--------------|-------------------|---------|------|-------|-----------------------------|
| base         | 12                | 768     | 3072 | 12    | 272M                        |
| large        | 16                | 1024    | 4096 | 16    | 569M                        |

The Transformer of 2017 with pre-norm and a final norm in each stack. As in Marian, position tables
have all sines before all cosines, and the logits have a bias.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import SinusoidalTable
from heedful.parts.feedforward import Activation
from heedful.parts.residual import PreNorm
from heedful.zoo import bart
from heedful.zoo.architectures import Architecture, Format, check_one_vocabulary, model_config
from heedful.zoo.build import encoder_decoder
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.hf_tables import BART_DEFAULTS, BART_FIXED, SIDES, bart_names, final_norm_names
from heedful.zoo.names import Names


@model_config
class Config(bart.Config):
    """Keys as in BART; the defaults are the larger model of the paper.

    Args:
        tie_embeddings: shared matrices: none, or all (source, target and output).
    """

    src_vocab_size: Annotated[int, Hf("vocab_size")] = 96103
    tgt_vocab_size: Annotated[int, Hf("vocab_size")] = 96103
    d_model: int = 1024
    num_heads: int = 16
    num_encoder_layers: int = 16
    num_decoder_layers: int = 16
    d_ff: int = 4096
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Activation = "relu"
    tie_embeddings: Annotated[
        Literal["none", "all"], Hf("tie_word_embeddings", values={True: "all", False: "none"})
    ] = "all"
    scale_embeddings: bool = True

    def check(self) -> None:
        """Raise ValueError if the vocabularies of source and target differ in size."""
        check_one_vocabulary(self)


SIZES: dict[str, dict[str, Any]] = {
    "base": {"d_model": 768, "num_heads": 12, "d_ff": 3072}
    | {"num_encoder_layers": 12, "num_decoder_layers": 12},
    "large": {},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, initialized from torch's random generator."""
    return encoder_decoder(
        config,
        *bart.stacks(config, PreNorm, final_norm=True),
        tie=config.tie_embeddings,
        scale_embeddings=config.scale_embeddings,
        positions=partial(SinusoidalTable, halves=True),
        bias=True,
    )


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names: those of BART, with final norms in place of embedding norms.

    Separate matrices are read by transformers 5 only; earlier versions tie them in any case.
    """
    is_shared = config.tie_embeddings == "all"
    names = bart_names(shared=is_shared)
    tables = {
        f"model.{side}.embed_positions.weight": f"{embedding}.positions.weight"
        for side, embedding in SIDES.items()
    }
    unread = {} if is_shared else {"model.shared.weight": "src_embedding.tokens.weight"}
    return replace(names, names=[*names.names, *final_norm_names()], repeated=tables | unread)


HF = HfConfig(
    model_type="pegasus",
    classes={"PegasusForConditionalGeneration": {}, "PegasusModel": {}},
    fixed=BART_FIXED
    | {"normalize_before": True, "add_final_layer_norm": True}
    | {"normalize_embedding": False, "static_position_embeddings": True},
    defaults={**BART_DEFAULTS, "src_vocab_size": 50265, "tgt_vocab_size": 50265}
    | {"max_length": 1024, "activation": "gelu", "scale_embeddings": False},
)
ARCHITECTURE = Architecture("pegasus", Config, build, SIZES, {"hf": Format(HF, hf_names)})
