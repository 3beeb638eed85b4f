"""RoBERTa against transformers: heads, positions, padding, weights both ways, published sizes."""

from functools import partial
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
from heedful.zoo import roberta
from heedful.zoo.hf import config_to_hf
from hf_parity import (
    CLOSE,
    assert_round_trips,
    assert_same_net,
    exported,
    imported,
    padded,
    random_hf,
    random_rows,
    transformers,
)

VOCAB = 23
TINY: dict[str, Any] = {"vocab_size": 3, "d_model": 2, "num_heads": 1, "num_layers": 1, "d_ff": 2}
CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2},
    {"hidden_size": 10, "num_attention_heads": 5, "hidden_act": "gelu_new", "num_labels": 3},
    {"hidden_size": 8, "num_attention_heads": 1, "pad_token_id": 0, "hidden_act": "relu"},
    {"hidden_size": 14, "num_attention_heads": 7, "pad_token_id": 4, "layer_norm_eps": 1e-3},
]
HEADS = {
    "mlm": transformers.RobertaForMaskedLM,
    "classify": transformers.RobertaForSequenceClassification,
    "none": transformers.RobertaModel,
}
every_config = pytest.mark.parametrize("number", range(len(CONFIGS)))
every_head = pytest.mark.parametrize("head", HEADS)


class Poolerless:
    """RobertaModel without the pooler that its training never used."""

    from_pretrained = partial(transformers.RobertaModel.from_pretrained, add_pooling_layer=False)


def hf_model(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 13, "max_position_embeddings": 18}
    sizes |= {"type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = transformers.RobertaConfig(**{"vocab_size": VOCAB, **sizes, **keys})
    return random_hf(model_class, config, seed)


def small(model_class: Any, seed: int = 0, **keys: Any) -> Any:
    return hf_model(model_class, seed, hidden_size=8, num_attention_heads=2, **keys)


def texts(lengths: list[int], seed: int = 0, pad_id: int = 1) -> list[torch.Tensor]:
    """Rows without the padding's id, which they count positions by."""
    return [row + (row >= pad_id) for row in random_rows(VOCAB - 1, lengths, seed)]


@every_head
@every_config
def test_outputs_with_either_padding(number: int, head: str, tmp_path: Path) -> None:
    model = hf_model(HEADS[head], number, **CONFIGS[number])
    found = imported(model, tmp_path)
    assert found.config.head == head
    pad_id = model.config.pad_token_id
    rows = texts([7, 3, 11, 1], number, pad_id)
    assert_same_outputs(model, found.net, rows, pad_id)


@every_head
def test_outputs_with_types_where_a_file_has_them(head: str, tmp_path: Path) -> None:
    model = small(HEADS[head], type_vocab_size=3)
    found = imported(model, tmp_path)
    lengths = [7, 3]
    types = [row.sort().values for row in random_rows(3, lengths)]
    assert_same_outputs(model, found.net, texts(lengths), pad_id=1, types=types)


@pytest.mark.parametrize("head", ["mlm", "classify"])
@every_config
@torch.no_grad()
def test_weights_go_both_ways(number: int, head: str, tmp_path: Path) -> None:
    model = hf_model(HEADS[head], number, **CONFIGS[number])
    found = imported(model, tmp_path)
    assert not found.notices
    back = assert_round_trips(model, found, tmp_path, HEADS[head])
    for key in ("pad_token_id", "max_position_embeddings", "num_labels"):
        assert getattr(back.config, key) == getattr(model.config, key)
    ids = torch.stack(texts([9, 9], number, model.config.pad_token_id))
    torch.testing.assert_close(output(back, ids), output(model, ids), **CLOSE)


@torch.no_grad()
def test_the_pooler_alone_is_lost_without_a_head(tmp_path: Path) -> None:
    model = small(transformers.RobertaModel)
    found = imported(model, tmp_path)
    (notice,) = found.notices
    assert notice.endswith(
        "left out what the model has no place for: pooler.dense.bias, pooler.dense.weight"
    )
    back = exported(found, tmp_path / "exported", Poolerless)
    ids = torch.stack(texts([9, 9]))
    torch.testing.assert_close(output(back, ids), output(model, ids), **CLOSE)


@torch.no_grad()
def test_an_untied_output_reads_the_bias_beside_its_matrix(tmp_path: Path) -> None:
    """transformers keeps a second one there, which nothing reads."""
    model = small(HEADS["mlm"], tie_word_embeddings=False)
    found = imported(model, tmp_path)
    assert found.net.head.weight is not found.net.embedding.tokens.weight
    assert [notice.split(": ")[-1] for notice in found.notices] == ["lm_head.bias"]
    rows = texts([7, 3])
    assert_same_outputs(model, found.net, rows, pad_id=1)
    again = rewritten(found, tmp_path / "exported")
    assert again.config == found.config
    assert_same_net(found.net, again.net)
    back, report = HEADS["mlm"].from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.bias"}
    assert not report["unexpected_keys"]
    assert_same_outputs(back.eval(), found.net, rows, pad_id=1)


def test_a_masked_lm_opened_as_a_classifier(tmp_path: Path) -> None:
    model = small(HEADS["mlm"], num_hidden_layers=2)
    found = imported(model, tmp_path, head="classify", num_labels=3)
    assert_same_encoder(found.net, imported(model, tmp_path).net)
    out, left = found.notices
    assert "no place for: lm_head.bias" in out
    assert left.endswith(
        "has nothing for head.dense.bias, head.dense.weight, head.out.bias and 1 more: "
        "left as initialised"
    )
    back = exported(found, tmp_path / "exported", HEADS["classify"])
    assert back.config.num_labels == 3
    assert_same_outputs(back, found.net, texts([7, 3]), pad_id=1)


def test_a_base_models_pooler_is_no_classifier(tmp_path: Path) -> None:
    found = imported(small(transformers.RobertaModel), tmp_path, head="classify")
    out, left = found.notices
    assert out.endswith("pooler.dense.bias, pooler.dense.weight")
    assert "head.dense.weight" in left


@pytest.mark.parametrize("head", ["mlm", "classify"])
def test_any_file_opened_without_a_head_gives_its_states(head: str, tmp_path: Path) -> None:
    model = small(HEADS[head])
    found = imported(model, tmp_path, head="none")
    (notice,) = found.notices
    assert ("lm_head.bias" if head == "mlm" else "classifier.dense.bias") in notice
    assert_same_outputs(model.roberta, found.net, texts([7, 3]), pad_id=1)


def test_a_classifier_opened_as_a_masked_lm_lacks_the_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor lm_head\."):
        imported(small(HEADS["classify"]), tmp_path, head="mlm")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key_query"),
        ("hidden_act", "mish"),
    ],
)
def test_settings_that_are_not_built_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key} is {value!r}"):
        read_config("roberta", {"model_type": "roberta", key: value})


