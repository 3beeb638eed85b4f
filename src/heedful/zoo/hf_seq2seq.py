"""Hugging Face formats of encoder-decoder models: of BART, Marian and PEGASUS, and of T5."""

from typing import Any, get_args

from heedful.errors import UserError
from heedful.parts.feedforward import Activation, Gate
from heedful.zoo.names import Name, Names, layer_names

SIDES = {"encoder": "src_embedding", "decoder": "tgt_embedding"}
HF_EMBEDDING = {
    "tokens": "embed_tokens",
    "positions": "embed_positions",
    "norm": "layernorm_embedding",
}
HF_LAYER = {
    "self_attention.sublayer.qkv": "self_attn.{q,k,v}_proj",
    "self_attention.sublayer.out": "self_attn.out_proj",
    "self_attention.norm": "self_attn_layer_norm",
    "cross_attention.sublayer.q": "encoder_attn.q_proj",
    "cross_attention.sublayer.kv": "encoder_attn.{k,v}_proj",
    "cross_attention.sublayer.out": "encoder_attn.out_proj",
    "cross_attention.norm": "encoder_attn_layer_norm",
    "feedforward.sublayer.up": "fc1",
    "feedforward.sublayer.down": "fc2",
    "feedforward.norm": "final_layer_norm",
}
# Keys of `config.json` with one supported value, for BART, Marian and PEGASUS; those from
# `normalize_before` on are from transformers 3 and before, where one class was all three.
FIXED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}
# Keys of the Config for keys that a file lacks: the values of BART large.
DEFAULTS: dict[str, Any] = {
    "d_model": 1024,
    "num_heads": 16,
    "num_decoder_heads": 16,
    "d_ff": 4096,
    "decoder_d_ff": 4096,
    "num_encoder_layers": 12,
    "num_decoder_layers": 12,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
T5_FEEDFORWARDS: dict[str, Activation | Gate] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "gated-relu": "reglu",
    "gated-gelu": "geglu_tanh",  # in transformers this is the approximation
    "gated-gelu_new": "geglu_tanh",
    "gated-gelu_python": "geglu",
    "gated-silu": "swiglu",
}


def bart_names(*, shared: bool) -> Names:
    """Hugging Face tensor names; `shared`: source and target share one embedding."""
    names = [Name("src_embedding.tokens", "model.shared")] if shared else []
    names.append(Name("head.out.bias", "final_logits_bias", row=True))
    for side, embedding in SIDES.items():
        stack = f"model.{side}"
        names += layer_names(embedding, stack, HF_EMBEDDING)
        names += layer_names(f"{side}.blocks.{{i}}", f"{stack}.layers.{{i}}", HF_LAYER)
    names.append(Name("head.out.weight", "lm_head.weight"))
    return Names(
        names,
        prefix="model.",
        buffers=r"(model\.)?(encoder|decoder)\.version",
        optional=r"head\.out\.bias",  # base models' files lack it
    )


def read_t5(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of the Config that depend on the version of transformers; raises UserError.

    Transformers 5 has `scale_decoder_outputs` in place of `tie_word_embeddings`, and writes the
    latter as true in any case; only the tensors show which matrices are tied (`t5_names`). Newer
    files repeat `feed_forward_proj` in two other keys, which transformers reads.
    """
    projection = content.get("feed_forward_proj", "relu")
    gate, _, name = projection.rpartition("-")
    repeated = {
        "dense_act_fn": "gelu_new" if projection == "gated-gelu" else name,
        "is_gated_act": gate == "gated",
    }
    for key, value in repeated.items():
        if content.get(key, value) != value:
            raise UserError(
                f"config.json: {key} is {content[key]!r}, but feed_forward_proj is {projection!r}"
            )
    tied = content.get("tie_word_embeddings") is not False
    scaled = content.get("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise UserError(
            "config.json: scale_decoder_outputs is True and tie_word_embeddings False; heedful's "
            "t5 scales the outputs of a tied matrix only"
        )
    layers = content.get("num_decoder_layers") or keys["num_encoder_layers"]
    return {"num_decoder_layers": layers, "tie_embeddings": scaled}


def t5_names(config: Any) -> Names:
    """Hugging Face tensor names."""
    names = [Name("src_embedding.tokens", "shared")]
    for side, embedding in SIDES.items():
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        names += [
            Name(f"{embedding}.tokens", f"{side}.embed_tokens"),
            Name(f"{side}.blocks.0.self_attention.sublayer.position", first),
            Name(f"{side}.final_norm", f"{side}.final_layer_norm"),
        ]
        up = "{wi_0,wi_1}" if config.activation in get_args(Gate) else "wi"
        last = 1 if side == "encoder" else 2
        modules = {
            "self_attention.norm": "0.layer_norm",
            "self_attention.sublayer.qkv": "0.SelfAttention.{q,k,v}",
            "self_attention.sublayer.out": "0.SelfAttention.o",
            "cross_attention.norm": "1.layer_norm",
            "cross_attention.sublayer.q": "1.EncDecAttention.q",
            "cross_attention.sublayer.kv": "1.EncDecAttention.{k,v}",
            "cross_attention.sublayer.out": "1.EncDecAttention.o",
            "feedforward.norm": f"{last}.layer_norm",
            "feedforward.sublayer.up": f"{last}.DenseReluDense.{up}",
            "feedforward.sublayer.down": f"{last}.DenseReluDense.wo",
        }
        names += layer_names(f"{side}.blocks.{{i}}", f"{side}.block.{{i}}.layer", modules)
    return Names(
        [*names, Name("head.out", "lm_head")],
        copies={} if config.tie_embeddings else {"lm_head.weight": "shared.weight"},
        # In the first files; no version of the model uses it.
        unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    )
