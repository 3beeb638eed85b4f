"""RoBERTa (Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach").

|       | layers | d_model | heads | d_ff | parameters |
|-------|--------|---------|-------|------|------------|
| base  | 12     | 768     | 12    | 3072 | 125M       |
| large | 24     | 1024    | 16    | 4096 | 355M       |

BERT's encoder on byte-level BPE (sec. 4.4), trained longer, on more text, with masks drawn anew
each time (sec. 4.1) and on masked tokens alone (sec. 4.2). So there is no pooler, and a text's type
says nothing: pairs are told apart by their separators.
"""

from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.init import init_weights, normal
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned
from heedful.zoo import bert
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(bert.Config):
    """BERT's keys with the paper's values; the defaults are its base model.

    Args:
        position_offset: rows of the position table before that of the first token. Their files have
            one for each id up to the padding's, so that this is the padding's id plus one.
    """

    vocab_size: int = 50265
    type_vocab_size: int = 1
    norm_eps: float = 1e-5
    position_offset: int = 2


SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"d_model": 1024, "num_heads": 16, "num_layers": 24, "d_ff": 4096},
}


def build(config: Config) -> EncoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying: all N(0, 0.02²)."""
    embedding = bert.typed_embedding(config, Learned(config.position_offset))
    net = EncoderOnly(embedding, bert.encoder(config), _head(config, embedding.tokens.weight))
    init_weights(net, normal(0.02))
    return net


def _head(config: Config, embedding: Tensor) -> MaskedTokenHead | ClassificationHead | None:
    if config.head == "mlm":
        weight, bias = bert.output_weights(config.tie_embeddings, embedding)
        norm = LayerNorm(config.norm_eps).build(config.d_model)
        return MaskedTokenHead(weight, bias, norm, "gelu")
    if config.head == "classify":
        dropout = bert.classifier_dropout(config)
        return ClassificationHead(
            config.d_model, config.num_labels, dropout=dropout, input_dropout=dropout
        )
    return None


def _read(given: dict[str, Any]) -> dict[str, Any]:
    pad_id = given["pad_token_id"]
    if pad_id is None:
        raise UserError("config.json: pad_token_id is null, but RoBERTa counts positions from it")
    offset = pad_id + 1
    length = given["max_position_embeddings"] - offset
    return {"position_offset": offset, "max_length": length, **bert.labels_from_hf(given)}


def _write(config: Config) -> dict[str, Any]:
    return {
        "pad_token_id": config.position_offset - 1,
        "max_position_embeddings": config.max_length + config.position_offset,
        **bert.labels_to_hf(config.num_labels),
    }


HF = HfFormat(
    model_type="roberta",
    classes={
        "RobertaForMaskedLM": {"head": "mlm"},
        "RobertaForSequenceClassification": {"head": "classify"},
        "RobertaModel": {"head": "none"},
    },
    keys=bert.HF_KEYS,
    values={"hidden_act": ("activation", bert.HF_ACTIVATIONS)},
    fixed=bert.HF_FIXED,
    defaults={
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 1,
    },
    read=_read,
    write=_write,
)


# What a file may hold beyond one head: a pooler, which was never trained, and the other heads.
HF_UNUSED = (
    r"roberta\.pooler\.dense\.(weight|bias)",
    r"lm_head\.(dense|layer_norm|decoder)\.(weight|bias)",
    r"lm_head\.bias",
    r"classifier\.(dense|out_proj)\.(weight|bias)",
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    names = bert.encoder_names("roberta.")
    aliases: dict[str, str] = {}
    if config.head == "mlm":
        names += bert.weight_and_bias("head.transform", "lm_head.dense")
        names += bert.weight_and_bias("head.norm", "lm_head.layer_norm")
        output, aliases = bert.output_names(config, "lm_head.", "roberta.")
        names += output
    elif config.head == "classify":
        names += bert.weight_and_bias("head.dense", "classifier.dense")
        names += bert.weight_and_bias("head.out", "classifier.out_proj")
    return Names(
        tuple(names),
        prefix="roberta.",
        aliases=aliases,
        buffers=(r"roberta\.embeddings\.position_ids",),
        unused=HF_UNUSED,
        optional=(r"head\..+",) if config.head == "classify" else (),
    )
