"""BERT (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers").

Base and large are from the paper (sec. 3), the other sizes from Turc et al. 2019, "Well-Read
Students Learn Better". The encoder of Vaswani et al. 2017 with GELU, learned positions, a token
type embedding (first or second text of a pair), and a norm over the sum of the three embeddings
(fig. 2). Parameters are counted with both heads of the pre-training.
"""

from functools import partial
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.init import normal
from heedful.parts.residual import PostNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import encoder_only
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.hf_tables import (
    BERT_FIXED,
    BERT_LAYER,
    encoder_classes,
    encoder_names,
    output_names,
)
from heedful.zoo.names import Names

Head = Literal["mlm", "classify", "none"]


@model_config
class Config:
    """The paper's sizes and choices; the defaults are its base model.

    Args:
        head: the output: mlm, logits of the token at each position (sec. 3.1, task 1); classify,
            class logits of the text, from the state of its first token (fig. 4, a and b); none, the
            states.
        num_labels: number of classes, for the head classify.
        max_length: longest text, or pair of texts, in tokens.
        type_vocab_size: number of token types.
        classifier_dropout: dropout probability before the linear layer of the classes; None: as
            `dropout`.
        tie_embeddings: one matrix for input and output, for the head mlm.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 30522
    d_model: Annotated[int, Hf("hidden_size")] = 768
    num_heads: Annotated[int, Hf("num_attention_heads")] = 12
    num_layers: Annotated[int, Hf("num_hidden_layers")] = 12
    d_ff: Annotated[int, Hf("intermediate_size")] = 3072
    max_length: Annotated[int, Hf("max_position_embeddings")] = 512
    type_vocab_size: Annotated[int, Hf("type_vocab_size")] = 2
    head: Head = "mlm"
    num_labels: int = 2
    dropout: Annotated[float, Hf("hidden_dropout_prob")] = 0.1
    attention_dropout: Annotated[float, Hf("attention_probs_dropout_prob")] = 0.1
    classifier_dropout: Annotated[float | None, Hf("classifier_dropout")] = None
    activation: Annotated[Activation, Hf("hidden_act", values=ACTIVATIONS)] = "gelu"
    norm_eps: Annotated[float, Hf("layer_norm_eps")] = 1e-12
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = True


SIZES: dict[str, dict[str, Any]] = {  # and their parameters
    "tiny": {"d_model": 128, "num_heads": 2, "num_layers": 2, "d_ff": 512},  # 4.4M
    "mini": {"d_model": 256, "num_heads": 4, "num_layers": 4, "d_ff": 1024},  # 11.3M
    "small": {"d_model": 512, "num_heads": 8, "num_layers": 4, "d_ff": 2048},  # 29.1M
    "medium": {"d_model": 512, "num_heads": 8, "num_layers": 8, "d_ff": 2048},  # 41.7M
    "base": {},  # 110.1M
    "large": {"d_model": 1024, "num_heads": 16, "num_layers": 24, "d_ff": 4096},  # 336.2M
}


def build(config: Config) -> EncoderOnly:
    """A new model, initialized from torch's random generator.

    As in the authors' code, weights are N(0, 0.02²), truncated at two standard deviations.
    """
    return encoder_only(
        config,
        encoder(config),
        norm=partial(nn.LayerNorm, eps=config.norm_eps),
        num_types=config.type_vocab_size,
        initializer=_truncated_normal,
    )


def encoder(config: Config) -> Stack:
    """The blocks of BERT and RoBERTa."""
    width, residual = config.d_model, partial(PostNorm, dropout=config.dropout)
    norm = partial(nn.LayerNorm, width, eps=config.norm_eps)

    def block() -> Block:
        attention = Attention(width, config.num_heads, dropout=config.attention_dropout)
        feedforward = FeedForward(width, config.d_ff, config.activation)
        return Block(residual(attention, norm()), None, residual(feedforward, norm()))

    return Stack(block() for _ in range(config.num_layers))


def _truncated_normal(module: nn.Module, name: str, parameter: Tensor) -> None:
    if parameter.dim() > 1:
        nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
    else:
        normal(0.02)(module, name, parameter)


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names.

    The pooler is the first matrix of the head classify and unused by other heads; the head of the
    second pre-training task (sec. 3.1) is unused.
    """
    heads = {
        "mlm": {
            "head.transform.dense": "cls.predictions.transform.dense",
            "head.transform.norm": "cls.predictions.transform.LayerNorm",
        }
        | output_names(config, "cls.predictions"),
        "classify": {"head.dense": "bert.pooler.dense", "head.labels": "classifier"},
    }
    unused = r"bert\.pooler\.dense|cls\.(predictions(\..+)?|seq_relationship)|classifier"
    return encoder_names(config, "bert", ("encoder.layer.{i}", BERT_LAYER), heads, unused)


HF = HfConfig(
    model_type="bert",
    classes=encoder_classes("Bert") | {"BertForPreTraining": {"head": "mlm"}},
    fixed=BERT_FIXED,
)
ARCHITECTURE = Architecture("bert", Config, build, SIZES, {"hf": Format(HF, hf_names)})
