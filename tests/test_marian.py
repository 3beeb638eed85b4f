"""Marian against transformers: logits, padding, caches, both ways of the weights, its sizes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import net_from_hf, net_to_hf
from heedful.zoo import marian
from heedful.zoo.hf import config_keys_from_hf, config_to_hf
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, assert_round_trips, imported, random_hf, transformers
from seq2seq_parity import (
    assert_cached_is_uncached,
    assert_same_logits,
    random_pairs,
    theirs_of,
)

SRC_VOCAB, TGT_VOCAB = 23, 29
SIZES: dict[str, Any] = {
    "vocab_size": SRC_VOCAB,
    "pad_token_id": 22,
    "decoder_start_token_id": 22,
    "max_position_embeddings": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "d_model": 12,
    "scale_embedding": True,
    "activation_function": "swish",
}
SEPARATE: dict[str, Any] = {
    "share_encoder_decoder_embeddings": False,
    "decoder_vocab_size": TGT_VOCAB,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    SEPARATE | {"activation_function": "gelu", "decoder_layers": 1},
    SEPARATE | {"tie_word_embeddings": False, "activation_function": "relu", "dropout": 0},
    {
        "d_model": 15,  # odd: a sine more than cosines
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 7,
        "decoder_ffn_dim": 9,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "scale_embedding": False,
    },
]


def hf_model(keys: dict[str, Any], seed: int = 0, model_class: str = "MarianMTModel") -> Any:
    """Random, but with the position tables as they are."""
    model = random_hf(
        getattr(transformers, model_class), transformers.MarianConfig(**SIZES | keys), seed
    )
    with torch.no_grad():
        for stack in (model.get_encoder(), model.get_decoder()):
            stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
    if model_class == "MarianMTModel":
        model.final_logits_bias.normal_()
    return model


def content_of(**changes: Any) -> dict[str, Any]:
    return transformers.MarianConfig(**SIZES).to_dict() | {"architectures": None} | changes


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
    back = assert_round_trips(model, found, tmp_path, transformers.MarianMTModel)
    net = found.net
    pairs = random_pairs(
        net.src_embedding.tokens.num_embeddings, net.tgt_embedding.tokens.num_embeddings, "right"
    )
    torch.testing.assert_close(theirs_of(back, pairs).logits, theirs_of(model, pairs).logits)


@pytest.mark.parametrize(
    ("number", "tied", "matrices"), [(0, "all", 1), (1, "decoder", 2), (2, "none", 3)]
)
@torch.no_grad()
def test_trap_19_tied_matrices_are_one(
    number: int, tied: str, matrices: int, tmp_path: Path
) -> None:
    found = imported(hf_model(CONFIGS[number]), tmp_path)
    assert found.config.tie_embeddings == tied
    net = found.net
    three = {net.src_embedding.tokens.weight, net.tgt_embedding.tokens.weight, net.head.weight}
    assert len(three) == matrices
    _, tensors = net_to_hf(found.architecture, found.config, net)
    written = [name for name, tensor in tensors.items() if tensor.size(0) in (SRC_VOCAB, TGT_VOCAB)]
    assert len(written) == matrices


@pytest.mark.parametrize("width", [12, 15])
@torch.no_grad()
def test_trap_24_all_sines_stand_before_all_cosines(width: int) -> None:
    net = marian.build(marian.Config(9, 9, d_model=width, num_heads=3, d_ff=4, max_length=30))
    sines = (width + 1) // 2
    for embedding in (net.src_embedding, net.tgt_embedding):
        table = embedding.positions.weight
        for position in (0, 1, 7, 29):
            for index in range(width):
                frequency = 10000 ** (-2 * (index % sines) / width)
                wave = math.sin if index < sines else math.cos
                assert table[position, index] == pytest.approx(wave(position * frequency), abs=1e-6)


@torch.no_grad()
def test_position_tables_and_tied_matrices_in_a_file_are_passed_over(tmp_path: Path) -> None:
    """Files of transformers 3 and 4 hold them."""
    model = hf_model({})
    found = imported(model, tmp_path)
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    for stack in (model.get_encoder(), model.get_decoder()):
        side = "encoder" if stack is model.get_encoder() else "decoder"
        tensors[f"model.{side}.embed_positions.weight"] = stack.embed_positions.weight.clone()
        tensors[f"model.{side}.embed_tokens.weight"] = model.model.shared.weight.clone()
    tensors["lm_head.weight"] = model.lm_head.weight.clone()
    write_hf_directory(tmp_path / "old", config, tensors)
    again = net_from_hf(read_hf_directory(tmp_path / "old"), "old")
    assert again.notices == []
    assert_same_logits(model, again.net)


@torch.no_grad()
def test_a_file_without_the_bias_on_the_logits_has_none(tmp_path: Path) -> None:
    model = hf_model({})
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path)
    directory = read_hf_directory(tmp_path)
    del directory.tensors["final_logits_bias"]
    found = net_from_hf(directory, "here")
    assert found.notices == ["here has nothing for head.bias: left as initialised"]
    assert_same_logits(model, found.net)


@pytest.mark.parametrize("keys", [{}, SEPARATE])
@torch.no_grad()
def test_a_base_models_file_is_read_without_its_prefix(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_model(keys, model_class="MarianModel")
    found = imported(model, tmp_path)
    pairs = random_pairs(SRC_VOCAB, SRC_VOCAB, "right")
    theirs = theirs_of(model, pairs).last_hidden_state
    ours = found.net.hidden(*pairs[:4])
    real = pairs.tgt_mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], **CLOSE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", False),
        ("encoder_layerdrop", 0.1),
        ("decoder_layerdrop", 0.1),
        ("is_decoder", True),
        ("is_encoder_decoder", False),
        ("normalize_before", True),
        ("normalize_embedding", True),
        ("add_final_layer_norm", True),
        ("static_position_embeddings", False),
        ("activation_function", "tanh"),
    ],
)
def test_what_is_not_built_is_refused_with_its_key(key: str, value: object) -> None:
    assert config_keys_from_hf(marian.HF, content_of(), "here")
    with pytest.raises(UserError, match=rf"{key} is {value!r}"):
        config_keys_from_hf(marian.HF, content_of(**{key: value}), "here")


def test_a_shared_matrix_needs_one_vocabulary() -> None:
    keys = config_keys_from_hf(marian.HF, content_of(decoder_vocab_size=TGT_VOCAB), "here")
    with pytest.raises(UserError, match="src_vocab_size is 23 and tgt_vocab_size 29"):
        make_config("marian", keys)
    assert make_config("marian", keys | {"tie_embeddings": "decoder"})


def test_a_file_of_opus_mt_is_the_base_size() -> None:
    """What the files of its first models say, many keys of which nothing reads any longer."""
    content = {
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bad_words_ids": [[58100]],
        "d_model": 512,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 2048,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 6,
        "decoder_start_token_id": 58100,
        "dropout": 0.1,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 6,
        "eos_token_id": 0,
        "is_encoder_decoder": True,
        "max_length": 512,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 6,
        "num_hidden_layers": 6,
        "pad_token_id": 58100,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "vocab_size": 58101,
    }
    assert make_config("marian", config_keys_from_hf(marian.HF, content, "here")) == marian.Config()


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_sizes_have_the_parameters_of_their_counterparts(size: str) -> None:
    config = marian.Config(**marian.SIZES[size])
    with torch.device("meta"):
        net = marian.build(config)
        theirs = transformers.MarianMTModel(
            transformers.MarianConfig(**config_to_hf(marian.HF, config))
        )
    named = theirs.named_parameters()
    count = sum(p.numel() for name, p in named if "embed_positions" not in name)
    assert parameter_count(net) == count + 58101  # the bias on the logits, a buffer over there
    assert parameter_count(net) / 1e6 == pytest.approx({"base": 73.9, "big": 235.9}[size], abs=0.1)


@torch.no_grad()
def test_a_new_model_is_drawn_as_marian_draws() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 128, "tie_embeddings": "decoder"}
    net = marian.build(marian.Config(50, 60, **sizes))
    for embedding in (net.src_embedding, net.tgt_embedding):
        weight = embedding.tokens.weight
        assert weight.std() == pytest.approx(64**-0.5, rel=0.05)
        assert weight.abs().max() <= math.sqrt(3 / 64)
        assert weight.norm(dim=1).mean() == pytest.approx(1, abs=0.05)
    up = net.encoder.blocks[0].feedforward.sublayer.up
    assert up.weight.abs().max() <= math.sqrt(6 / (64 + 128))
    assert up.weight.std() == pytest.approx(math.sqrt(2 / (64 + 128)), rel=0.05)
    assert not up.bias.any()
    assert not net.head.bias.any()
