"""The Transformer of Marian (Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation
in C++"), used by the models of OPUS-MT (Tiedemann and Thottingal 2020).

| recipe                          | layers, each side | d_model | d_ff | heads | vocabulary       |
|---------------------------------|-------------------|---------|------|-------|------------------|
| base: OPUS-MT transformer-align | 6                 | 512     | 2048 | 8     | differs by pair  |
| big: OPUS-MT transformer-big    | 6                 | 1024    | 4096 | 16    | differs by pair  |

The Transformer of 2017 with a bias on the logits, a feed-forward with swish (base) or ReLU (big),
and position tables with all sines before all cosines.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import SinusoidalTable
from heedful.parts.feedforward import Activation
from heedful.parts.init import xavier
from heedful.parts.residual import PostNorm
from heedful.zoo import bart
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import Tying, encoder_decoder
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.hf_tables import BART_DEFAULTS, BART_FIXED, bart_names
from heedful.zoo.names import Names


@model_config
class Config(bart.Config):
    """Keys as in BART; the defaults are those of OPUS-MT, with the vocabulary of English to German.

    Args:
        src_vocab_size: entries of the vocabulary of sources, which follow from the tokenizer.
        tgt_vocab_size: entries of the vocabulary of targets, which follow from the tokenizer.
        tie_embeddings: shared matrices: none; decoder: target and output; all: source, target and
            output.
    """

    src_vocab_size: int = 58101
    tgt_vocab_size: Annotated[int, Hf("decoder_vocab_size")] = 58101
    d_model: int = 512
    num_heads: int = 8
    d_ff: int = 2048
    max_length: int = 512
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Activation = "silu"
    tie_embeddings: Tying = "all"
    scale_embeddings: bool = True


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "max_length": 1024}
    | {"activation": "relu"},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, initialized from torch's random generator."""
    return encoder_decoder(
        config,
        *bart.stacks(config, PostNorm),
        tie=config.tie_embeddings,
        scale_embeddings=config.scale_embeddings,
        positions=partial(SinusoidalTable, halves=True),
        bias=True,
        initializer=init_weight,
    )


def init_weight(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Glorot uniform, as in the code of Marian; the fan of an embedding is its width."""
    if isinstance(module, nn.Embedding):
        bound = math.sqrt(3 / parameter.size(1))
        nn.init.uniform_(parameter, -bound, bound)
    else:
        xavier(module, name, parameter)


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    shared = content.get("share_encoder_decoder_embeddings", True)
    tied = content.get("tie_word_embeddings", True)
    if shared and not tied:
        raise UserError(
            "config.json: tie_word_embeddings is False and share_encoder_decoder_embeddings True; "
            "heedful supports all three matrices shared, target and output shared, or none"
        )
    return {
        "tgt_vocab_size": content.get("decoder_vocab_size") or keys["src_vocab_size"],
        "tie_embeddings": "all" if shared else "decoder" if tied else "none",
    }


def _write(config: Config) -> dict[str, Any]:
    return {
        "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
        "tie_word_embeddings": config.tie_embeddings != "none",
        # The default of transformers is 58100, which a smaller embedding refuses.
        "pad_token_id": None,
    }


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names: those of BART without position tables and embedding norms."""
    return replace(
        bart_names(shared=config.tie_embeddings == "all"),
        buffers=r"(model\.)?(encoder|decoder)\.embed_positions\.weight",
    )


HF = HfConfig(
    model_type="marian",
    classes={"MarianMTModel": {}, "MarianModel": {}},
    fixed=BART_FIXED | {"normalize_embedding": False, "static_position_embeddings": True},
    defaults=BART_DEFAULTS | {"max_length": 1024, "activation": "gelu", "scale_embeddings": False},
    read=_read,
    write=_write,
)
ARCHITECTURE = Architecture("marian", Config, build, SIZES, {"hf": Format(HF, hf_names)})
