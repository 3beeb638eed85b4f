"""What the Hugging Face formats of BERT and its descendants share: labels and tensor names."""

from collections.abc import Mapping
from typing import Any

from heedful.zoo.names import Name, Names, layer_names

EMBEDDINGS = {
    "tokens": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
HF_LAYER = {
    "self_attention.sublayer.qkv": "attention.self.{query,key,value}",
    "self_attention.sublayer.out": "attention.output.dense",
    "self_attention.norm": "attention.output.LayerNorm",
    "feedforward.sublayer.up": "intermediate.dense",
    "feedforward.sublayer.down": "output.dense",
    "feedforward.norm": "output.LayerNorm",
}


def labels_from_hf(content: Mapping[str, Any]) -> dict[str, Any]:
    """How many classes `config.json` has names for; it leaves them out where there are two."""
    return {"num_labels": len(content.get("id2label") or ()) or content.get("num_labels") or 2}


def labels_to_hf(config: Any) -> dict[str, Any]:
    """Names for the classes, by which alone `config.json` says how many there are."""
    if config.num_labels == 2:
        return {}
    names = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    return {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}


def output_names(config: Any, theirs: str) -> dict[str, str]:
    """Of the output matrix and its bias.

    They keep the bias twice. Tied, both are one; untied, the one beside the matrix is added, and
    the other is a weight that nothing reads.
    """
    first = {"head.out.bias": f"{theirs}.bias"} if config.tie_embeddings else {}
    return first | {"head.out": f"{theirs}.decoder"}


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
        layer: their name of a layer, and those of its modules.
        heads: for each head the names of its modules.
        unused: what modules of other heads match.
        embeddings: the names of their modules.
    """
    return Names(
        layer_names("embedding", f"{prefix}.embeddings", embeddings)
        + layer_names("encoder.blocks.{i}", f"{prefix}.{layer[0]}", layer[1])
        + [Name(*pair) for pair in heads.get(config.head, {}).items()],
        prefix=f"{prefix}.",
        # The first release's names, which published files still have.
        endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        buffers=rf"{prefix}\.embeddings\.position_ids",
        unused=rf"({unused})\.(weight|bias|gamma|beta)",
        optional=r"head\..+" if config.head == "classify" else "",
    )
