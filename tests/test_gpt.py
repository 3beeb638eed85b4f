"""GPT against transformers: logits, padding, both ways of the weights, the paper's size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from decoder_parity import (
    assert_cached_is_uncached,
    assert_same_logits,
    random_net,
    read_config,
)
from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import net_from_hf, net_to_hf
from heedful.zoo import gpt
from hf_parity import (
    CLOSE,
    assert_round_trips,
    assert_same_net,
    imported,
    random_hf,
    random_rows,
    transformers,
)

CONFIGS: list[dict[str, Any]] = [
    {"n_embd": 12, "n_head": 3, "n_layer": 2},
    {"n_embd": 10, "n_head": 5, "n_layer": 1, "afn": "relu", "tie_word_embeddings": False},
    {"n_embd": 8, "n_head": 1, "n_layer": 3, "afn": "silu", "layer_norm_epsilon": 1e-2},
]
NUMBERS = range(len(CONFIGS))
TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 12,
    "num_heads": 3,
    "num_layers": 2,
    "max_length": 16,
}


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    config = transformers.OpenAIGPTConfig(**{"vocab_size": 23, "n_positions": 16, **keys})
    return random_hf(transformers.OpenAIGPTLMHeadModel, config, seed)


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    assert_same_logits(model, found.net, random_rows(23, [7, 3, 11, 1], number), pad_id=5)


@pytest.mark.parametrize("number", NUMBERS)
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.OpenAIGPTLMHeadModel)
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
    net, config = random_net("gpt", **TINY)
    content, tensors = net_to_hf("gpt", config, net)
    tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["transformer.position_ids"] = torch.arange(16)
    write_hf_directory(tmp_path / "old", content, tensors)
    found = net_from_hf(read_hf_directory(tmp_path / "old"), "file")
    assert found.notices == []
    assert_same_net(found.net, net)


@torch.no_grad()
def test_trap_25_what_their_files_call_gelu_is_its_approximation() -> None:
    config = read_config("gpt", {"model_type": "openai-gpt", "afn": "gelu"})
    assert config.activation == "gelu_tanh"
    mlp = random_net("gpt", **TINY)[0].decoder.blocks[0].feedforward.sublayer
    x = torch.linspace(-3, 3, 50)
    assert torch.equal(mlp.activation(x), F.gelu(x, approximate="tanh"))
    assert not torch.equal(mlp.activation(x), F.gelu(x))


def test_trap_19_tied_embeddings_are_one_parameter() -> None:
    net, config = random_net("gpt", **TINY)
    assert net.head.weight is net.embedding.tokens.weight
    assert "lm_head.weight" not in net_to_hf("gpt", config, net)[1]


def test_a_width_that_their_format_has_no_key_for_is_not_exported() -> None:
    net, config = random_net("gpt", **TINY, d_ff=7)
    with pytest.raises(UserError, match=r"d_ff is 7, .* 4 · d_model \(48\) alone"):
        net_to_hf("gpt", config, net)
    net, config = random_net("gpt", **TINY, d_ff=48)
    assert net_to_hf("gpt", config, net)[0]["n_embd"] == 12


def test_another_activation_is_refused_by_its_key() -> None:
    with pytest.raises(UserError, match="afn is 'tanh'; known here: 'gelu', 'relu'"):
        read_config("gpt", {"model_type": "openai-gpt", "afn": "tanh"})


def test_new_weights_are_all_of_one_size() -> None:
    """N(0, 0.02²), also where a residual branch ends: GPT-2 was the first to shrink those."""
    torch.manual_seed(0)
    net = gpt.build(gpt.Config(vocab_size=50, d_model=96, num_heads=2, num_layers=4))
    for name, weight in net.named_parameters():
        if weight.dim() > 1:
            assert weight.std().item() == pytest.approx(0.02, rel=0.06), name


def test_the_paper_has_the_published_parameters() -> None:
    with torch.device("meta"):
        net = gpt.build(gpt.Config(**gpt.SIZES["base"]))
    assert parameter_count(net) == 116_534_784
