"""ModernBERT (Warner et al. 2024, "Smarter, Better, Faster, Longer").

An encoder with norms before the sub-layers and one over the embeddings, which stands for the first
of them, GeGLU, rotary positions and no biases (sec. 2.1.1). Every third layer sees the whole text
and has a rotary base of 160,000, the others see 64 tokens on either side and have one of 10,000
(sec. 2.1.2). Texts side by side in one row do not see each other: no padding is computed.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.feedforward import Activation, Gate
from heedful.parts.heads import ClassificationHead
from heedful.parts.init import shrink_residuals
from heedful.parts.residual import PreNorm
from heedful.parts.rotary import RotaryPositions
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.bert import Head
from heedful.zoo.build import AttentionSpec, BlockSpec, FeedForwardSpec, StackSpec, encoder_only
from heedful.zoo.hf import ACTIVATIONS, GATES, Hf, HfConfig
from heedful.zoo.hf_encoders import encoder_classes, encoder_names
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Names
from heedful.zoo.rope import GLOBAL, LocalLayers, head_width


@model_config
class Config:
    """The paper's sizes and choices (Table 4); the defaults are its base model. As BERT's, and:

    Args:
        window: tokens beside its own that a query of a local layer sees, half of them on each side.
        global_every: the layers of this number and its multiples, counted from 0, are global.
        rope_base: of the global layers; local_rope_base: of the others.
        dropout: on embeddings and hidden units.
        attention_dropout: on attention's weights and outputs.
        head_activation: of either head.
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
    """A new model, its weights drawn from torch's generator once, after tying: N(0, 0.02²).

    Those that end a residual branch are divided by √(2L), as in Megatron (sec. 2.2.2).
    """
    norm, dropout = partial(nn.LayerNorm, eps=config.norm_eps, bias=False), config.attention_dropout
    attention = AttentionSpec(config.num_heads, dropout=dropout, bias=False, out_bias=False)
    mlp = FeedForwardSpec(config.d_ff, config.activation, dropout=config.dropout, bias=False)
    width, seen = head_width(config), config.window // 2 + 1  # its own token counted
    far, near = (RotaryPositions(width, b) for b in (config.rope_base, config.local_rope_base))
    local = replace(attention, position=near, window=seen)
    block = BlockSpec(PreNorm, norm, local, mlp, dropout, feedforward_dropout=0.0)
    whole = replace(block, attention=replace(attention, position=far))
    blocks = [whole if kind == GLOBAL else block for kind in LAYERS.types(config)]
    blocks[0] = replace(blocks[0], attention_norm=nn.Identity)
    activation = config.head_activation
    keys: Any = {"bias": False, "norm": norm(config.d_model), "activation": activation}
    net = encoder_only(
        config,
        StackSpec(config.d_model, blocks, final_norm=norm),
        norm=norm,
        positions=None,
        head_activation=activation,
        head_bias=False,
        classifier=partial(ClassificationHead, **keys),
    )
    shrink_residuals(net)
    return net


def _read(content: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    classes = "ModernBertForSequenceClassification" in (content.get("architectures") or ())
    if classes and content.get("classifier_pooling", "cls") != "cls":
        raise UserError(
            f"config.json: classifier_pooling is {content['classifier_pooling']!r}, but heedful's "
            "classifiers read the state of the first token alone ('cls')"
        )
    keys = LAYERS.read(content, ours)
    if keys.pop("rope_scaling") is not None:
        raise UserError("config.json: heedful's modernbert does not stretch its rotary positions")
    return keys


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
    # The padding's id: their default may be beyond the vocabulary; a tokenizer's takes its place.
    write=lambda c: LAYERS.write(c) | {"pad_token_id": None},
)
ARCHITECTURE = Architecture("modernbert", Config, build, SIZES, {"hf": Format(HF, hf_names)})
