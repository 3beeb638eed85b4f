"""BERT (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers").

| model  | layers | d_model | heads | d_ff | parameters |
|--------|--------|---------|-------|------|------------|
| tiny   | 2      | 128     | 2     | 512  | 4.4M       |
| mini   | 4      | 256     | 4     | 1024 | 11.3M      |
| small  | 4      | 512     | 8     | 2048 | 29.1M      |
| medium | 8      | 512     | 8     | 2048 | 41.7M      |
| base   | 12     | 768     | 12    | 3072 | 110.1M     |
| large  | 24     | 1024    | 16    | 4096 | 336.2M     |

Base and large are the paper's (sec. 3), the others those of Turc et al. 2019, "Well-Read Students
Learn Better". The encoder of Vaswani et al. 2017 with GELU, learned positions, a further embedding
that tells the first of two texts from the second, and a norm over the sum of the three (fig. 2).
The parameters are counted with the heads of both tasks of pre-training.
"""

from typing import Any, Literal

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
from heedful.parts.positions import Learned
from heedful.parts.residual import PostNorm
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names

Head = Literal["mlm", "classify", "none"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are its base model.

    Args:
        head: mlm: logits of the token at each position (sec. 3.1, task 1); classify: logits of the
            text's class, from the state of its first token (fig. 4, a and b); none: the states.
        num_labels: classes of the text; of the head classify alone.
        max_length: longest text, or pair of texts, in tokens.
        type_vocab_size: texts that a row may hold.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout: on the attention weights.
        classifier_dropout: on what the matrix of classes reads; None: as `dropout`.
        tie_embeddings: one matrix for input and output; of the head mlm alone.
    """

    vocab_size: int = 30522
    d_model: int = 768
    num_heads: int = 12
    num_layers: int = 12
    d_ff: int = 3072
    max_length: int = 512
    type_vocab_size: int = 2
    head: Head = "mlm"
    num_labels: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "num_heads": 2, "num_layers": 2, "d_ff": 512},
    "mini": {"d_model": 256, "num_heads": 4, "num_layers": 4, "d_ff": 1024},
    "small": {"d_model": 512, "num_heads": 8, "num_layers": 4, "d_ff": 2048},
    "medium": {"d_model": 512, "num_heads": 8, "num_layers": 8, "d_ff": 2048},
    "base": {},
    "large": {"d_model": 1024, "num_heads": 16, "num_layers": 24, "d_ff": 4096},
}


def build(config: Config) -> EncoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying.

    As in the authors' code: N(0, 0.02²) without what lies beyond two standard deviations.
    """
    embedding = typed_embedding(config, Learned())
    net = EncoderOnly(embedding, encoder(config), _head(config, embedding.tokens.weight))
    init_weights(net, _truncated_normal)
    return net


def typed_embedding(config: Config, positions: Learned) -> TokenEmbedding:
    """norm(tokens + positions + types) (fig. 2)."""
    return TokenEmbedding(
        nn.Embedding(config.vocab_size, config.d_model),
        positions.build(config.max_length, config.d_model),
        dropout=config.dropout,
        norm=LayerNorm(config.norm_eps).build(config.d_model),
        types=nn.Embedding(config.type_vocab_size, config.d_model),
    )


def encoder(config: Config) -> Stack:
    """The Transformer's encoder (sec. 3), its norms after each sub-layer's sum."""
    return Stack(_block(config) for _ in range(config.num_layers))


def _block(config: Config) -> Block:
    width, norm = config.d_model, LayerNorm(config.norm_eps)
    attention = Attention(width, config.num_heads, dropout=config.attention_dropout)
    mlp = Mlp(width, config.d_ff, config.activation)
    return Block(
        PostNorm(attention, norm.build(width), dropout=config.dropout),
        None,
        PostNorm(mlp, norm.build(width), dropout=config.dropout),
    )


def _head(config: Config, embedding: Tensor) -> MaskedTokenHead | ClassificationHead | None:
    if config.head == "mlm":
        weight, bias = output_weights(config.tie_embeddings, embedding)
        norm = LayerNorm(config.norm_eps).build(config.d_model)
        return MaskedTokenHead(weight, bias, norm, config.activation)
    if config.head == "classify":
        dropout = classifier_dropout(config)
        return ClassificationHead(config.d_model, config.num_labels, dropout=dropout)
    return None


def output_weights(tied: bool, embedding: Tensor) -> tuple[Tensor, nn.Parameter]:
    """The (V, D) matrix of an output, the embedding's own where tied, and its (V,) bias."""
    weight = embedding if tied else nn.Parameter(embedding.detach().clone())
    return weight, nn.Parameter(embedding.new_zeros(embedding.size(0)))


def classifier_dropout(config: Config) -> float:
    """The dropout before the matrix of classes."""
    return config.dropout if config.classifier_dropout is None else config.classifier_dropout


def _truncated_normal(module: nn.Module, name: str, parameter: Tensor) -> None:
    if parameter.dim() > 1:
        nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
    else:
        normal(0.02)(module, name, parameter)


def labels_from_hf(given: dict[str, Any]) -> dict[str, Any]:
    """How many classes `config.json` has names for; it leaves them out where there are two."""
    if given.get("id2label"):
        return {"num_labels": len(given["id2label"])}
    return {"num_labels": given.get("num_labels") or 2}


def labels_to_hf(num_labels: int) -> dict[str, Any]:
    """Names for the classes, by which alone `config.json` says how many there are."""
    if num_labels == 2:
        return {}
    names = {str(label): f"LABEL_{label}" for label in range(num_labels)}
    return {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}


HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "d_ff",
    "type_vocab_size": "type_vocab_size",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "classifier_dropout",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
HF_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
HF_FIXED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}

