"""M2M100 (Fan et al. 2021, "Beyond English-Centric Multilingual Machine Translation"), and NLLB
(NLLB Team 2022, "No Language Left Behind"), its descendant for 200 languages.

| size      | layers, each side | d_model | d_ff | heads | vocabulary | parameters |
|-----------|-------------------|---------|------|-------|------------|------------|
| 418m      | 12                | 1024    | 4096 | 16    | 128,112    | 484M       |
| 1.2b      | 24                | 1024    | 8192 | 16    | 128,112    | 1.24B      |
| nllb-600m | 12                | 1024    | 4096 | 16    | 256,206    | 615M       |
| nllb-1.3b | 24                | 1024    | 8192 | 16    | 256,206    | 1.37B      |
| nllb-3.3b | 24                | 2048    | 8192 | 16    | 256,206    | 3.34B      |

The Transformer of 2017 with pre-norm, a final norm in each stack, and one matrix for source, target
and output, without a bias of the logits. A source begins with the token of its language, and a
target, after the start token </s>, with that of its own. Positions are those of fairseq:
all sines before all cosines, the last frequency 1/10,000, and the first position after the id of
padding. In training fairseq drops whole layers, too; heedful does not.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import SinusoidalTable
from heedful.parts.feedforward import Activation
from heedful.parts.residual import PreNorm
from heedful.zoo import bart
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import encoder_decoder
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.hf_tables import (
    BART_DEFAULTS,
    LAYER_DROPS,
    bart_names,
    final_norm_names,
    offset_from_hf,
    offset_to_hf,
)
from heedful.zoo.names import Names


@model_config
class Config(bart.Config):
    """Keys as in BART; the defaults are the smaller M2M100.

    Args:
        position_offset: the first position: the id of padding plus one.
    """

    src_vocab_size: Annotated[int, Hf("vocab_size")] = 128112
    tgt_vocab_size: Annotated[int, Hf("vocab_size")] = 128112
    d_model: int = 1024
    num_heads: int = 16
    num_encoder_layers: int = 12
    num_decoder_layers: int = 12
    d_ff: int = 4096
    activation_dropout: float = 0.0
    activation: Activation = "relu"
    scale_embeddings: bool = True
    position_offset: int = 2

    def check(self) -> None:
        """Raise ValueError for a width for which the position tables are not defined."""
        if self.d_model % 2 or self.d_model < 4:
            raise ValueError(f"d_model must be even and at least 4, not {self.d_model}")


_DEEP: dict[str, Any] = {"num_encoder_layers": 24, "num_decoder_layers": 24, "d_ff": 8192}
_NLLB: dict[str, Any] = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), 256206)
SIZES: dict[str, dict[str, Any]] = {
    "418m": {},
    "1.2b": _DEEP,
    "nllb-600m": _NLLB,
    "nllb-1.3b": _NLLB | _DEEP,
    "nllb-3.3b": _NLLB | _DEEP | {"d_model": 2048},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, initialized from torch's random generator."""
    return encoder_decoder(
        config,
        *bart.stacks(config, PreNorm, final_norm=True),
        tie="all",
        scale_embeddings=config.scale_embeddings,
        positions=partial(
            SinusoidalTable, halves=True, inclusive=True, offset=config.position_offset
        ),
    )


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names: those of BART, with final norms in place of embedding norms."""
    names = bart_names(shared=True)
    return replace(
        names,
        names=[*names.names, *final_norm_names()],
        buffers=rf"{names.buffers}|(model\.)?(encoder|decoder)\.embed_positions\.weights",
        optional="",
    )


HF = HfConfig(
    model_type="m2m_100",
    classes={"M2M100ForConditionalGeneration": {}, "M2M100Model": {}},
    fixed={"is_encoder_decoder": True, "is_decoder": False, "tie_word_embeddings": True},
    idle=LAYER_DROPS,
    defaults=BART_DEFAULTS | {"attention_dropout": 0.1},
    read=offset_from_hf,
    write=offset_to_hf,
)
ARCHITECTURE = Architecture("m2m100", Config, build, SIZES, {"hf": Format(HF, hf_names)})
