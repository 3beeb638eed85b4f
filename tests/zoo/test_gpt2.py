"""GPT-2 against transformers: logits, padding, import and export, sizes of the paper."""

from pathlib import Path

import pytest
import torch

from decoder_parity import DecoderCase, DecoderParityTests, assert_same_logits, random_net
from heedful.errors import UserError
from heedful.zoo.hf import (
    HfDirectory,
    ImportedNet,
    net_from_hf,
    net_to_hf,
    read_hf_directory,
    write_hf_directory,
)
from hf_parity import assert_same_net, by_key, exported, millions, random_rows, transformers

GPT2 = DecoderCase(
    name="gpt2",
    hf_config=transformers.GPT2Config,
    hf_class=transformers.GPT2LMHeadModel,
    sizes={"vocab_size": 23, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2},
    configs=[
        {},
        {"n_embd": 10, "n_head": 5, "n_layer": 1, "n_inner": 7, "activation_function": "relu"},
        {"n_embd": 8, "n_head": 1, "n_layer": 3, "tie_word_embeddings": False},
        {"n_embd": 14, "n_head": 7, "layer_norm_epsilon": 1e-3, "n_positions": 11},
    ],
    lengths=(7, 3, 11, 1),
    ours={"vocab_size": 19, "d_model": 12, "num_heads": 3, "num_layers": 2, "max_length": 16},
    unsupported=by_key(
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        add_cross_attention=True,
        activation_function="tanh",
    )
    | {  # what a file leaves out is 0.1
        "resid_pdrop is 0.1 and attn_pdrop is 0.0, but": {"embd_pdrop": 0.1, "attn_pdrop": 0.0},
        "resid_pdrop is 0.0 and embd_pdrop is 0.1, but": {"resid_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    other_class="GPT2DoubleHeadsModel",
    published={
        "small": millions(124.4),
        "medium": millions(354.8),
        "large": millions(774.0),
        "xl": millions(1557.6),
    },
    counted=transformers.GPT2LMHeadModel,
    tied={"lm_head.weight": "transformer.wte.weight"},
    buffers={
        "transformer.h.1.attn.bias": torch.ones(1, 1, 16, 16),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    },
)


class TestParity(DecoderParityTests):
    case = GPT2


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_net_without_biases_is_exported_with_zeros(tied: bool, tmp_path: Path) -> None:
    """It is imported without biases, also after transformers has written it again."""
    net, config = random_net("gpt2", **GPT2.ours, bias=False, tie_embeddings=tied)
    assert not any(name.endswith("bias") for name, _ in net.named_parameters())
    actual = ImportedNet("gpt2", config, net, [])
    model = exported(actual, tmp_path / "ours", transformers.GPT2LMHeadModel)
    assert_same_logits(model, net, random_rows(19, [12, 5]))
    model.save_pretrained(tmp_path / "theirs")
    for directory in ("ours", "theirs"):
        again = net_from_hf(read_hf_directory(tmp_path / directory), "file")
        assert again.config == config
        assert_same_net(again.net, net)


@torch.no_grad()
def test_trained_biases_of_a_file_are_not_dropped(tmp_path: Path) -> None:
    net, config = random_net("gpt2", **GPT2.ours, bias=False)
    content, tensors = net_to_hf("gpt2", config, net)
    assert content["heedful_bias"] is False
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = 1e-6
    write_hf_directory(tmp_path / "file", content, tensors)
    directory = read_hf_directory(tmp_path / "file")
    zeros = {name for name in tensors if name.endswith("bias")}
    without = {name: tensor for name, tensor in tensors.items() if name not in zeros}
    assert_same_net(net_from_hf(HfDirectory(content, {}, without), "file").net, net)
    with pytest.raises(UserError, match=r"transformer\.h\.1\.mlp\.c_fc\.bias should be zeros"):
        net_from_hf(directory, "file")
    actual = net_from_hf(directory, "file", bias=True)
    assert actual.net.decoder.blocks[1].feedforward.sublayer.up.bias[3] == 1e-6
    assert "heedful_bias" not in net_to_hf("gpt2", actual.config, actual.net)[0]
    assert {tensor.dtype for tensor in net_to_hf("gpt2", config, net.half())[1].values()} == {
        torch.float16
    }