HF = HfFormat(
    model_type="bert",
    classes={
        "BertForMaskedLM": {"head": "mlm"},
        "BertForPreTraining": {"head": "mlm"},
        "BertForSequenceClassification": {"head": "classify"},
        "BertModel": {"head": "none"},
    },
    keys={**HF_KEYS, "max_position_embeddings": "max_length"},
    values={"hidden_act": ("activation", HF_ACTIVATIONS)},
    fixed=HF_FIXED,
    read=labels_from_hf,
    write=lambda config: labels_to_hf(config.num_labels),
)


# What a file may hold beyond one head: the pooler, both tasks' heads, and that of classes.
HF_UNUSED = (
    r"bert\.pooler\.dense\.(weight|bias)",
    r"cls\.predictions\.transform\.(dense|LayerNorm)\.(weight|bias|gamma|beta)",
    r"cls\.predictions\.(bias|decoder\.weight|decoder\.bias)",
    r"cls\.seq_relationship\.(weight|bias)",
    r"classifier\.(weight|bias)",
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there.

    The pooler is the first matrix of the head classify. The other heads have no place for it, nor
    any for the head of the second task of pre-training (sec. 3.1).
    """
    names = encoder_names("bert.")
    aliases = _first_norm_names(config.num_layers)
    if config.head == "mlm":
        transform = "cls.predictions.transform."
        names += weight_and_bias("head.transform", f"{transform}dense")
        names += weight_and_bias("head.norm", f"{transform}LayerNorm")
        output, tied = output_names(config, "cls.predictions.", "bert.")
        names, aliases = names + output, aliases | tied
    elif config.head == "classify":
        names += weight_and_bias("head.dense", "bert.pooler.dense")
        names += weight_and_bias("head.out", "classifier")
    return Names(
        tuple(names),
        prefix="bert.",
        aliases=aliases,
        buffers=(r"bert\.embeddings\.position_ids",),
        unused=HF_UNUSED,
        optional=(r"head\..+",) if config.head == "classify" else (),
    )


def weight_and_bias(ours: str, *theirs: str) -> list[Name]:
    """The two tensors of a module of ours, which joins those of `theirs`."""
    return [
        Name(f"{ours}.{part}", tuple(f"{each}.{part}" for each in theirs))
        for part in ("weight", "bias")
    ]


def encoder_names(prefix: str) -> list[Name]:
    """Embeddings and layers, whose names BERT's descendants kept."""
    layer, block = f"{prefix}encoder.layer.{{i}}.", "encoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    names = [
        Name(f"embedding.{ours}.weight", f"{prefix}embeddings.{theirs}_embeddings.weight")
        for ours, theirs in (("tokens", "word"), ("positions", "position"), ("types", "token_type"))
    ]
    joined = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
    names += weight_and_bias(f"{attention}sublayer.qkv", *joined)
    for ours, theirs in (
        ("embedding.norm", f"{prefix}embeddings.LayerNorm"),
        (f"{attention}sublayer.out", f"{layer}attention.output.dense"),
        (f"{attention}norm", f"{layer}attention.output.LayerNorm"),
        (f"{mlp}sublayer.up", f"{layer}intermediate.dense"),
        (f"{mlp}sublayer.down", f"{layer}output.dense"),
        (f"{mlp}norm", f"{layer}output.LayerNorm"),
    ):
        names += weight_and_bias(ours, theirs)
    return names


def output_names(config: Config, head: str, prefix: str) -> tuple[list[Name], dict[str, str]]:
    """The names and aliases of the output matrix and its bias.

    They keep the bias twice. Tied, both are one; untied, the one beside the matrix is added, and
    the other is a weight that nothing reads.
    """
    matrix, beside, alone = f"{head}decoder.weight", f"{head}decoder.bias", f"{head}bias"
    if not config.tie_embeddings:
        return [Name("head.weight", matrix), Name("head.bias", beside)], {}
    tied = {matrix: f"{prefix}embeddings.word_embeddings.weight", beside: alone}
    return [Name("head.bias", alone)], tied


def _first_norm_names(num_layers: int) -> dict[str, str]:
    """The first release's names of the norms' tensors, which published files still have."""
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for layer in range(num_layers):
        for part in ("attention.output", "output"):
            norms.append(f"bert.encoder.layer.{layer}.{part}.LayerNorm")
    both = (("gamma", "weight"), ("beta", "bias"))
    return {f"{norm}.{first}": f"{norm}.{now}" for norm in norms for first, now in both}
