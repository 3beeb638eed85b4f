"""Mistral against transformers: sliding windows with either padding, files both ways, sizes."""

from pathlib import Path

import pytest
import torch

from decoder_parity import (
    HF_SIZES,
    TINY,
    DecoderCase,
    RotaryLaws,
    assert_cached_is_uncached,
    assert_same_logits,
    random_net,
)
from heedful.zoo import llama
from hf_parity import by_key, imported, random_rows, transformers

OURS = TINY | {"window": 3}
MISTRAL = DecoderCase(
    name="mistral",
    hf_config=transformers.MistralConfig,
    hf_class=transformers.MistralForCausalLM,
    sizes=HF_SIZES | {"max_position_embeddings": 400, "sliding_window": 3},
    configs=[
        {},
        {
            "hidden_size": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "sliding_window": 1,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 10,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "sliding_window": None,
        },
        {
            "hidden_size": 7,  # their Mistral, unlike their Llama, lets the heads not divide it
            "num_attention_heads": 2,
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
    ],
    ours=OURS,
    by_rule={"head_dim": 4},
    kept=("sliding_window",),
    left_out={"head_dim": None, "max_length": 131072, "norm_eps": 1e-6},
    not_built=by_key(hidden_act="tanh")
    | {
        "layer_types has full_attention": {"layer_types": ["full_attention"]},
        "'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "window must be at least 1": {"sliding_window": 0},
    },
    other_class="MistralForSequenceClassification",
    impossible={
        "window must be at least 1, not -1": {"window": -1},
        "num_heads 32 is not divisible by num_kv_heads 5": {"num_kv_heads": 5},
    },
    published={"7b": 7_241_732_096, "7b-v0.2": 7_241_732_096, "7b-v0.3": 7_248_023_552},
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    buffers={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
)


class TestLaws(RotaryLaws):
    case = MISTRAL


def test_a_text_much_longer_than_the_window(tmp_path: Path) -> None:
    """So long that attention takes the queries in several parts."""
    model = MISTRAL.model()
    net = imported(model, tmp_path).net
    assert_same_logits(model, net, random_rows(23, [300, 131]))
    assert_cached_is_uncached(net, [150, 20], [130, 1, 19])


@pytest.mark.parametrize("window", [1, 2, 5])
@torch.no_grad()
def test_trap_18_a_window_counts_the_query_itself(window: int) -> None:
    """With one layer the token `window` places back is the first that changes nothing."""
    net, _ = random_net("mistral", **OURS | {"num_layers": 1, "window": window})
    ids = torch.stack(random_rows(19, [8]))
    for back in range(8):
        other = ids.clone()
        other[0, 7 - back] = (other[0, 7 - back] + 1) % 19
        changed = not torch.equal(net(other)[0, 7], net(ids)[0, 7])
        assert changed == (back < window), back


@torch.no_grad()
def test_without_a_window_it_is_llama() -> None:
    net, config = random_net("mistral", **OURS | {"window": None})
    keys = {key: value for key, value in OURS.items() if key != "window"}
    other = llama.build(llama.Config(**keys, norm_eps=config.norm_eps)).eval()
    other.load_state_dict(net.state_dict())
    ids = torch.stack(random_rows(19, [12]))
    assert torch.equal(other(ids), net(ids))
