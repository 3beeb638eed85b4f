"""Keys and tensor names of the Hugging Face format that several models share."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

import torch
from torch import nn

from heedful.errors import UserError
from heedful.parts.feedforward import Activation, Gate
from heedful.zoo import architecture
from heedful.zoo.names import Name, Names, layer_names
from heedful.zoo.saved import make_config, uninitialized_net

BERT_EMBEDDINGS = {
    "tokens": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
# Keys of `config.json` with one supported value, for BERT and RoBERTa.
BERT_FIXED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
BERT_LAYER = {
    "self_attention.sublayer.qkv": "attention.self.{query,key,value}",
    "self_attention.sublayer.out": "attention.output.dense",
    "self_attention.norm": "attention.output.LayerNorm",
    "feedforward.sublayer.up": "intermediate.dense",
    "feedforward.sublayer.down": "output.dense",
    "feedforward.norm": "output.LayerNorm",
}


def encoder_classes(name: str) -> dict[str, dict[str, Any]]:
    """Hugging Face classes of a model, with their heads."""
    ends = {"ForMaskedLM": "mlm", "ForSequenceClassification": "classify", "Model": "none"}
    return {f"{name}{end}": {"head": head} for end, head in ends.items()}


def output_names(config: Any, hf_name: str) -> dict[str, str]:
    """Names of the output matrix and its bias.

    Files hold the bias twice. With tied embeddings both are one tensor; otherwise the model adds
    the one next to the matrix, and the other is unused.
    """
    first = {"head.out.bias": f"{hf_name}.bias"} if config.tie_embeddings else {}
    return first | {"head.out": f"{hf_name}.decoder"}


def encoder_names(
    config: Any,
    prefix: str,
    layer: tuple[str, Mapping[str, str]],
    heads: Mapping[str, Mapping[str, str]],
    unused: str,
    embeddings: Mapping[str, str] = BERT_EMBEDDINGS,
) -> Names:
    """The names of BERT and its descendants.

    Args:
        prefix: prefix of the base model.
        layer: Hugging Face name of a layer, and the names of its modules.
        heads: for each head, the names of its modules.
        unused: regular expression of the modules of other heads.
        embeddings: names of the modules of the embeddings.
    """
    return Names(
        layer_names("embedding", f"{prefix}.embeddings", embeddings)
        + layer_names("encoder.blocks.{i}", f"{prefix}.{layer[0]}", layer[1])
        + [Name(*pair) for pair in heads.get(config.head, {}).items()],
        prefix=f"{prefix}.",
        # Names of the first release, which published files still have.
        endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        buffers=rf"{prefix}\.embeddings\.position_ids",
        unused=rf"({unused})\.(weight|bias|gamma|beta)",
        optional=r"head\..+" if config.head == "classify" else "",
    )


def offset_from_hf(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """`position_offset`, where positions begin after the id of padding; raises UserError."""
    pad_id = content.get("pad_token_id", 1)
    if pad_id is None:
        raise UserError("config.json: pad_token_id is null, but the positions start after it")
    return {"position_offset": pad_id + 1}


def offset_to_hf(config: Any) -> dict[str, Any]:
    """The key of `config.json` for `position_offset`."""
    return {"pad_token_id": config.position_offset - 1}


# --- BART, Marian, PEGASUS and T5 ---------------------------------------------------------------


SIDES = {"encoder": "src_embedding", "decoder": "tgt_embedding"}
BART_EMBEDDING = {
    "tokens": "embed_tokens",
    "positions": "embed_positions",
    "norm": "layernorm_embedding",
}
BART_LAYER = {
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
BART_FIXED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}
# Keys of the Config for keys that a file lacks: the values of BART large.
BART_DEFAULTS: dict[str, Any] = {
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


# Layers that transformers drops in training, each with this probability.
LAYER_DROPS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def final_norm_names() -> list[Name]:
    """Names of the final norms of both stacks, which BART does not have."""
    return [Name(f"{side}.final_norm", f"model.{side}.layer_norm") for side in SIDES]


def bart_names(*, shared: bool) -> Names:
    """Hugging Face tensor names; `shared`: source and target share one embedding."""
    names = [Name("src_embedding.tokens", "model.shared")] if shared else []
    names.append(Name("head.out.bias", "final_logits_bias", row=True))
    for side, embedding in SIDES.items():
        stack = f"model.{side}"
        names += layer_names(embedding, stack, BART_EMBEDDING)
        names += layer_names(f"{side}.blocks.{{i}}", f"{stack}.layers.{{i}}", BART_LAYER)
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


# --- The Transformer of 2017, as a Marian or PEGASUS with equal outputs -------------------------


# Parameters whose columns, and whose rows, are dimensions of the model.
_COLUMNS = r".*(embedding\.tokens|\.(qkv|q|kv|up)|head\.out)\.weight"
_ROWS = r".*(attention\.sublayer\.out|\.down|norm)\.(weight|bias)"


def vaswani2017_to_hf(config: Any, net: nn.Module) -> tuple[str, Any, nn.Module]:
    """Architecture, Config and net for the export: Marian with post-norm, PEGASUS with pre-norm.

    Their position tables have all sines before all cosines, where the paper interleaves them, so
    the dimensions of the model are permuted in every weight.

    Raises:
        UserError: settings that neither architecture has; lists all of them, with supported values.
    """
    name = "marian" if config.norm_placement == "post" else "pegasus"
    _check_vaswani2017(config, name)
    known = {field.name for field in fields(architecture(name).config)}
    keys = {key: value for key, value in asdict(config).items() if key in known}
    for part in ("attention_dropout", "activation_dropout"):
        keys[part] = config.dropout if keys[part] is None else keys[part]
    if name == "pegasus" and config.tie_embeddings == "decoder":
        keys["tie_embeddings"] = "none"  # the matrix is written twice
    exported_config = make_config(name, keys)
    weights = dict(net.named_parameters(remove_duplicate=False))
    exported = uninitialized_net(name, exported_config, weights, "the model")
    order = torch.tensor([*range(0, config.d_model, 2), *range(1, config.d_model, 2)])
    with torch.no_grad():
        for path, parameter in exported.named_parameters():
            if path in weights:  # others are biases, which stay zero
                weight: torch.Tensor = weights[path]
                if re.fullmatch(_COLUMNS, path):
                    weight = weight[:, order]
                parameter.copy_(weight[order] if re.fullmatch(_ROWS, path) else weight)
    return name, exported_config, exported


def _check_vaswani2017(config: Any, name: str) -> None:
    """Raise UserError for settings that the architecture `name` does not have."""
    is_post, eps = name == "marian", nn.LayerNorm(1).eps
    one_vocabulary = config.src_vocab_size == config.tgt_vocab_size
    settings = [  # is supported, key, supported value
        (config.norm_placement in ("post", "pre"), "model.norm_placement", "pre"),
        (config.positions == "sinusoidal", "model.positions", "sinusoidal"),
        (config.final_norm in (None, not is_post), "model.final_norm", str(not is_post).lower()),
        (config.norm_eps == eps, "model.norm_eps", eps),
        (is_post or one_vocabulary, "tokenizer.joint", "true"),
    ]
    wrong = [(key, value) for is_supported, key, value in settings if not is_supported]
    if wrong:
        values = asdict(config) | {"joint": "false"}
        listed = ", ".join(f"{key} {str(values[key.split('.')[1]]).lower()}" for key, _ in wrong)
        instead = " ".join(f"{key}={value}" for key, value in wrong)
        raise UserError(
            f"the Hugging Face format does not support a vaswani2017 with {listed}: "
            f"train it with {instead}"
        )
