"""GPT against transformers: logits, padding, import and export, the size of the paper."""

import pytest
import torch

from decoder_parity import DecoderCase, DecoderParityTests, random_net
from heedful.errors import UserError
from heedful.zoo.hf import net_to_hf
from hf_parity import transformers

GPT = DecoderCase(
    name="gpt",
    hf_config=transformers.OpenAIGPTConfig,
    hf_class=transformers.OpenAIGPTLMHeadModel,
    sizes={"vocab_size": 23, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2},
    configs=[
        {},
        {"n_embd": 10, "n_head": 5, "n_layer": 1, "afn": "relu", "tie_word_embeddings": False},
        {"n_embd": 8, "n_head": 1, "n_layer": 3, "afn": "silu", "layer_norm_epsilon": 1e-2},
    ],
    lengths=(7, 3, 11, 1),
    ours={"vocab_size": 19, "d_model": 12, "num_heads": 3, "num_layers": 2, "max_length": 16},
    unsupported={
        "afn is 'tanh'; supported: 'gelu', 'relu'": {"afn": "tanh"},
        "resid_pdrop is 0.1 and embd_pdrop is 0.0, but": {"resid_pdrop": 0.1, "embd_pdrop": 0.0},
    },
    other_class="OpenAIGPTDoubleHeadsModel",
    published={"base": 116_534_784},
    tied={"lm_head.weight": "transformer.tokens_embed.weight"},
    buffers={
        "transformer.h.1.attn.bias": torch.ones(1, 1, 16, 16),
        "transformer.position_ids": torch.arange(16),
    },
    shrinks=False,
)


class TestParity(DecoderParityTests):
    case = GPT


def test_a_feedforward_width_without_a_key_is_not_exported() -> None:
    net, config = random_net("gpt", **GPT.ours, d_ff=7)
    with pytest.raises(UserError, match=r"d_ff is 7, .* 4 · d_model \(48\) only"):
        net_to_hf("gpt", config, net)
    net, config = random_net("gpt", **GPT.ours, d_ff=48)
    assert net_to_hf("gpt", config, net)[0]["n_embd"] == 12
