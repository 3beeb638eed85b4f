"""RoBERTa against transformers: heads, positions, padding, import and export, sizes."""

from pathlib import Path

import pytest
import torch

from encoder_parity import SIZES, BertParityTests, EncoderCase, Poolerless, output
from heedful.errors import UserError
from heedful.zoo import roberta
from hf_parity import CLOSE, by_key, imported, millions, transformers

ROBERTA = EncoderCase(
    name="roberta",
    hf_config=transformers.RobertaConfig,
    hf_class=transformers.RobertaForMaskedLM,
    classify_class=transformers.RobertaForSequenceClassification,
    base_class=Poolerless(transformers.RobertaModel),
    counts_by_pad=True,
    sizes=SIZES
    | {"max_position_embeddings": 18, "type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2},
    configs=[
        {"hidden_size": 12, "num_attention_heads": 3},
        {
            "hidden_size": 10,
            "num_attention_heads": 5,
            "num_hidden_layers": 1,
            "hidden_act": "gelu_new",
            "num_labels": 3,
            "type_vocab_size": 3,
        },
        {"num_attention_heads": 1, "num_hidden_layers": 1, "pad_token_id": 0, "hidden_act": "relu"},
        {
            "hidden_size": 14,
            "num_attention_heads": 7,
            "num_hidden_layers": 1,
            "pad_token_id": 4,
            "layer_norm_eps": 1e-3,
        },
    ],
    mlm_tensors="lm_head.",
    classify_tensors="classifier.dense.bias",
    norm_eps=1e-5,
    head_dropouts=(0.3, 0.3),
    kept=("num_labels", "pad_token_id", "max_position_embeddings"),
    # BERT's epsilon, and 512 rows of positions less 2.
    missing_key_values={"norm_eps": 1e-12, "type_vocab_size": 2, "max_length": 510},
    unsupported=by_key(
        is_decoder=True,
        add_cross_attention=True,
        position_embedding_type="relative_key_query",
        hidden_act="mish",
    )
    | {
        "pad_token_id is null": {"pad_token_id": None},
        "max_length must be at least 1, not 0": {"pad_token_id": 3, "max_position_embeddings": 4},
    },
    other_class="RobertaForCausalLM",
    published={"base": millions(124.7, 0.05), "large": millions(355.4, 0.05)},
    counted=transformers.RobertaForMaskedLM,
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    buffers={"roberta.embeddings.position_ids": torch.arange(18)[None]},
)


class TestParity(BertParityTests):
    case = ROBERTA


def test_the_published_config_gives_the_default_config() -> None:
    """The config.json of the published base model."""
    published = {
        "architectures": ["RobertaForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514,
        "model_type": "roberta",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": 50265,
    }
    assert ROBERTA.read(**published) == roberta.Config()


# Mistakes of published implementations.


@torch.no_grad()
def test_the_longest_text_fits(tmp_path: Path) -> None:
    model = ROBERTA.model()
    ids = torch.stack(ROBERTA.rows(model, [16]))
    net = imported(model, tmp_path).net
    torch.testing.assert_close(net(ids), output(model, ids), **CLOSE)
    with pytest.raises(UserError, match="17 tokens"):
        net(torch.cat([ids, ids[:, :1]], dim=1))
