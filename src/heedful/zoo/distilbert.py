"""DistilBERT (Sanh et al. 2019, "DistilBERT, a distilled version of BERT").

|      | layers | d_model | heads | d_ff | parameters |
|------|--------|---------|-------|------|------------|
| base | 6      | 768     | 12    | 3072 | 66M        |

BERT with half its layers, which started as every second one of their teacher's, without the
embedding of types and without the pooler (sec. 3). The parameters are counted without a head.
"""

from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.init import init_weights, normal
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned, sinusoidal_table
from heedful.parts.residual import PostNorm
from heedful.zoo.bert import (
    HF_ACTIVATIONS,
    Head,
    labels_from_hf,
    labels_to_hf,
    output_weights,
    weight_and_bias,
)
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names

NORM = LayerNorm(eps=1e-12)  # no choice over there either


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are its model.

    Args:
        positions: learned, as the teacher's; sinusoidal: a table that is not trained.
        head: mlm: logits of the token at each position; classify: logits of the text's class, from
            the state of its first token; none: the states.
        num_labels: classes of the text; of the head classify alone.
        max_length: longest text, or pair of texts, in tokens.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout: on the attention weights.
        classifier_dropout: on what the matrix of classes reads.
        tie_embeddings: one matrix for input and output; of the head mlm alone.
    """

    vocab_size: int = 30522
    d_model: int = 768
    num_heads: int = 12
    num_layers: int = 6
    d_ff: int = 3072
    max_length: int = 512
    positions: Literal["learned", "sinusoidal"] = "learned"
    head: Head = "mlm"
    num_labels: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float = 0.2
    activation: Activation = "gelu"
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


SIZES: dict[str, dict[str, Any]] = {"base": {}}


def build(config: Config) -> EncoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying: all N(0, 0.02²)."""
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    positions = Learned().build(config.max_length, config.d_model)
    net = EncoderOnly(
        TokenEmbedding(tokens, positions, dropout=config.dropout, norm=NORM.build(config.d_model)),
        Stack(_block(config) for _ in range(config.num_layers)),
        _head(config, tokens.weight),
    )
    init_weights(net, normal(0.02))
    if config.positions == "sinusoidal":
        _fix(positions)
    return net


def _fix(positions: nn.Module) -> None:
    """Sinusoids that stay: a parameter all the same, since their files hold the table."""
    table = positions.get_parameter("weight")
    with torch.no_grad():
        table.copy_(sinusoidal_table(*table.shape))
    table.requires_grad_(False)


def _block(config: Config) -> Block:
    width = config.d_model
    attention = Attention(width, config.num_heads, dropout=config.attention_dropout)
    mlp = Mlp(width, config.d_ff, config.activation)
    return Block(
        PostNorm(attention, NORM.build(width), dropout=config.dropout),
        None,
        PostNorm(mlp, NORM.build(width), dropout=config.dropout),
    )


def _head(config: Config, embedding: Tensor) -> MaskedTokenHead | ClassificationHead | None:
    if config.head == "mlm":
        weight, bias = output_weights(config.tie_embeddings, embedding)
        return MaskedTokenHead(weight, bias, NORM.build(config.d_model), config.activation)
    if config.head == "classify":
        return ClassificationHead(
            config.d_model, config.num_labels, activation="relu", dropout=config.classifier_dropout
        )
    return None


HF = HfFormat(
    model_type="distilbert",
    classes={
        "DistilBertForMaskedLM": {"head": "mlm"},
        "DistilBertForSequenceClassification": {"head": "classify"},
        "DistilBertModel": {"head": "none"},
    },
    keys={
        "vocab_size": "vocab_size",
        "dim": "d_model",
        "n_heads": "num_heads",
        "n_layers": "num_layers",
        "hidden_dim": "d_ff",
        "max_position_embeddings": "max_length",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "seq_classif_dropout": "classifier_dropout",
        "tie_word_embeddings": "tie_embeddings",
    },
    values={
        "activation": ("activation", HF_ACTIVATIONS),
        "sinusoidal_pos_embds": ("positions", {False: "learned", True: "sinusoidal"}),
    },
    read=labels_from_hf,
    write=lambda config: labels_to_hf(config.num_labels),
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    layer, block = "distilbert.transformer.layer.{i}.", "encoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    words = "distilbert.embeddings.word_embeddings.weight"
    names = [
        Name("embedding.tokens.weight", words),
        Name("embedding.positions.weight", "distilbert.embeddings.position_embeddings.weight"),
    ]
    joined = [f"{layer}attention.{part}_lin" for part in ("q", "k", "v")]
    names += weight_and_bias(f"{attention}sublayer.qkv", *joined)
    for ours, theirs in (
        ("embedding.norm", "distilbert.embeddings.LayerNorm"),
        (f"{attention}sublayer.out", f"{layer}attention.out_lin"),
        (f"{attention}norm", f"{layer}sa_layer_norm"),
        (f"{mlp}sublayer.up", f"{layer}ffn.lin1"),
        (f"{mlp}sublayer.down", f"{layer}ffn.lin2"),
        (f"{mlp}norm", f"{layer}output_layer_norm"),
    ):
        names += weight_and_bias(ours, theirs)
    aliases: dict[str, str] = {}
    if config.head == "mlm":
        names += weight_and_bias("head.transform", "vocab_transform")
        names += weight_and_bias("head.norm", "vocab_layer_norm")
        names.append(Name("head.bias", "vocab_projector.bias"))
        if config.tie_embeddings:
            aliases = {"vocab_projector.weight": words}
        else:
            names.append(Name("head.weight", "vocab_projector.weight"))
    elif config.head == "classify":
        names += weight_and_bias("head.dense", "pre_classifier")
        names += weight_and_bias("head.out", "classifier")
    return Names(
        tuple(names),
        prefix="distilbert.",
        aliases=aliases,
        buffers=(r"distilbert\.embeddings\.position_ids",),
        unused=(
            r"vocab_(transform|layer_norm|projector)\.(weight|bias)",
            r"(pre_)?classifier\.(weight|bias)",
        ),
        optional=(r"head\..+",) if config.head == "classify" else (),
    )
