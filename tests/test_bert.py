"""BERT against transformers: heads, pairs, padding, both ways of the weights, published sizes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from encoder_parity import (
    assert_same_encoder,
    assert_same_outputs,
    dropouts,
    output,
    read_config,
    rewritten,
)
from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.nets import net_to_hf
from heedful.zoo import bert
from heedful.zoo.hf import config_to_hf
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
    {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2},
    {"hidden_size": 10, "num_attention_heads": 5, "hidden_act": "gelu_new", "num_labels": 3},
    {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 3, "hidden_act": "relu"},
    {"hidden_size": 14, "num_attention_heads": 7, "layer_norm_eps": 1e-3, "type_vocab_size": 5},
]
HEADS = {
    "mlm": transformers.BertForMaskedLM,
    "classify": transformers.BertForSequenceClassification,
    "none": transformers.BertModel,
}
POOLER = {"pooler.dense.weight", "pooler.dense.bias"}
every_config = pytest.mark.parametrize("number", range(len(CONFIGS)))
every_head = pytest.mark.parametrize("head", HEADS)


class Poolerless:
    """BertModel without the pooler, which only the next sentence's head and classifiers read."""

    from_pretrained = partial(transformers.BertModel.from_pretrained, add_pooling_layer=False)


def hf_model(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 13, "max_position_embeddings": 16}
    config = transformers.BertConfig(**{"vocab_size": VOCAB, **sizes, **keys})
    return random_hf(model_class, config, seed)


