"""Mistral against transformers: sliding windows with either padding, files both ways, sizes."""

from dataclasses import replace
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
from heedful.export.hf_directory import read_hf_directory
from heedful.export.nets import ImportedNet, net_from_hf, net_to_hf
from heedful.zoo import llama, mistral
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

CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 3},
    {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "sliding_window": 1,
        "tie_word_embeddings": True,
    },
    {"hidden_size": 10, "num_attention_heads": 5, "num_key_value_heads": 5, "sliding_window": None},
    {
        "hidden_size": 7,  # their Mistral, unlike their Llama, lets the heads not divide it
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 6,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 99,
        },
    },
]
NUMBERS = range(len(CONFIGS))
TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": None,
    "num_layers": 2,
    "d_ff": 5,
    "max_length": 32,
    "window": 3,
}


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    sizes = {"vocab_size": 23, "num_hidden_layers": 2, "intermediate_size": 7}
    config = transformers.MistralConfig(**{**sizes, "max_position_embeddings": 400, **keys})
    return random_hf(transformers.MistralForCausalLM, config, seed)


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    assert found.config.window == CONFIGS[number]["sliding_window"]
    assert_same_logits(model, found.net, random_rows(23, [9, 4, 17, 1], number), pad_id=5)


@pytest.mark.parametrize("number", NUMBERS)
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.MistralForCausalLM)
    assert back.config.sliding_window == CONFIGS[number]["sliding_window"]
    ids = torch.stack(random_rows(23, [9, 9], number))
    torch.testing.assert_close(back(ids).logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize("number", NUMBERS)
def test_cached_is_uncached_with_left_padding(number: int, tmp_path: Path) -> None:
    net = imported(hf_model(CONFIGS[number], number), tmp_path).net
    assert_cached_is_uncached(net, [11, 4, 1, 7], [3, 1, 5, 2], number)


def test_a_text_much_longer_than_the_window(tmp_path: Path) -> None:
    """So long that attention takes the queries in several parts."""
    model = hf_model(CONFIGS[0])
    net = imported(model, tmp_path).net
    assert_same_logits(model, net, random_rows(23, [300, 131]))
    assert_cached_is_uncached(net, [150, 20], [130, 1, 19])


@pytest.mark.parametrize("window", [1, 2, 5])
@torch.no_grad()
def test_trap_18_a_window_counts_the_query_itself(window: int) -> None:
    """With one layer the token `window` places back is the first that changes nothing."""
    net, _ = random_net("mistral", **TINY | {"num_layers": 1, "window": window})
    ids = torch.stack(random_rows(19, [8]))
    for back in range(8):
        other = ids.clone()
        other[0, 7 - back] = (other[0, 7 - back] + 1) % 19
        changed = not torch.equal(net(other)[0, 7], net(ids)[0, 7])
        assert changed == (back < window), back


@torch.no_grad()
def test_a_net_of_ours_is_theirs(tmp_path: Path) -> None:
    net, config = random_net("mistral", **TINY)
    found = ImportedNet("mistral", config, net, [])
    model = exported(found, tmp_path, transformers.MistralForCausalLM)
    assert_same_logits(model, net, random_rows(19, [12, 5]))
    again = net_from_hf(read_hf_directory(tmp_path), "file")
    assert again.config == replace(config, head_dim=4)
    assert_same_net(again.net, net)


@torch.no_grad()
def test_without_a_window_it_is_llama() -> None:
    net, config = random_net("mistral", **TINY | {"window": None})
    keys = {key: value for key, value in TINY.items() if key != "window"}
    other = llama.build(llama.Config(**keys, norm_eps=config.norm_eps)).eval()
    other.load_state_dict(net.state_dict())
    ids = torch.stack(random_rows(19, [12]))
    assert torch.equal(other(ids), net(ids))


@torch.no_grad()
def test_trap_13_an_interleaved_layout_becomes_half() -> None:
    keys = TINY | {"d_model": 32, "rope_layout": "interleaved"}
    net, config = random_net("mistral", **keys)
    with pytest.raises(UserError, match="to_half_layout"):
        net_to_hf("mistral", config, net)
    half, changed = llama.to_half_layout(net, config)
    ids = torch.stack(random_rows(19, [12]))
    torch.testing.assert_close(half(ids), net(ids), **CLOSE)
    assert net_to_hf("mistral", changed, half)[0]["sliding_window"] == 3


@torch.no_grad()
def test_the_file_of_a_model_without_head_is_read_where_embeddings_are_tied(
    tmp_path: Path,
) -> None:
    model = hf_model(CONFIGS[1])
    found = imported(model.model, tmp_path)
    ids = torch.stack(random_rows(23, [6]))
    torch.testing.assert_close(found.net(ids), model(ids).logits, **CLOSE)


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    config, theirs = read_config("mistral", {"model_type": "mistral"}), transformers.MistralConfig()
    assert (config.window, config.num_kv_heads) == (theirs.sliding_window, 8)
    assert config.max_length == theirs.max_position_embeddings
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.d_ff == theirs.intermediate_size
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"layer_types": ["full_attention"]}, "layer_types is set", id="layers"),
        pytest.param({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'", id="rope"),
        pytest.param({"hidden_act": "tanh"}, "hidden_act is 'tanh'", id="activation"),
        pytest.param({"sliding_window": 0}, "window must be at least 1", id="window"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config("mistral", {"model_type": "mistral", **content})


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("7b", 7_241_732_096), ("7b-v0.2", 7_241_732_096), ("7b-v0.3", 7_248_023_552)],
)
def test_the_sizes_have_the_published_parameters(size: str, parameters: int) -> None:
    with torch.device("meta"):
        net = mistral.build(mistral.Config(**mistral.SIZES[size]))
    assert parameter_count(net) == parameters
