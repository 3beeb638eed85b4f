"""BART against transformers: logits, padding, caches, weights both ways, the paper's sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import net_from_hf, net_to_hf
from heedful.parts.positions import LearnedTable
from heedful.zoo import bart
from heedful.zoo.hf import config_keys_from_hf
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, assert_round_trips, imported, random_hf, transformers
from seq2seq_parity import (
    assert_cached_is_uncached,
    assert_same_logits,
    random_pairs,
    theirs_of,
)

VOCAB = 23
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "d_model": 12,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"scale_embedding": True, "activation_function": "gelu_new", "decoder_layers": 1},
    {
        "d_model": 10,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 7,
        "decoder_ffn_dim": 9,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "activation_function": "relu",
    },
    {"d_model": 14, "encoder_attention_heads": 7, "decoder_attention_heads": 2, "dropout": 0},
]


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    config = transformers.BartConfig(**SIZES | keys)
    model = random_hf(transformers.BartForConditionalGeneration, config, seed)
    model.final_logits_bias.normal_()
    return model


def content_of(**changes: Any) -> dict[str, Any]:
    return transformers.BartConfig(**SIZES).to_dict() | {"architectures": None} | changes


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    assert_same_logits(model, imported(model, tmp_path).net, number)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_cached_is_uncached_and_left_padding_is_right_padding(number: int, tmp_path: Path) -> None:
    assert_cached_is_uncached(imported(hf_model(CONFIGS[number], number), tmp_path).net, number)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.BartForConditionalGeneration)
    pairs = random_pairs(VOCAB, VOCAB, "right", number)
    torch.testing.assert_close(theirs_of(back, pairs).logits, theirs_of(model, pairs).logits)


@torch.no_grad()
def test_trap_19_one_matrix_is_tied_and_written_once(tmp_path: Path) -> None:
    model = hf_model({})
    found = imported(model, tmp_path)
    net = found.net
    assert net.head.weight is net.src_embedding.tokens.weight is net.tgt_embedding.tokens.weight
    _, tensors = net_to_hf(found.architecture, found.config, net)
    assert [name for name in tensors if tensors[name].size(0) == VOCAB] == ["model.shared.weight"]


@torch.no_grad()
def test_trap_25_the_gelu_is_the_exact_one(tmp_path: Path) -> None:
    net = imported(hf_model({}), tmp_path).net
    x = torch.linspace(-4, 4, 99)
    assert torch.equal(net.encoder.blocks[0].feedforward.sublayer.activation(x), F.gelu(x))
    assert not torch.equal(F.gelu(x), F.gelu(x, approximate="tanh"))


@torch.no_grad()
def test_two_rows_stand_before_the_first_position_and_the_last_is_usable(tmp_path: Path) -> None:
    net = imported(hf_model({}), tmp_path).net
    for embedding in (net.src_embedding, net.tgt_embedding):
        table = embedding.positions
        assert isinstance(table, LearnedTable)
        assert table.weight.size(0) == 12 + 2
        assert torch.equal(table(12)[0], table.weight[2:])
    ids = torch.zeros(1, 12, dtype=torch.int64)
    assert net(ids, ids).shape == (1, 12, VOCAB)
    longer = torch.zeros(1, 13, dtype=torch.int64)
    with pytest.raises(UserError, match=r"13 tokens.*max_length 12"):
        net(ids, longer)


@torch.no_grad()
def test_a_file_without_the_bias_on_the_logits_has_none(tmp_path: Path) -> None:
    model = hf_model({})
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    directory = read_hf_directory(tmp_path)
    del directory.tensors["final_logits_bias"]
    found = net_from_hf(directory, "here")
    assert found.notices == ["here has nothing for head.bias: left as initialised"]
    assert not found.net.head.bias.any()
    assert_same_logits(model, found.net)


@torch.no_grad()
def test_a_base_models_file_is_read_without_its_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random_hf(transformers.BartModel, transformers.BartConfig(**SIZES))
    found = imported(model, tmp_path)
    pairs = random_pairs(VOCAB, VOCAB, "right")
    theirs = theirs_of(model, pairs).last_hidden_state
    ours = found.net.hidden(*pairs[:4])
    real = pairs.tgt_mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], **CLOSE)


@torch.no_grad()
def test_a_file_that_stores_tied_matrices_again_is_read(tmp_path: Path) -> None:
    """As files of transformers 3 and 4 do, with the version of the code in a tensor beside them."""
    model = hf_model({})
    found = imported(model, tmp_path)
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = tensors["model.shared.weight"].clone()
    tensors["model.encoder.version"] = torch.tensor([3.0])
    write_hf_directory(tmp_path / "old", config, tensors)
    again = net_from_hf(read_hf_directory(tmp_path / "old"), "old")
    assert again.notices == []
    assert_same_logits(model, again.net)
    tensors["lm_head.weight"][0, 0] += 1
    write_hf_directory(tmp_path / "untied", config, tensors)
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.shared.weight"):
        net_from_hf(read_hf_directory(tmp_path / "untied"), "untied")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", False),
        ("encoder_layerdrop", 0.1),
        ("decoder_layerdrop", 0.1),
        ("is_decoder", True),
        ("is_encoder_decoder", False),
        ("normalize_before", True),
        ("normalize_embedding", False),
        ("add_final_layer_norm", True),
        ("static_position_embeddings", True),
        ("activation_function", "tanh"),
    ],
)
def test_what_is_not_built_is_refused_with_its_key(key: str, value: object) -> None:
    assert config_keys_from_hf(bart.HF, content_of(), "here")
    with pytest.raises(UserError, match=rf"here: {key} is {value!r}"):
        config_keys_from_hf(bart.HF, content_of(**{key: value}), "here")


def test_other_heads_over_there_are_refused() -> None:
    content = content_of(architectures=["BartForSequenceClassification"])
    with pytest.raises(UserError, match="BartForSequenceClassification"):
        config_keys_from_hf(bart.HF, content, "here")


def test_a_file_may_leave_out_what_their_class_has() -> None:
    keys = config_keys_from_hf(bart.HF, {"model_type": "bart"}, "here")
    ours = make_config("bart", keys)
    large = {"attention_dropout": 0.0, "activation_dropout": 0.0} | bart.SIZES["large"]
    assert ours == bart.Config(**large)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"src_vocab_size": 7}, "src_vocab_size is 7 and tgt_vocab_size 50265"),
        ({"num_heads": 7}, "d_model 768 is not divisible by num_heads 7"),
        ({"num_decoder_heads": 5}, "d_model 768 is not divisible by num_decoder_heads 5"),
        ({"decoder_d_ff": 0}, "decoder_d_ff must be at least 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config("bart", keys)


@pytest.mark.parametrize(("size", "millions"), [("base", 139.4), ("large", 406.3)])
def test_the_sizes_have_the_published_parameters(size: str, millions: float) -> None:
    with torch.device("meta"):
        net = bart.build(bart.Config(**bart.SIZES[size]))
    without_bias = parameter_count(net) - 50265  # which is no parameter over there
    assert without_bias / 1e6 == pytest.approx(millions, abs=0.1)


@torch.no_grad()
def test_a_new_model_is_drawn_as_published() -> None:
    torch.manual_seed(0)
    net = bart.build(bart.Config(50, 50, d_model=64, num_heads=4, d_ff=128, max_length=64))
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std() == pytest.approx(0.02, rel=0.06), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("norm.weight")))