def small(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    return hf_model(model_class, seed, hidden_size=8, num_attention_heads=2, **keys)


def pairs(lengths: list[int], types: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Types of rows that hold several texts, one after the other."""
    return [row.sort().values for row in random_rows(types, lengths, seed)]


@every_head
@every_config
def test_outputs_with_either_padding_and_types(number: int, head: str, tmp_path: Path) -> None:
    model = hf_model(HEADS[head], number, **CONFIGS[number])
    found = imported(model, tmp_path)
    assert found.config.head == head
    lengths = [7, 3, 11, 1]
    rows = random_rows(VOCAB, lengths, number)
    assert_same_outputs(model, found.net, rows, pad_id=0)
    types = pairs(lengths, model.config.type_vocab_size, number)
    assert_same_outputs(model, found.net, rows, pad_id=0, types=types)


@torch.no_grad()
def test_types_change_what_is_said(tmp_path: Path) -> None:
    net = imported(small(HEADS["classify"]), tmp_path).net
    ids = torch.stack(random_rows(VOCAB, [6, 6]))
    first, second = torch.zeros_like(ids), torch.ones_like(ids)
    torch.testing.assert_close(net(ids, types=first), net(ids), **CLOSE)
    assert not torch.allclose(net(ids, types=second), net(ids), atol=1e-3)


@pytest.mark.parametrize("head", ["mlm", "classify"])
@every_config
@torch.no_grad()
def test_weights_go_both_ways(number: int, head: str, tmp_path: Path) -> None:
    model = hf_model(HEADS[head], number, **CONFIGS[number])
    found = imported(model, tmp_path)
    assert not found.notices
    back = assert_round_trips(model, found, tmp_path, HEADS[head])
    assert back.config.num_labels == model.config.num_labels
    ids = torch.stack(random_rows(VOCAB, [9, 9], number))
    torch.testing.assert_close(output(back, ids), output(model, ids), **CLOSE)


def test_a_model_without_head_goes_both_ways(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=8, num_attention_heads=2, num_hidden_layers=2
    )
    model = random_hf(partial(transformers.BertModel, add_pooling_layer=False), config)
    found = imported(model, tmp_path)
    assert not found.notices
    assert_round_trips(model, found, tmp_path, Poolerless)


@torch.no_grad()
def test_the_pooler_alone_is_lost_without_a_head(tmp_path: Path) -> None:
    model = small(transformers.BertModel)
    found = imported(model, tmp_path)
    (notice,) = found.notices
    assert notice.endswith(
        "left out what the model has no place for: pooler.dense.bias, pooler.dense.weight"
    )
    exported(found, tmp_path / "exported", Poolerless)
    back, report = transformers.BertModel.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert set(report["missing_keys"]) == POOLER
    assert not report["unexpected_keys"]
    ids = torch.stack(random_rows(VOCAB, [9, 9]))
    torch.testing.assert_close(output(back.eval(), ids), output(model, ids), **CLOSE)


@torch.no_grad()
def test_an_untied_output_reads_the_bias_beside_its_matrix(tmp_path: Path) -> None:
    """transformers keeps a second one there, which nothing reads."""
    model = small(HEADS["mlm"], tie_word_embeddings=False)
    found = imported(model, tmp_path)
    assert found.net.head.weight is not found.net.embedding.tokens.weight
    assert [notice.split(": ")[-1] for notice in found.notices] == ["cls.predictions.bias"]
    rows = random_rows(VOCAB, [7, 3])
    assert_same_outputs(model, found.net, rows, pad_id=0)
    again = rewritten(found, tmp_path / "exported")
    assert again.config == found.config
    assert_same_net(found.net, again.net)
    back, report = HEADS["mlm"].from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert set(report["missing_keys"]) == {"cls.predictions.bias"}
    assert not report["unexpected_keys"]
    assert_same_outputs(back.eval(), found.net, rows, pad_id=0)


@torch.no_grad()
def test_pretraining_files_load_without_the_second_task(tmp_path: Path) -> None:
    model = small(transformers.BertForPreTraining)
    found = imported(model, tmp_path)
    (notice,) = found.notices
    assert "bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias" in notice
    ids = torch.stack(random_rows(VOCAB, [9, 9]))
    torch.testing.assert_close(found.net(ids), model(ids).prediction_logits, **CLOSE)


def test_a_masked_lm_opened_as_a_classifier(tmp_path: Path) -> None:
    model = small(HEADS["mlm"], num_hidden_layers=2)
    found = imported(model, tmp_path, head="classify", num_labels=3)
    assert_same_encoder(found.net, imported(model, tmp_path).net)
    out, left = found.notices
    assert "no place for: cls.predictions" in out
    assert left.endswith(
        "has nothing for head.dense.bias, head.dense.weight, head.out.bias and 1 more: "
        "left as initialised"
    )
    assert found.net.head.out.weight.shape == (3, 8)
    assert 0 < found.net.head.out.weight.abs().max() <= 0.04
    assert not found.net.head.out.bias.any()
    back = exported(found, tmp_path / "exported", HEADS["classify"])
    assert back.config.num_labels == 3
    assert_same_outputs(back, found.net, random_rows(VOCAB, [7, 3]), pad_id=0)


def test_a_base_model_opened_as_a_classifier_keeps_its_pooler(tmp_path: Path) -> None:
    model = small(transformers.BertModel)
    found = imported(model, tmp_path, head="classify", num_labels=2)
    (left,) = found.notices
    assert left.endswith("has nothing for head.out.bias, head.out.weight: left as initialised")
    assert torch.equal(found.net.head.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("head", ["mlm", "classify"])
def test_any_file_opened_without_a_head_gives_its_states(head: str, tmp_path: Path) -> None:
    model = small(HEADS[head])
    found = imported(model, tmp_path, head="none")
    assert found.net.head is None
    (notice,) = found.notices
    assert ("cls.predictions" if head == "mlm" else "classifier.bias") in notice
    assert_same_outputs(model.bert, found.net, random_rows(VOCAB, [7, 3]), pad_id=0)


def test_a_classifier_opened_as_a_masked_lm_lacks_the_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor cls\.predictions"):
        imported(small(HEADS["classify"]), tmp_path, head="mlm")


@every_head
def test_names_of_the_first_release_are_read(head: str, tmp_path: Path) -> None:
    """Norms as gamma and beta, and a table of position ids."""
    found = imported(small(HEADS[head], num_hidden_layers=2), tmp_path)
    _, tensors = net_to_hf("bert", found.config, found.net)
    changes: dict[str, Any] = {"bert.embeddings.position_ids": torch.arange(16)[None]}
    for name, tensor in tensors.items():
        if "LayerNorm" in name:
            old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            changes |= {name: None, old: tensor}
    assert len(changes) == 1 + 2 * 2 * (5 + (head == "mlm"))
    again = rewritten(found, tmp_path / "old", **changes)
    assert not again.notices
    assert_same_net(found.net, again.net)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "mish"),
    ],
)
def test_settings_that_are_not_built_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key} is {value!r}"):
        read_config("bert", {"model_type": "bert", key: value})


def test_classes_that_are_not_built_are_refused() -> None:
    with pytest.raises(UserError, match="BertForQuestionAnswering; known here: BertForMaskedLM"):
        read_config("bert", {"architectures": ["BertForQuestionAnswering"]})


def test_what_a_config_leaves_out_is_their_default() -> None:
    full = transformers.BertConfig().to_dict()
    assert read_config("bert", {}) == read_config("bert", full) == bert.Config()


@pytest.mark.parametrize(
    ("content", "num_labels"),
    [
        ({}, 2),
        ({"id2label": None}, 2),
        ({"num_labels": 4}, 4),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, 3),
    ],
)
def test_classes_are_counted_by_their_names(content: dict[str, Any], num_labels: int) -> None:
    content = {"architectures": ["BertForSequenceClassification"], **content}
    assert read_config("bert", content).num_labels == num_labels


def test_each_dropout_is_where_the_paper_has_it() -> None:
    sizes = {"d_model": 8, "num_heads": 2, "num_layers": 2, "d_ff": 8, "vocab_size": VOCAB}
    config = bert.Config(**sizes, head="classify", dropout=0.3, attention_dropout=0.2)
    net = bert.build(config)
    assert net.embedding.dropout.p == 0.3
    for block in net.encoder.blocks:
        assert block.self_attention.dropout.p == block.feedforward.dropout.p == 0.3
        assert block.self_attention.sublayer.dropout.p == 0.2
        assert block.feedforward.sublayer.dropout.p == 0
    assert dropouts(net.head) == {0, 0.3}
    config = bert.Config(**sizes, head="classify", classifier_dropout=0.4)
    assert bert.build(config).head.dropout.p == 0.4


def test_new_weights_lie_within_two_standard_deviations() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "vocab_size": 500}
    net = bert.build(bert.Config(**sizes, tie_embeddings=False))
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            assert 0.036 < parameter.abs().max() <= 0.04, name
    assert net.embedding.tokens.weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.02)
    assert not torch.equal(net.head.weight, net.embedding.tokens.weight)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("tiny", 4.4),
        ("mini", 11.3),
        ("small", 29.1),
        ("medium", 41.7),
        ("base", 110.1),
        ("large", 336.2),
    ],
)
def test_the_sizes_have_the_published_parameters(size: str, millions: float) -> None:
    """Exactly as many as transformers counts, and as published once the second task is added."""
    config = bert.Config(**bert.SIZES[size])
    content = config_to_hf(bert.HF, config)
    with torch.device("meta"):
        ours = parameter_count(bert.build(config))
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**content))
    width = config.d_model
    second_task = width * width + width + 2 * width + 2
    assert ours + second_task == theirs.num_parameters()
    assert (ours + second_task) / 1e6 == pytest.approx(millions, abs=0.05)


# The traps that published code fell into.


def test_trap_padding_is_told_by_lengths_not_by_ids(tmp_path: Path) -> None:
    """The padding's id inside a text is a token as any other."""
    model = small(HEADS["mlm"])
    rows = [torch.tensor([0, 4, 0, 0, 9, 0]), torch.tensor([0, 0])]
    assert_same_outputs(model, imported(model, tmp_path).net, rows, pad_id=0)


@torch.no_grad()
def test_trap_a_classifier_reads_the_first_real_token(tmp_path: Path) -> None:
    """Which under left padding is not the first column."""
    net = imported(small(HEADS["classify"]), tmp_path).net
    row = random_rows(VOCAB, [4])[0]
    alone = net(row[None])
    beside = torch.stack([torch.cat([torch.zeros(3, dtype=torch.long), row]), torch.arange(7)])
    padded_left = net(beside, torch.tensor([4, 7]), padding_side="left")
    torch.testing.assert_close(padded_left[:1], alone, **CLOSE)


def test_trap_gelu_is_the_exact_one() -> None:
    assert read_config("bert", {"hidden_act": "gelu"}).activation == "gelu"
    assert read_config("bert", {"hidden_act": "gelu_new"}).activation == "gelu_tanh"


def test_trap_norms_have_the_published_epsilon() -> None:
    config = bert.Config(d_model=8, num_heads=2, num_layers=2, d_ff=8, vocab_size=VOCAB)
    norms = [part for part in bert.build(config).modules() if isinstance(part, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-12] * (1 + 2 * 2 + 1)


def test_trap_tied_weights_are_one_and_saved_once(tmp_path: Path) -> None:
    found = imported(small(HEADS["mlm"]), tmp_path)
    assert found.net.head.weight is found.net.embedding.tokens.weight
    _, tensors = net_to_hf("bert", found.config, found.net)
    assert "cls.predictions.decoder.weight" not in tensors
    decoder = tensors["bert.embeddings.word_embeddings.weight"]
    rewritten(found, tmp_path / "both", **{"cls.predictions.decoder.weight": decoder.clone()})
    with pytest.raises(UserError, match=r"decoder\.weight differs from bert\.embeddings\.word"):
        rewritten(found, tmp_path / "differ", **{"cls.predictions.decoder.weight": decoder + 1})
