"""DistilBERT against transformers: heads, positions, padding, weights both ways, its size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from encoder_parity import (
    assert_same_encoder,
    assert_same_outputs,
    output,
    read_config,
    rewritten,
)
from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.nets import net_to_hf
from heedful.zoo import distilbert
from hf_parity import (
    CLOSE,
    assert_round_trips,
    assert_same_net,
    exported,
    imported,
    random_hf,
    random_rows,
    transformers,
)

VOCAB = 23
CONFIGS: list[dict[str, Any]] = [
    {"dim": 12, "n_heads": 3, "n_layers": 2},
    {"dim": 10, "n_heads": 5, "activation": "relu", "num_labels": 3},
    {"dim": 8, "n_heads": 1, "n_layers": 3, "tie_word_embeddings": False},
    {"dim": 14, "n_heads": 7, "sinusoidal_pos_embds": True},
]
HEADS = {
    "mlm": transformers.DistilBertForMaskedLM,
    "classify": transformers.DistilBertForSequenceClassification,
    "none": transformers.DistilBertModel,
}
TINY: dict[str, Any] = {"vocab_size": 3, "d_model": 6, "num_heads": 1, "num_layers": 1, "d_ff": 2}
every_config = pytest.mark.parametrize("number", range(len(CONFIGS)))
every_head = pytest.mark.parametrize("head", HEADS)


def hf_config(**keys: Any) -> Any:
    sizes = {"n_layers": 1, "hidden_dim": 13, "max_position_embeddings": 16}
    return transformers.DistilBertConfig(**{"vocab_size": VOCAB, **sizes, **keys})


def hf_model(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    return random_hf(model_class, hf_config(**keys), seed)


def small(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    return hf_model(model_class, seed, dim=8, n_heads=2, **keys)


@every_head
@every_config
@torch.no_grad()
def test_outputs_and_weights_both_ways(number: int, head: str, tmp_path: Path) -> None:
    model = hf_model(HEADS[head], number, **CONFIGS[number])
    found = imported(model, tmp_path)
    assert found.config.head == head
    assert not found.notices
    assert_same_outputs(model, found.net, random_rows(VOCAB, [7, 3, 11, 1], number), pad_id=0)
    back = assert_round_trips(model, found, tmp_path, HEADS[head])
    assert back.config.num_labels == model.config.num_labels
    ids = torch.stack(random_rows(VOCAB, [9, 9], number))
    torch.testing.assert_close(output(back, ids), output(model, ids), **CLOSE)


def test_a_masked_lm_opened_as_a_classifier(tmp_path: Path) -> None:
    model = small(HEADS["mlm"], n_layers=2)
    found = imported(model, tmp_path, head="classify", num_labels=3)
    assert_same_encoder(found.net, imported(model, tmp_path).net)
    out, left = found.notices
    assert "no place for: vocab_layer_norm.bias" in out
    assert left.endswith(
        "has nothing for head.dense.bias, head.dense.weight, head.out.bias and 1 more: "
        "left as initialised"
    )
    back = exported(found, tmp_path / "exported", HEADS["classify"])
    assert back.config.num_labels == 3
    assert_same_outputs(back, found.net, random_rows(VOCAB, [7, 3]), pad_id=0)


@pytest.mark.parametrize("head", ["mlm", "classify"])
def test_any_file_opened_without_a_head_gives_its_states(head: str, tmp_path: Path) -> None:
    model = small(HEADS[head])
    found = imported(model, tmp_path, head="none")
    (notice,) = found.notices
    assert ("vocab_layer_norm.bias" if head == "mlm" else "pre_classifier.bias") in notice
    assert_same_outputs(model.distilbert, found.net, random_rows(VOCAB, [7, 3]), pad_id=0)


def test_a_base_model_opened_as_a_classifier(tmp_path: Path) -> None:
    model = small(transformers.DistilBertModel)
    found = imported(model, tmp_path, head="classify")
    (left,) = found.notices
    assert "head.dense.bias" in left
    assert_same_encoder(found.net, imported(model, tmp_path).net)


def test_a_classifier_opened_as_a_masked_lm_lacks_the_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor vocab_"):
        imported(small(HEADS["classify"]), tmp_path, head="mlm")


@pytest.mark.parametrize("key", ["activation", "sinusoidal_pos_embds"])
def test_settings_that_are_not_built_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} is 'other'"):
        read_config("distilbert", {"model_type": "distilbert", key: "other"})


def test_classes_that_are_not_built_are_refused() -> None:
    with pytest.raises(UserError, match="no place for the class DistilBertForQuestionAnswering"):
        read_config("distilbert", {"architectures": ["DistilBertForQuestionAnswering"]})


def test_what_a_config_leaves_out_is_their_default() -> None:
    full = transformers.DistilBertConfig().to_dict()
    assert read_config("distilbert", {}) == read_config("distilbert", full) == distilbert.Config()


def test_each_dropout_is_where_the_authors_have_it() -> None:
    net = distilbert.build(distilbert.Config(**TINY, head="classify", attention_dropout=0.3))
    block = net.encoder.blocks[0]
    assert net.embedding.dropout.p == block.self_attention.dropout.p == 0.1
    assert block.feedforward.dropout.p == 0.1
    assert block.feedforward.sublayer.dropout.p == 0
    assert block.self_attention.sublayer.dropout.p == 0.3
    assert (net.head.input_dropout.p, net.head.dropout.p) == (0, 0.2)


def test_the_size_has_the_published_parameters() -> None:
    with torch.device("meta"):
        ours = parameter_count(distilbert.build(distilbert.Config()))
        bare = parameter_count(distilbert.build(distilbert.Config(head="none")))
        theirs = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig())
    assert ours == theirs.num_parameters()
    assert bare / 1e6 == pytest.approx(66, abs=0.5)


# The traps that published code fell into.


def test_trap_sinusoids_alternate_and_are_not_trained() -> None:
    """Sines at even, cosines at odd dimensions, as their code fills its table."""
    torch.manual_seed(0)
    theirs = transformers.DistilBertModel(hf_config(dim=6, n_heads=1, sinusoidal_pos_embds=True))
    config = distilbert.Config(**TINY, max_length=16, positions="sinusoidal")
    net = distilbert.build(config)
    table = net.embedding.positions.weight
    torch.testing.assert_close(
        table, theirs.embeddings.position_embeddings.weight.detach(), rtol=0, atol=1e-6
    )
    before = table.clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert torch.equal(table, before)
    learned = distilbert.build(distilbert.Config(**TINY)).embedding.positions.weight
    assert learned.requires_grad


def test_trap_the_table_of_a_file_is_the_one_that_is_used(tmp_path: Path) -> None:
    """Also where its config calls it sinusoidal: weights are never guessed."""
    model = small(HEADS["mlm"], sinusoidal_pos_embds=True)
    found = imported(model, tmp_path)
    theirs = model.distilbert.embeddings.position_embeddings.weight
    assert torch.equal(found.net.embedding.positions.weight, theirs)
    assert not found.net.embedding.positions.weight.requires_grad


def test_trap_norms_have_the_published_epsilon() -> None:
    net = distilbert.build(distilbert.Config(**TINY))
    norms = [part for part in net.modules() if isinstance(part, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-12] * 4


def test_trap_the_classifier_is_relu_whatever_the_layers_are(tmp_path: Path) -> None:
    net = imported(small(HEADS["classify"], activation="gelu"), tmp_path).net
    assert net.head.activation is torch.relu


def test_trap_tied_weights_are_one_and_saved_once(tmp_path: Path) -> None:
    found = imported(small(HEADS["mlm"]), tmp_path)
    assert found.net.head.weight is found.net.embedding.tokens.weight
    _, tensors = net_to_hf("distilbert", found.config, found.net)
    assert "vocab_projector.weight" not in tensors
    words = tensors["distilbert.embeddings.word_embeddings.weight"]
    again = rewritten(found, tmp_path / "both", **{"vocab_projector.weight": words.clone()})
    assert_same_net(found.net, again.net)
    with pytest.raises(UserError, match=r"vocab_projector\.weight differs"):
        rewritten(found, tmp_path / "differ", **{"vocab_projector.weight": words + 1})
