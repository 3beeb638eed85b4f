"""Shared by the Hugging Face formats of BERT and its descendants: classes and tensor names."""

from collections.abc import Mapping
from typing import Any

from heedful.zoo.names import Name, Names, layer_names

EMBEDDINGS = {
    "tokens": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
# Keys of `config.json` with one supported value, for BERT and RoBERTa.
FIXED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
HF_LAYER = {
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
    embeddings: Mapping[str, str] = EMBEDDINGS,
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
