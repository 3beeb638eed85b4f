"""GPT-2 against transformers: logits, padding, both ways of the weights, the paper's sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_parity import assert_cached_is_uncached, assert_same_logits, random_net
from heedful.bundle import parameter_count
from heedful.errors import UserError
from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import ImportedNet, net_from_hf, net_to_hf
from heedful.zoo import gpt2
from hf_parity import (
    CLOSE,
    assert_round_trips,
    assert_same_net,
    exported,
    imported,
    padded,
    positions_of,
    random_hf,
    random_rows,
    transformers,
)

CONFIGS: list[dict[str, Any]] = [
    {"n_embd": 12, "n_head": 3, "n_layer": 2},
    {"n_embd": 10, "n_head": 5, "n_layer": 1, "n_inner": 7, "activation_function": "relu"},
    {"n_embd": 8, "n_head": 1, "n_layer": 3, "tie_word_embeddings": False},
    {"n_embd": 14, "n_head": 7, "n_layer": 2, "layer_norm_epsilon": 1e-3, "n_positions": 11},
]


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    config = transformers.GPT2Config(**{"vocab_size": 23, "n_positions": 16, **keys})
    return random_hf(transformers.GPT2LMHeadModel, config, seed)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    rows = random_rows(23, [7, 3, 11, 1], number)
    for side in ("right", "left"):
        ids, lengths, mask = padded(rows, side, pad_id=5)
        theirs = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
        ours = found.net(ids, lengths, padding_side=side)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.GPT2LMHeadModel)
    ids = torch.stack(random_rows(23, [9, 9], number))
    torch.testing.assert_close(back(ids).logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize(
    ("size", "millions"), [("small", 124.4), ("medium", 354.8), ("large", 774.0), ("xl", 1557.6)]
)
def test_the_sizes_have_the_published_parameters(size: str, millions: float) -> None:
    with torch.device("meta"):
        net = gpt2.build(gpt2.Config(**gpt2.SIZES[size]))
    assert parameter_count(net) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_cached_is_uncached_with_left_padding(number: int, tmp_path: Path) -> None:
    net = imported(hf_model(CONFIGS[number], number), tmp_path).net
    assert_cached_is_uncached(net, [11, 4, 1, 7], [3, 1, 5, 2], number)


TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 12,
    "num_heads": 3,
    "num_layers": 2,
    "max_length": 16,
}


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_net_without_biases_has_zeros_over_there(tied: bool, tmp_path: Path) -> None:
    """And comes back without, also after transformers has written it again."""
    net, config = random_net("gpt2", **TINY, bias=False, tie_embeddings=tied)
    assert not any(name.endswith("bias") for name, _ in net.named_parameters())
    found = ImportedNet("gpt2", config, net, [])
    model = exported(found, tmp_path / "ours", transformers.GPT2LMHeadModel)
    assert_same_logits(model, net, random_rows(19, [12, 5]))
    model.save_pretrained(tmp_path / "theirs")
    for directory in ("ours", "theirs"):
        again = net_from_hf(read_hf_directory(tmp_path / directory), "file")
        assert again.config == config
        assert_same_net(again.net, net)


@torch.no_grad()
def test_biases_that_were_trained_over_there_are_not_dropped(tmp_path: Path) -> None:
    net, config = random_net("gpt2", **TINY, bias=False)
    content, tensors = net_to_hf("gpt2", config, net)
    assert content["heedful_bias"] is False
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = 1e-6
    write_hf_directory(tmp_path / "file", content, tensors)
    directory = read_hf_directory(tmp_path / "file")
    with pytest.raises(UserError, match=r"transformer\.h\.1\.mlp\.c_fc\.bias is not zero"):
        net_from_hf(directory, "file")
    found = net_from_hf(directory, "file", bias=True)
    assert found.net.decoder.blocks[1].feedforward.sublayer.up.bias[3] == 1e-6


def test_the_key_is_written_of_a_net_without_biases_alone() -> None:
    net, config = random_net("gpt2", **TINY)
    assert "heedful_bias" not in net_to_hf("gpt2", config, net)[0]
