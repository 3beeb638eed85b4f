"""GPT-3 against transformers' GPT-Neo: bands, logits, files both ways, the paper's sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_parity import (
    assert_cached_is_uncached,
    assert_same_logits,
    random_net,
    read_config,
)
from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import ImportedNet, net_from_hf, net_to_hf
from heedful.zoo import gpt3
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

TURNS = ["global", "local"]
CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 12, "num_heads": 3, "num_layers": 2, "attention_types": [[TURNS, 1]]},
    {
        "hidden_size": 10,
        "num_heads": 5,
        "num_layers": 3,
        "attention_types": [[TURNS, 1], [["global"], 1]],
        "window_size": 1,
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
    {
        "hidden_size": 8,
        "num_heads": 1,
        "num_layers": 2,
        "attention_types": [[["global"], 2]],
        "intermediate_size": 7,
        "layer_norm_epsilon": 1e-2,
    },
    {
        "hidden_size": 8,
        "num_heads": 2,
        "num_layers": 4,
        "attention_types": [[TURNS, 2]],
        "window_size": 5,
    },
]
NUMBERS = range(len(CONFIGS))
TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 12,
    "num_heads": 3,
    "num_layers": 3,
    "max_length": 24,
    "window": 3,
}
NEO = {"scale_scores": False, "qkv_bias": False}


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    sizes = {"vocab_size": 23, "max_position_embeddings": 24, "window_size": 3}
    config = transformers.GPTNeoConfig(**{**sizes, **keys})
    return random_hf(transformers.GPTNeoForCausalLM, config, seed)


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    assert_same_logits(model, found.net, random_rows(23, [9, 4, 17, 1], number), pad_id=5)


@pytest.mark.parametrize("number", NUMBERS)
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.GPTNeoForCausalLM)
    assert back.config.attention_types == CONFIGS[number]["attention_types"]
    ids = torch.stack(random_rows(23, [9, 9], number))
    torch.testing.assert_close(back(ids).logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize("number", NUMBERS)
def test_cached_is_uncached_with_left_padding(number: int, tmp_path: Path) -> None:
    net = imported(hf_model(CONFIGS[number], number), tmp_path).net
    assert_cached_is_uncached(net, [11, 4, 1, 7], [3, 1, 5, 2], number)


@torch.no_grad()
def test_the_file_of_a_model_without_head_is_read(tmp_path: Path) -> None:
    model = hf_model(CONFIGS[0])
    found = imported(model.transformer, tmp_path)
    ids = torch.stack(random_rows(23, [6]))
    torch.testing.assert_close(found.net(ids), model(ids).logits, **CLOSE)


def test_buffers_of_old_files_are_passed_over(tmp_path: Path) -> None:
    net, config = random_net("gpt3", **TINY | NEO)
    content, tensors = net_to_hf("gpt3", config, net)
    tensors["transformer.h.1.attn.attention.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    tensors["transformer.h.1.attn.attention.masked_bias"] = torch.tensor(-1e9)
    write_hf_directory(tmp_path / "old", content, tensors)
    found = net_from_hf(read_hf_directory(tmp_path / "old"), "file")
    assert found.notices == []
    assert_same_net(found.net, net)


# --- which layers see what ------------------------------------------------------------------


@torch.no_grad()
def test_layers_are_dense_and_banded_in_turn() -> None:
    net, _ = random_net("gpt3", **TINY | {"num_layers": 5})
    windows = [block.self_attention.sublayer.window for block in net.decoder.blocks]
    assert windows == [None, 3, None, 3, None]
    net, _ = random_net("gpt3", **TINY | {"window": None})
    assert all(block.self_attention.sublayer.window is None for block in net.decoder.blocks)


@pytest.mark.parametrize(
    ("content", "window"),
    [
        pytest.param({"num_layers": 2, "attention_types": [[TURNS, 1]]}, 256, id="turns"),
        pytest.param(
            {"num_layers": 2, "attention_types": [[["global"], 1], [["local"], 1]]},
            256,
            id="one-by-one",
        ),
        pytest.param({"num_layers": 3, "attention_types": [[["global"], 3]]}, None, id="dense"),
        pytest.param({"num_layers": 24, "window_size": 9}, 9, id="left-out"),
    ],
)
def test_attention_types(content: dict[str, Any], window: int | None) -> None:
    config = read_config("gpt3", {"model_type": "gpt_neo", **content})
    assert config.window == window
    assert not config.scale_scores
    assert not config.qkv_bias


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"num_layers": 2, "attention_types": [[["local"], 2]]}, id="local"),
        pytest.param({"num_layers": 2, "attention_types": [[TURNS[::-1], 1]]}, id="local-first"),
        pytest.param({"num_layers": 4, "attention_types": [[TURNS, 1]]}, id="too-few"),
        pytest.param({"num_layers": 12}, id="default-of-24"),
    ],
)
def test_other_turns_are_refused_by_their_key(content: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"attention_types is .* global and local in turn"):
        read_config("gpt3", {"model_type": "gpt_neo", **content})


# --- what GPT-Neo does otherwise ------------------------------------------------------------


@torch.no_grad()
def test_scaled_scores_are_those_of_larger_queries(tmp_path: Path) -> None:
    """GPT-Neo's files with query weights divided by the root of the head's width."""
    net, _ = random_net("gpt3", **TINY | {"qkv_bias": False})
    plain = gpt3.build(gpt3.Config(**TINY | NEO))
    plain.load_state_dict(net.state_dict())
    for block in plain.decoder.blocks:
        block.self_attention.sublayer.qkv.weight[:12] /= 2.0  # √4
    found = ImportedNet("gpt3", gpt3.Config(**TINY | NEO), plain, [])
    model = exported(found, tmp_path, transformers.GPTNeoForCausalLM)
    assert_same_logits(model, net, random_rows(19, [14, 5]))


@pytest.mark.parametrize(
    "keys",
    [{}, {"scale_scores": False}, {"qkv_bias": False}, {"window": None, "qkv_bias": False}],
    ids=["neither", "bias", "scale", "dense"],
)
def test_what_gpt_neo_is_not_is_refused_with_the_keys_to_set(keys: dict[str, Any]) -> None:
    net, config = random_net("gpt3", **TINY | keys)
    with pytest.raises(UserError, match="scale_scores: false and qkv_bias: false"):
        net_to_hf("gpt3", config, net)


def test_a_head_width_that_their_format_has_no_key_for_is_not_exported() -> None:
    for keys in (NEO, {"window": None}):
        net, config = random_net("gpt3", **TINY | keys | {"head_dim": 6})
        with pytest.raises(UserError):
            net_to_hf("gpt3", config, net)
    net, config = random_net("gpt3", **TINY | NEO | {"head_dim": 6})
    with pytest.raises(UserError, match=r"head_dim is 6, .* d_model / num_heads \(4\) alone"):
        net_to_hf("gpt3", config, net)
    net, config = random_net("gpt3", **TINY | NEO | {"head_dim": 4})
    assert net_to_hf("gpt3", config, net)[0]["model_type"] == "gpt_neo"


def test_a_file_of_gpt_neo_is_not_read_with_scaled_scores(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scale_scores: false"):
        imported(hf_model(CONFIGS[0]), tmp_path, scale_scores=True)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_without_bands_it_is_written_as_gpt_2(tied: bool, tmp_path: Path) -> None:
    keys = {"window": None, "tie_embeddings": tied, "d_ff": 7, "norm_eps": 1e-2}
    net, config = random_net("gpt3", **TINY | keys)
    found = ImportedNet("gpt3", config, net, [])
    model = exported(found, tmp_path, transformers.GPT2LMHeadModel)
    assert_same_logits(model, net, random_rows(19, [14, 5]))
    again = net_from_hf(read_hf_directory(tmp_path), "file")
    assert again.architecture == "gpt2"
    assert_same_net(again.net, net)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", 125),
        ("medium", 350),
        ("large", 760),
        ("xl", 1_300),
        ("2.7b", 2_700),
        ("6.7b", 6_700),
        ("13b", 13_000),
        ("175b", 175_000),
    ],
)
def test_the_sizes_have_the_published_parameters(size: str, millions: int) -> None:
    """The paper's names of them are rounded, by up to 2 per cent."""
    with torch.device("meta"):
        net = gpt3.build(gpt3.Config(**gpt3.SIZES[size]))
    assert parameter_count(net) / 1e6 == pytest.approx(millions, rel=0.02)
    assert net.decoder.blocks[0].self_attention.sublayer.head_dim == {
        "large": 96,
        "2.7b": 80,
        "small": 64,
        "medium": 64,
    }.get(size, 128)