def test_positions_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UserError, match="pad_token_id is null"):
        read_config("roberta", {"pad_token_id": None})
    with pytest.raises(UserError, match="max_length must be at least 1, not 0"):
        read_config("roberta", {"pad_token_id": 3, "max_position_embeddings": 4})


def test_classes_that_are_not_built_are_refused() -> None:
    with pytest.raises(UserError, match="RobertaForCausalLM; known here: RobertaForMaskedLM"):
        read_config("roberta", {"architectures": ["RobertaForCausalLM"]})


def test_what_a_config_leaves_out_is_their_default() -> None:
    full = transformers.RobertaConfig().to_dict()
    assert read_config("roberta", {}) == read_config("roberta", full)


def test_the_published_config_is_ours() -> None:
    """What the published base model's config.json says."""
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
    assert read_config("roberta", published) == roberta.Config()


def test_a_classifier_has_dropout_before_both_matrices() -> None:
    sizes = {"d_model": 8, "num_heads": 2, "num_layers": 1, "d_ff": 8, "vocab_size": VOCAB}
    head = roberta.build(roberta.Config(**sizes, head="classify", dropout=0.3)).head
    assert head.input_dropout.p == head.dropout.p == 0.3
    config = roberta.Config(**sizes, head="classify", classifier_dropout=0.0)
    head = roberta.build(config).head
    assert head.input_dropout.p == head.dropout.p == 0


@pytest.mark.parametrize(("size", "millions"), [("base", 124.7), ("large", 355.4)])
def test_the_sizes_have_the_published_parameters(size: str, millions: float) -> None:
    config = roberta.Config(**roberta.SIZES[size])
    content = config_to_hf(roberta.HF, config)
    with torch.device("meta"):
        ours = parameter_count(roberta.build(config))
        theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**content))
    assert ours == theirs.num_parameters()
    assert ours / 1e6 == pytest.approx(millions, abs=0.05)


# The traps that published code fell into.


@torch.no_grad()
def test_trap_positions_begin_after_the_paddings_row(tmp_path: Path) -> None:
    """At row 2 of 514, so that 512 tokens fit; and left padding does not move them there either."""
    net = roberta.build(roberta.Config(**TINY))
    assert net.embedding.positions.weight.shape == (514, 2)
    found = net.embedding.positions(512)
    assert torch.equal(found[0], net.embedding.positions.weight[2:])
    with pytest.raises(UserError, match="513 tokens"):
        net(torch.zeros(1, 513, dtype=torch.long))
    model = small(HEADS["mlm"])
    ids, lengths, mask = padded(texts([7, 3]), "left", pad_id=1)
    ours = imported(model, tmp_path).net(ids, lengths, padding_side="left")
    real = mask.bool()
    torch.testing.assert_close(ours[real], output(model, ids, mask)[real], **CLOSE)


@torch.no_grad()
def test_trap_the_longest_text_fits(tmp_path: Path) -> None:
    model = small(HEADS["mlm"])
    net = imported(model, tmp_path).net
    ids = torch.stack(texts([16]))
    torch.testing.assert_close(net(ids), output(model, ids), **CLOSE)


def test_trap_norms_have_the_published_epsilon() -> None:
    """1e-5, while files that leave it out mean BERT's."""
    norms = [
        part
        for part in roberta.build(roberta.Config(**TINY)).modules()
        if isinstance(part, nn.LayerNorm)
    ]
    assert [norm.eps for norm in norms] == [1e-5] * 4
    assert read_config("roberta", {}).norm_eps == 1e-12


def test_trap_the_head_for_masked_tokens_is_gelu_whatever_the_layers_are(tmp_path: Path) -> None:
    net = imported(small(HEADS["mlm"], hidden_act="relu"), tmp_path).net
    assert net.head.activation is torch.nn.functional.gelu
    assert net.encoder.blocks[0].feedforward.sublayer.activation is torch.nn.functional.relu


def test_trap_tied_weights_are_one_and_saved_once(tmp_path: Path) -> None:
    found = imported(small(HEADS["mlm"]), tmp_path)
    assert found.net.head.weight is found.net.embedding.tokens.weight
    _, tensors = net_to_hf("roberta", found.config, found.net)
    assert {"lm_head.decoder.weight", "lm_head.decoder.bias"}.isdisjoint(tensors)
    bias = tensors["lm_head.bias"]
    rewritten(found, tmp_path / "both", **{"lm_head.decoder.bias": bias.clone()})
    with pytest.raises(UserError, match=r"lm_head\.decoder\.bias differs from lm_head\.bias"):
        rewritten(found, tmp_path / "differ", **{"lm_head.decoder.bias": bias + 1})
