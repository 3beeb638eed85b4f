"""ModernBERT against transformers: local and global layers, packed texts, import and export."""

from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_parity import SIZES, EncoderCase, EncoderParityTests
from heedful.parts.tokens import Tokens
from hf_parity import CLOSE, by_key, imported, millions, random_rows, transformers

MODERNBERT = EncoderCase(
    name="modernbert",
    hf_config=transformers.ModernBertConfig,
    hf_class=transformers.ModernBertForMaskedLM,
    classify_class=transformers.ModernBertForSequenceClassification,
    base_class=transformers.ModernBertModel,
    sizes=SIZES
    | {"num_hidden_layers": 4, "max_position_embeddings": 400, "local_attention": 4}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    | {"cls_token_id": 1, "sep_token_id": 2},
    configs=[
        {},
        {
            "hidden_size": 12,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_activation": "silu",
            "classifier_activation": "relu",
            "num_labels": 3,
            "local_attention": 3,
        },
        {
            "num_hidden_layers": 2,
            "global_attn_every_n_layers": 1,
            "norm_eps": 1e-2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
            "tie_word_embeddings": False,
        },
    ],
    lengths=(300, 131, 11, 1),
    kept=("layer_types", "rope_parameters", "local_attention", "num_labels"),
    mlm_tensors="decoder.",
    classify_tensors="classifier.bias",
    new_in_classifier="head.labels.bias, head.labels.weight",
    norm_eps=1e-5,
    head_dropouts=(0, 0.0),
    shrinks=True,
    unsupported=by_key(hidden_activation="tanh", norm_bias=True, mlp_bias=True, decoder_bias=False)
    | {
        "embedding_dropout is 0.0 and mlp_dropout is 0.5, but": {"mlp_dropout": 0.5},
        "layer_types is sliding_attention, full_attention": {
            "layer_types": ["sliding_attention", "full_attention"]
        },
        "classifier_pooling is 'mean'": {
            "classifier_pooling": "mean",
            "architectures": ["ModernBertForSequenceClassification"],
        },
        "does not support rope_scaling": {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}
        },
        "rope_type of sliding_attention is linear": {
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
        },
    },
    other_class="ModernBertForTokenClassification",
    published={"base": millions(149, 1), "large": millions(395, 1)},
    counted=transformers.ModernBertForMaskedLM,
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)


class TestParity(EncoderParityTests):
    case = MODERNBERT


@pytest.mark.parametrize("size", [9, 300])
@torch.no_grad()
def test_packed_texts_equal_separate_texts(size: int, tmp_path: Path) -> None:
    """Several texts in a row without padding, also if local layers compute it in blocks."""
    net = imported(MODERNBERT.model(), tmp_path).net
    lengths = [size, 4, 1, size // 2]
    rows = random_rows(23, lengths)
    segments = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    states = net.encode(Tokens.from_ids(torch.cat(rows)[None], segments=segments))[0]
    for row, actual in zip(rows, states.split(lengths), strict=True):
        torch.testing.assert_close(actual, net.encode(Tokens.from_ids(row[None]))[0], **CLOSE)


@torch.no_grad()
def test_the_pooling_key_matters_for_classifiers_only() -> None:
    """The published base model has mean pooling, which its masked language model does not use."""
    published: dict[str, Any] = {
        "architectures": ["ModernBertForMaskedLM"],
        "classifier_pooling": "mean",
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
    }
    assert MODERNBERT.read(**published) == MODERNBERT.architecture.config()
