"""DistilBERT (Sanh et al. 2019, "DistilBERT, a distilled version of BERT").

|      | layers | d_model | heads | d_ff | parameters |
|------|--------|---------|-------|------|------------|
| base | 6      | 768     | 12    | 3072 | 66M        |

BERT with half of the layers, initialized from every second layer of the teacher, without token
types and pooler (sec. 3). Parameters are counted without a head.
"""

from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import sinusoidal_table
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.heads import ClassificationHead
from heedful.parts.residual import PostNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.bert import Head
from heedful.zoo.build import encoder_only
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.hf_tables import encoder_classes, encoder_names
from heedful.zoo.names import Names


@model_config
class Config:
    """Keys as in BERT with the values of the paper; the defaults are its model.

    Args:
        positions: learned, as in the teacher, or sinusoidal, a table that is not trained.
        dropout: dropout probability of embeddings and of outputs of the feed-forward, as in the
            authors' code.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 30522
    d_model: Annotated[int, Hf("dim")] = 768
    num_heads: Annotated[int, Hf("n_heads")] = 12
    num_layers: Annotated[int, Hf("n_layers")] = 6
    d_ff: Annotated[int, Hf("hidden_dim")] = 3072
    max_length: Annotated[int, Hf("max_position_embeddings")] = 512
    positions: Annotated[
        Literal["learned", "sinusoidal"],
        Hf("sinusoidal_pos_embds", values={False: "learned", True: "sinusoidal"}),
    ] = "learned"
    head: Head = "mlm"
    num_labels: int = 2
    dropout: Annotated[float, Hf("dropout")] = 0.1
    attention_dropout: Annotated[float, Hf("attention_dropout")] = 0.1
    classifier_dropout: Annotated[float, Hf("seq_classif_dropout")] = 0.2
    activation: Annotated[Activation, Hf("activation", values=ACTIVATIONS)] = "gelu"
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = True


SIZES: dict[str, dict[str, Any]] = {"base": {}}


def build(config: Config) -> EncoderOnly:
    """A new model with weights N(0, 0.02²) from torch's random generator."""
    # The epsilon of the norms is fixed in the Hugging Face format, too.
    width, norm = config.d_model, partial(nn.LayerNorm, eps=1e-12)

    def block() -> Block:
        attention = Attention(width, config.num_heads, dropout=config.attention_dropout)
        feedforward = FeedForward(width, config.d_ff, config.activation)
        last = PostNorm(feedforward, norm(width), dropout=config.dropout)
        return Block(PostNorm(attention, norm(width)), None, last)

    net = encoder_only(
        config,
        Stack(block() for _ in range(config.num_layers)),
        norm=norm,
        classifier=partial(ClassificationHead, activation="relu"),
    )
    if config.positions == "sinusoidal":
        # A parameter that is not trained, since Hugging Face files hold the table.
        table = net.get_parameter("embedding.positions.weight").requires_grad_(False)
        table.copy_(sinusoidal_table(*table.shape))
    return net


HF_LAYER = {
    "self_attention.sublayer.qkv": "attention.{q,k,v}_lin",
    "self_attention.sublayer.out": "attention.out_lin",
    "self_attention.norm": "sa_layer_norm",
    "feedforward.sublayer.up": "ffn.lin1",
    "feedforward.sublayer.down": "ffn.lin2",
    "feedforward.norm": "output_layer_norm",
}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    heads = {
        "mlm": {
            "head.transform.dense": "vocab_transform",
            "head.transform.norm": "vocab_layer_norm",
            "head.out": "vocab_projector",
        },
        "classify": {"head.dense": "pre_classifier", "head.labels": "classifier"},
    }
    unused = r"vocab_(transform|layer_norm|projector)|(pre_)?classifier"
    return encoder_names(config, "distilbert", ("transformer.layer.{i}", HF_LAYER), heads, unused)


HF = HfConfig(
    model_type="distilbert",
    classes=encoder_classes("DistilBert"),
)
ARCHITECTURE = Architecture("distilbert", Config, build, SIZES, {"hf": Format(HF, hf_names)})
