"""BERT against transformers: heads, pairs, padding, import and export, published sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_parity import (
    SIZES,
    BertParityTests,
    EncoderCase,
    Poolerless,
    assert_same_outputs,
)
from hf_parity import (
    CLOSE,
    assert_same_net,
    by_key,
    imported,
    millions,
    random_rows,
    reread,
    transformers,
    written,
)

VOCAB = 23
BERT = EncoderCase(
    name="bert",
    hf_config=transformers.BertConfig,
    hf_class=transformers.BertForMaskedLM,
    classify_class=transformers.BertForSequenceClassification,
    base_class=Poolerless(transformers.BertModel),
    sizes=SIZES,
    configs=[
        {"hidden_size": 12, "num_attention_heads": 3},
        {
            "hidden_size": 10,
            "num_attention_heads": 5,
            "num_hidden_layers": 1,
            "hidden_act": "gelu_new",
            "num_labels": 3,
        },
        {"num_attention_heads": 1, "num_hidden_layers": 3, "hidden_act": "relu"},
        {
            "hidden_size": 14,
            "num_attention_heads": 7,
            "num_hidden_layers": 1,
            "layer_norm_eps": 1e-3,
            "type_vocab_size": 5,
        },
    ],
    mlm_tensors="cls.predictions",
    classify_tensors="classifier.bias",
    norm_eps=1e-12,
    head_dropouts=(0, 0.3),
    std=0.02 * 0.8796,  # initialized within two standard deviations of 0.02
    kept=("num_labels",),
    unsupported=by_key(
        is_decoder=True,
        add_cross_attention=True,
        position_embedding_type="relative_key",
        hidden_act="mish",
    ),
    other_class="BertForQuestionAnswering",
    published={
        "tiny": millions(4.4, 0.05),
        "mini": millions(11.3, 0.05),
        "small": millions(29.1, 0.05),
        "medium": millions(41.7, 0.05),
        "base": millions(110.1, 0.05),
        "large": millions(336.2, 0.05),
    },
    beyond=lambda config: config.d_model**2 + 3 * config.d_model + 2,  # the second task
    counted=transformers.BertForPreTraining,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers={"bert.embeddings.position_ids": torch.arange(16)[None]},
)


class TestParity(BertParityTests):
    case = BERT


@torch.no_grad()
def test_pretraining_files_load_without_the_second_task(tmp_path: Path) -> None:
    model = BERT.model(transformers.BertForPreTraining)
    actual = imported(model, tmp_path)
    (notice,) = actual.notices
    assert "bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias" in notice
    ids = torch.stack(random_rows(VOCAB, [9, 9]))
    torch.testing.assert_close(actual.net(ids), model(ids).prediction_logits, **CLOSE)


def test_a_base_model_opened_as_a_classifier_keeps_its_pooler(tmp_path: Path) -> None:
    model = BERT.model(transformers.BertModel)
    actual = imported(model, tmp_path, head="classify", num_labels=2)
    (left,) = actual.notices
    assert left.endswith("lacks head.labels.bias, head.labels.weight: left as initialized")
    assert torch.equal(actual.net.head.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("head", ["mlm", "classify", "none"])
def test_names_of_the_first_release_are_read(head: str) -> None:
    """Norms named gamma and beta."""
    classes = {"mlm": "ForMaskedLM", "classify": "ForSequenceClassification", "none": "Model"}
    actual = BERT.net(architectures=[f"Bert{classes[head]}"])
    changes: dict[str, Any] = {}
    for name, tensor in written(actual).items():
        if "LayerNorm" in name:
            old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            changes |= {name: None, old: tensor}
    assert len(changes) == 2 * 2 * (5 + (head == "mlm"))
    again = reread(actual, changes)
    assert not again.notices
    assert_same_net(actual.net, again.net)


# Mistakes of published implementations.


def test_padding_follows_lengths_not_ids(tmp_path: Path) -> None:
    """The id of padding inside a text is an ordinary token."""
    model = BERT.model()
    rows = [torch.tensor([0, 4, 0, 0, 9, 0]), torch.tensor([0, 0])]
    assert_same_outputs(model, imported(model, tmp_path).net, rows)
