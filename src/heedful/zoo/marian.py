"""Marian's Transformer (Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in
C++"), which the translators of OPUS-MT are (Tiedemann and Thottingal 2020).

| their recipe                    | layers, each side | d_model | d_ff | heads | vocabulary       |
|---------------------------------|-------------------|---------|------|-------|------------------|
| base: OPUS-MT transformer-align | 6                 | 512     | 2048 | 8     | differs by pair  |
| big: OPUS-MT transformer-big    | 6                 | 1024    | 4096 | 16    | differs by pair  |

The Transformer of 2017 with a bias on the logits, a feed-forward with swish (base) or ReLU (big),
and position tables that hold all sines before all cosines.
"""

import math
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, xavier
from heedful.parts.positions import Sinusoidal
from heedful.zoo import bart
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """Sizes and choices; the defaults are OPUS-MT's, with the vocabulary of English to German.

    Args:
        num_heads, d_ff: of both stacks, unless the decoder has its own.
        num_decoder_heads, decoder_d_ff: the decoder's; None: as the encoder's.
        max_length: longest source and longest target, in tokens.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout, activation_dropout: on attention weights and on hidden units.
        tie_embeddings: none; decoder: target and output; all: source, target and output.
        scale_embeddings: multiply them by √d_model.
    """

    src_vocab_size: int = 58101
    tgt_vocab_size: int = 58101
    d_model: int = 512
    num_heads: int = 8
    num_decoder_heads: int | None = None
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int = 2048
    decoder_d_ff: int | None = None
    max_length: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: Activation = "silu"
    tie_embeddings: Literal["none", "decoder", "all"] = "all"
    scale_embeddings: bool = True

    def __post_init__(self) -> None:
        bart.check_stacks(self)
        if self.tie_embeddings == "all":
            bart.check_one_vocabulary(self)


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "max_length": 1024}
    | {"activation": "relu"},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, its weights drawn from torch's generator once, after tying."""
    tgt_tokens = nn.Embedding(config.tgt_vocab_size, config.d_model)
    src_tokens = tgt_tokens
    if config.tie_embeddings != "all":
        src_tokens = nn.Embedding(config.src_vocab_size, config.d_model)
    tied = config.tie_embeddings != "none"
    head = tgt_tokens.weight if tied else nn.Parameter(torch.empty_like(tgt_tokens.weight))
    net = EncoderDecoder(
        _embedding(config, src_tokens),
        bart.encoder(config),
        _embedding(config, tgt_tokens),
        bart.decoder(config),
        OutputProjection(head, bias=bart.logits_bias(config)),
    )
    init_weights(net, draw)
    return net


def draw(module: nn.Module, name: str, parameter: Tensor) -> None:
    """As Marian's code: Glorot's uniform draw, whose fan of an embedding is its width alone."""
    if isinstance(module, nn.Embedding):
        bound = math.sqrt(3 / parameter.size(1))
        nn.init.uniform_(parameter, -bound, bound)
    else:
        xavier(module, name, parameter)


def _embedding(config: Config, tokens: nn.Embedding) -> TokenEmbedding:
    return TokenEmbedding(
        tokens,
        Sinusoidal(halves=True).build(config.max_length, config.d_model),
        scale=math.sqrt(config.d_model) if config.scale_embeddings else 1.0,
        dropout=config.dropout,
    )


def _read(given: dict[str, Any]) -> dict[str, Any]:
    shared, tied = given["share_encoder_decoder_embeddings"], given["tie_word_embeddings"]
    if shared and not tied:
        raise UserError(
            "config.json: tie_word_embeddings is False where share_encoder_decoder_embeddings is "
            "True; heedful builds all matrices shared, target and output shared, or none"
        )
    return {
        "tgt_vocab_size": given["decoder_vocab_size"] or given["vocab_size"],
        "tie_embeddings": "all" if shared else "decoder" if tied else "none",
        **bart.read_decoder(given),
    }


def _write(config: Config) -> dict[str, Any]:
    return {
        "decoder_vocab_size": config.tgt_vocab_size,
        "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
        "tie_word_embeddings": config.tie_embeddings != "none",
        # Theirs is 58100 where a file says nothing, which a smaller embedding refuses.
        "pad_token_id": None,
        **bart.write_decoder(config),
    }


HF = HfFormat(
    model_type="marian",
    classes={"MarianMTModel": {}, "MarianModel": {}},
    keys=bart.HF_KEYS,
    values={"activation_function": ("activation", bart.HF_ACTIVATIONS)},
    fixed=bart.HF_FIXED | {"normalize_embedding": (False,), "static_position_embeddings": (True,)},
    defaults=bart.HF_DEFAULTS
    | {
        "vocab_size": 58101,
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
    },
    read=_read,
    write=_write,
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    source, target = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
    shared, head = "model.shared.weight", "lm_head.weight"
    names, aliases = bart.layer_names(), {}
    if config.tie_embeddings == "all":
        names.append(Name("src_embedding.tokens.weight", shared))
        aliases = dict.fromkeys((source, target, head), shared)
    else:
        names.append(Name("src_embedding.tokens.weight", source))
        names.append(Name("tgt_embedding.tokens.weight", target))
        aliases = {head: target}
    if config.tie_embeddings == "none":
        names.append(Name("head.weight", head))
        aliases = {}
    return Names(
        tuple(names),
        prefix="model.",
        aliases=aliases,
        buffers=(r"(model\.)?(encoder|decoder)\.embed_positions\.weight",),
        optional=("head.bias",),
    )
