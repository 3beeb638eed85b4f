"""XLM-RoBERTa (Conneau et al. 2020, "Unsupervised Cross-lingual Representation Learning at Scale").

| size  | layers | d_model | heads | d_ff | parameters |
|-------|--------|---------|-------|------|------------|
| base  | 12     | 768     | 12    | 3072 | 278M       |
| large | 24     | 1024    | 16    | 4096 | 560M       |

RoBERTa on texts in 100 languages, with a vocabulary of 250,002 SentencePiece pieces (sec. 3). The
paper has 270M and 550M parameters.
"""

from dataclasses import replace
from typing import Any

from heedful.zoo import bert, roberta
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.hf_tables import encoder_classes


@model_config
class Config(roberta.Config):
    """Keys as in RoBERTa; the defaults are the base model."""

    vocab_size: int = 250002


SIZES: dict[str, dict[str, Any]] = {"base": {}, "large": bert.SIZES["large"]}
HF = replace(
    roberta.HF,
    model_type="xlm-roberta",
    classes=encoder_classes("XLMRoberta"),
    defaults={**roberta.HF.defaults, "vocab_size": 30522},
)
FORMATS: Formats = {"hf": Format(HF, roberta.hf_names)}  # tensors have RoBERTa's names
ARCHITECTURE = Architecture("xlm_roberta", Config, roberta.build, SIZES, FORMATS)
