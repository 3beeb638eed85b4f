"""ModernBERT (Warner et al. 2024, "Smarter, Better, Faster, Longer").

A pre-norm encoder with GeGLU, rotary positions and no biases; a norm over the embeddings replaces
the first norm of layer 0 (sec. 2.1.1). Every third layer is global, with a rotary base of 160,000;
the others attend to 64 tokens on either side, with a base of 10,000 (sec. 2.1.2). Several texts can
be packed into a row without padding; attention stays within each text.
"""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.feedforward import Activation, FeedForward, Gate
from heedful.parts.heads import ClassificationHead
from heedful.parts.init import shrink_residuals
from heedful.parts.positions import RotaryPositions
from heedful.parts.residual import PreNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.bert import Head
from heedful.zoo.build import encoder_only
from heedful.zoo.hf import ACTIVATIONS, GATES, Hf, HfConfig
from heedful.zoo.hf_tables import encoder_classes, encoder_names
from heedful.zoo.names import Names
from heedful.zoo.rotary import GLOBAL, LocalLayers, head_width


@model_config
class Config:
    """Keys as in BERT with the values of the paper (Table 4); the defaults are its base model.

    Args:
        window: number of other tokens that a query of a local layer attends to, half on each side.
        global_every: period k of global layers: those with index 0, k, 2k and so on.
        rope_base: base of the rotary frequencies of global layers.
        local_rope_base: base of the rotary frequencies of local layers.
        dropout: dropout probability of embeddings and hidden units.
        attention_dropout: dropout probability of attention weights and outputs of attention.
        head_activation: activation of both heads.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 50368
    d_model: Annotated[int, Hf("hidden_size")] = 768
    num_heads: Annotated[int, Hf("num_attention_heads")] = 12
    num_layers: Annotated[int, Hf("num_hidden_layers")] = 22
    d_ff: Annotated[int, Hf("intermediate_size")] = 1152
    max_length: Annotated[int, Hf("max_position_embeddings")] = 8192
    window: Annotated[int, Hf("local_attention")] = 128
    global_every: Annotated[int, Hf("global_attn_every_n_layers")] = 3
    rope_base: Annotated[float, Hf("global_rope_theta")] = 160000.0
    local_rope_base: Annotated[float, Hf("local_rope_theta")] = 10000.0
    head: Head = "mlm"
    num_labels: int = 2
    dropout: Annotated[float, Hf("embedding_dropout", "mlp_dropout")] = 0.0
    attention_dropout: Annotated[float, Hf("attention_dropout")] = 0.0
    classifier_dropout: Annotated[float, Hf("classifier_dropout")] = 0.0
    activation: Annotated[Gate, Hf("hidden_activation", values=GATES)] = "geglu"
    head_activation: Annotated[Activation, Hf("classifier_activation", values=ACTIVATIONS)] = "gelu"
    norm_eps: Annotated[float, Hf("norm_eps")] = 1e-5
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = True


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"d_model": 1024, "num_heads": 16, "num_layers": 28, "d_ff": 2624},
}
LAYERS = LocalLayers(counted_from=0)


def build(config: Config) -> EncoderOnly:
    """A new model with weights N(0, 0.02²) from torch's random generator.

    The last weight of each residual branch is divided by √(2L), as in Megatron (sec. 2.2.2).
    """
    width, dropout = config.d_model, config.attention_dropout
    norm = partial(nn.LayerNorm, eps=config.norm_eps, bias=False)
    global_rope = RotaryPositions(head_width(config), config.rope_base)
    local_rope = RotaryPositions(head_width(config), config.local_rope_base)

    def block(number: int, kind: str) -> Block:
        attention = Attention(
            width,
            config.num_heads,
            position=global_rope if kind == GLOBAL else local_rope,
            # Half of the window on each side, and the token itself.
            window=None if kind == GLOBAL else config.window // 2 + 1,
            dropout=dropout,
            bias=False,
            out_bias=False,
        )
        feedforward = FeedForward(
            width, config.d_ff, config.activation, dropout=config.dropout, bias=False
        )
        first_norm = norm(width) if number else nn.Identity()
        first = PreNorm(attention, first_norm, dropout=dropout)
        return Block(first, None, PreNorm(feedforward, norm(width)))

    blocks = [block(number, kind) for number, kind in enumerate(LAYERS.types(config))]
    keys: Any = {"norm": norm(width), "activation": config.head_activation}
    net = encoder_only(
        config,
        Stack(blocks, norm(width)),
        norm=norm,
        positions=None,
        head_activation=config.head_activation,
        head_bias=False,
        classifier=partial(ClassificationHead, bias=False, **keys),
    )
    shrink_residuals(net)
    return net


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    classes = "ModernBertForSequenceClassification" in (content.get("architectures") or ())
    if classes and content.get("classifier_pooling", "cls") != "cls":
        raise UserError(
            f"config.json: classifier_pooling is {content['classifier_pooling']!r}, but heedful's "
            "classifiers use the state of the first token ('cls')"
        )
    rope = LAYERS.read(content, keys)
    if rope.pop("rope_scaling") is not None:
        raise UserError("config.json: heedful's modernbert does not support rope_scaling")
    return rope


HF_LAYER = {
    "self_attention.norm": "attn_norm",
    "self_attention.sublayer.qkv": "attn.Wqkv",
    "self_attention.sublayer.out": "attn.Wo",
    "feedforward.norm": "mlp_norm",
    "feedforward.sublayer.up": "mlp.Wi",
    "feedforward.sublayer.down": "mlp.Wo",
}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names; both heads have the same first matrix and norm."""
    final = {"encoder.final_norm": "model.final_norm"}
    heads = {
        "mlm": {f"head.transform.{name}": f"head.{name}" for name in ("dense", "norm")}
        | {"head.out": "decoder", **final},
        "classify": {"head.labels": "classifier", **final}
        | {f"head.{name}": f"head.{name}" for name in ("dense", "norm")},
        "none": final,
    }
    unused = r"head\.(dense|norm)|decoder|classifier"
    embeddings = {"tokens": "tok_embeddings", "norm": "norm"}
    return encoder_names(config, "model", ("layers.{i}", HF_LAYER), heads, unused, embeddings)


HF = HfConfig(
    model_type="modernbert",
    classes=encoder_classes("ModernBert"),
    fixed=dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False)
    | {"decoder_bias": True},
    read=_read,
    # The default pad_token_id of transformers may exceed the vocabulary; the tokenizer sets it.
    write=lambda c: LAYERS.write(c) | {"pad_token_id": None},
)
ARCHITECTURE = Architecture("modernbert", Config, build, SIZES, {"hf": Format(HF, hf_names)})
