"""RoBERTa (Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

|       | layers | d_model | heads | d_ff | parameters |
|-------|--------|---------|-------|------|------------|
| base  | 12     | 768     | 12    | 3072 | 125M       |
| large | 24     | 1024    | 16    | 4096 | 355M       |

BERT's encoder on byte-level BPE (sec. 4.4), trained longer, on more text, with masks drawn anew
each time (sec. 4.1) and on masked tokens alone (sec. 4.2). So there is no pooler, and a text's type
says nothing: pairs are told apart by their separators.
"""

from functools import partial
from typing import Any

from torch import nn

from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead
from heedful.parts.positions import LearnedTable
from heedful.parts.residual import PostNorm
from heedful.zoo import bert
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.build import (
    AttentionSpec,
    BlockSpec,
    FeedForwardSpec,
    StackSpec,
    classifier_dropout,
    encoder_only,
)
from heedful.zoo.hf import HfConfig
from heedful.zoo.hf_encoders import FIXED, HF_LAYER, encoder_classes, encoder_names, output_names
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Names


@model_config
class Config(bert.Config):
    """BERT's keys with the paper's values; the defaults are its base model.

    Args:
        position_offset: rows of the position table before that of the first token. Their files have
            one for each id up to the padding's, so that this is the padding's id plus one.
    """

    vocab_size: int = 50265
    type_vocab_size: int = 1
    norm_eps: float = 1e-5
    position_offset: int = 2


SIZES: dict[str, dict[str, Any]] = {"base": {}, "large": bert.SIZES["large"]}


def build(config: Config) -> EncoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying: all N(0, 0.02²)."""
    norm = partial(nn.LayerNorm, eps=config.norm_eps)
    block = BlockSpec(
        PostNorm,
        norm,
        AttentionSpec(config.num_heads, dropout=config.attention_dropout),
        FeedForwardSpec(config.d_ff, config.activation),
        dropout=config.dropout,
    )
    encoder = StackSpec(config.d_model, [block] * config.num_layers)
    return encoder_only(
        config,
        encoder,
        norm=norm,
        num_types=config.type_vocab_size,
        positions=partial(LearnedTable, offset=config.position_offset),
        head_activation="gelu",
        classifier=partial(ClassificationHead, input_dropout=classifier_dropout(config)),
    )


def _read(content: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    pad_id = content.get("pad_token_id", 1)
    if pad_id is None:
        raise UserError("config.json: pad_token_id is null, but RoBERTa counts positions from it")
    return {"position_offset": pad_id + 1, "max_length": ours["max_length"] - (pad_id + 1)}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names. The pooler of their files was never trained."""
    heads = {
        "mlm": {
            "head.transform.dense": "lm_head.dense",
            "head.transform.norm": "lm_head.layer_norm",
        }
        | output_names(config, "lm_head"),
        "classify": {"head.dense": "classifier.dense", "head.labels": "classifier.out_proj"},
    }
    unused = r"roberta\.pooler\.dense|lm_head(\..+)?|classifier\.(dense|out_proj)"
    layer = "encoder.layer.{i}", HF_LAYER
    return encoder_names(config, "roberta", layer, heads, unused)


HF = HfConfig(
    model_type="roberta",
    classes=encoder_classes("Roberta"),
    fixed=FIXED,
    defaults={"norm_eps": 1e-12, "type_vocab_size": 2},
    read=_read,
    write=lambda config: {
        "pad_token_id": config.position_offset - 1,
        "max_position_embeddings": config.max_length + config.position_offset,
    },
)
ARCHITECTURE = Architecture("roberta", Config, build, SIZES, {"hf": Format(HF, hf_names)})
