"""DistilBERT against transformers: heads, positions, padding, import and export, its size."""

from pathlib import Path
from typing import Any

import torch

from encoder_parity import EncoderCase, EncoderParityTests
from heedful.zoo import distilbert
from hf_parity import by_key, imported, millions, transformers

DISTILBERT = EncoderCase(
    name="distilbert",
    hf_config=transformers.DistilBertConfig,
    hf_class=transformers.DistilBertForMaskedLM,
    classify_class=transformers.DistilBertForSequenceClassification,
    base_class=transformers.DistilBertModel,
    sizes={
        "vocab_size": 23,
        "dim": 8,
        "n_heads": 2,
        "n_layers": 2,
        "hidden_dim": 13,
        "max_position_embeddings": 16,
    },
    configs=[
        {"dim": 12, "n_heads": 3},
        {"dim": 10, "n_heads": 5, "n_layers": 1, "activation": "relu", "num_labels": 3},
        {"n_heads": 1, "n_layers": 3, "tie_word_embeddings": False},
        {"dim": 14, "n_heads": 7, "n_layers": 1, "sinusoidal_pos_embds": True},
    ],
    mlm_tensors="vocab_",
    classify_tensors="pre_classifier.bias",
    norm_eps=1e-12,
    head_dropouts=(0, 0.2),
    kept=("num_labels",),
    unsupported=by_key(activation="other", sinusoidal_pos_embds="other"),
    other_class="DistilBertForQuestionAnswering",
    published={"base": millions(66, 0.5)},
    beyond=lambda config: -(config.d_model**2 + 3 * config.d_model + config.vocab_size),  # the head
    counted=transformers.DistilBertModel,
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    buffers={"distilbert.embeddings.position_ids": torch.arange(16)[None]},
)
TINY: dict[str, Any] = {"vocab_size": 3, "d_model": 6, "num_heads": 1, "num_layers": 1, "d_ff": 2}


class TestParity(EncoderParityTests):
    case = DISTILBERT


# Mistakes of published implementations.


def test_sinusoids_alternate_and_are_not_trained() -> None:
    """Sines at even, cosines at odd dimensions, as in the authors' code."""
    torch.manual_seed(0)
    sizes = DISTILBERT.sizes | {"dim": 6, "n_heads": 1, "sinusoidal_pos_embds": True}
    reference = transformers.DistilBertModel(transformers.DistilBertConfig(**sizes))
    config = distilbert.Config(**TINY, max_length=16, positions="sinusoidal")
    net = distilbert.build(config)
    table = net.embedding.positions.weight
    torch.testing.assert_close(
        table, reference.embeddings.position_embeddings.weight.detach(), rtol=0, atol=1e-6
    )
    before = table.clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert torch.equal(table, before)
    learned = distilbert.build(distilbert.Config(**TINY)).embedding.positions.weight
    assert learned.requires_grad


def test_the_position_table_of_a_file_is_used(tmp_path: Path) -> None:
    """Also if its config declares it sinusoidal: weights are never replaced."""
    model = DISTILBERT.model(sinusoidal_pos_embds=True)
    actual = imported(model, tmp_path)
    reference = model.distilbert.embeddings.position_embeddings.weight
    assert torch.equal(actual.net.embedding.positions.weight, reference)
    assert not actual.net.embedding.positions.weight.requires_grad
