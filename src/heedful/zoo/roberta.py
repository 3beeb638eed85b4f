"""RoBERTa (Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

|       | layers | d_model | heads | d_ff | parameters |
|-------|--------|---------|-------|------|------------|
| base  | 12     | 768     | 12    | 3072 | 125M       |
| large | 24     | 1024    | 16    | 4096 | 355M       |

BERT's encoder on byte-level BPE (sec. 4.4), trained longer, on more text, with a new random mask in
every epoch (sec. 4.1) and on masked tokens only (sec. 4.2). It has no pooler and one token type:
sentence pairs are separated by tokens.
"""

from functools import partial
from typing import Any

from torch import nn

from heedful.models.encoder_only import EncoderOnly
from heedful.parts.embeddings import LearnedTable
from heedful.parts.heads import ClassificationHead
from heedful.zoo import bert
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import classifier_dropout, encoder_only
from heedful.zoo.hf import HfConfig
from heedful.zoo.hf_tables import (
    BERT_FIXED,
    BERT_LAYER,
    encoder_classes,
    encoder_names,
    offset_from_hf,
    offset_to_hf,
    output_names,
)
from heedful.zoo.names import Names


@model_config
class Config(bert.Config):
    """Keys as in BERT with the values of the paper; the defaults are its base model.

    Args:
        position_offset: unused rows of the position table before that of the first token: in
            published files, the id of padding plus one.
    """

    vocab_size: int = 50265
    type_vocab_size: int = 1
    norm_eps: float = 1e-5
    position_offset: int = 2


SIZES: dict[str, dict[str, Any]] = {"base": {}, "large": bert.SIZES["large"]}


def build(config: Config) -> EncoderOnly:
    """A new model with weights N(0, 0.02²) from torch's random generator."""
    return encoder_only(
        config,
        bert.encoder(config),
        norm=partial(nn.LayerNorm, eps=config.norm_eps),
        num_types=config.type_vocab_size,
        positions=partial(LearnedTable, offset=config.position_offset),
        head_activation="gelu",
        classifier=partial(ClassificationHead, input_dropout=classifier_dropout(config)),
    )


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    offset = offset_from_hf(content, keys)
    return {**offset, "max_length": keys["max_length"] - offset["position_offset"]}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names. The pooler in published files was never trained."""
    heads = {
        "mlm": {
            "head.transform.dense": "lm_head.dense",
            "head.transform.norm": "lm_head.layer_norm",
        }
        | output_names(config, "lm_head"),
        "classify": {"head.dense": "classifier.dense", "head.labels": "classifier.out_proj"},
    }
    unused = r"roberta\.pooler\.dense|lm_head(\..+)?|classifier\.(dense|out_proj)"
    layer = "encoder.layer.{i}", BERT_LAYER
    return encoder_names(config, "roberta", layer, heads, unused)


HF = HfConfig(
    model_type="roberta",
    classes=encoder_classes("Roberta"),
    fixed=BERT_FIXED,
    defaults={"norm_eps": 1e-12, "type_vocab_size": 2},
    read=_read,
    write=lambda config: {
        **offset_to_hf(config),
        "max_position_embeddings": config.max_length + config.position_offset,
    },
)
ARCHITECTURE = Architecture("roberta", Config, build, SIZES, {"hf": Format(HF, hf_names)})
