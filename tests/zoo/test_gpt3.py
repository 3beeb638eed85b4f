"""GPT-3 against GPT-Neo of transformers: windows, logits, import and export, sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_parity import DecoderCase, DecoderParityTests, assert_same_logits, random_net
from heedful.errors import UserError
from heedful.zoo import gpt3
from heedful.zoo.hf import ImportedNet, net_from_hf, net_to_hf, read_hf_directory
from hf_parity import assert_same_net, by_key, exported, imported, random_rows, transformers

TURNS = ["global", "local"]
TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 12,
    "num_heads": 3,
    "num_layers": 3,
    "max_length": 24,
    "window": 3,
}
# Local layers only or first, fewer types than layers, and the default with half of them.
OTHER_TURNS: list[tuple[int, Any]] = [
    (2, [[["local"], 2]]),
    (2, [[TURNS[::-1], 1]]),
    (4, [[TURNS, 1]]),
    (12, [[TURNS, 24]]),
]
NEO = {"scale_scores": False, "qkv_bias": False}
GPT3 = DecoderCase(
    name="gpt3",
    hf_config=transformers.GPTNeoConfig,
    hf_class=transformers.GPTNeoForCausalLM,
    sizes={
        "vocab_size": 23,
        "max_position_embeddings": 24,
        "window_size": 3,
        "hidden_size": 12,
        "num_heads": 3,
        "num_layers": 2,
        "attention_types": [[TURNS, 1]],
    },
    configs=[
        {},
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
    ],
    ours=TINY | NEO,
    kept=("attention_layers",),
    missing_key_values=NEO | {"d_model": 2048, "num_heads": 16, "num_layers": 24},
    unsupported=by_key(activation_function="tanh")
    | {"resid_dropout is 0.0 and attention_dropout is 0.5, but": {"attention_dropout": 0.5}}
    | {
        f"attention_types is {types}, but heedful's gpt3 supports {layers} layers": {
            "num_layers": layers,
            "attention_types": types,
        }
        for layers, types in OTHER_TURNS
    },
    other_class="GPTNeoForTokenClassification",
    # The paper's names of them, which are rounded.
    published={
        size: pytest.approx(millions * 1e6, rel=0.02)
        for size, millions in {
            "small": 125,
            "medium": 350,
            "large": 760,
            "xl": 1_300,
            "2.7b": 2_700,
            "6.7b": 6_700,
            "13b": 13_000,
            "175b": 175_000,
        }.items()
    },
    tied={"lm_head.weight": "transformer.wte.weight"},
    buffers={
        "transformer.h.1.attn.attention.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool),
        "transformer.h.1.attn.attention.masked_bias": torch.tensor(-1e9),
    },
)


class TestParity(DecoderParityTests):
    case = GPT3


# --- which layers see what ------------------------------------------------------------------


def test_attention_types_can_be_listed_or_missing() -> None:
    """The defaults are 24 alternating layers, and a window of 256."""
    listed = GPT3.read(num_layers=2, attention_types=[[["global"], 1], [["local"], 1]])
    assert listed.window == 256
    assert GPT3.read(window_size=9).window == 9
    with pytest.raises(UserError, match="supports 12 layers"):
        GPT3.read(num_layers=12)


# --- what GPT-Neo does otherwise ------------------------------------------------------------


@torch.no_grad()
def test_scaled_scores_equal_scaled_queries(tmp_path: Path) -> None:
    """GPT-Neo's files with query weights divided by the root of the head width."""
    net, _ = random_net("gpt3", **TINY | {"qkv_bias": False})
    plain = gpt3.build(gpt3.Config(**TINY | NEO))
    plain.load_state_dict(net.state_dict())
    for block in plain.decoder.blocks:
        block.self_attention.sublayer.qkv.weight[:12] /= 2.0  # √4
    actual = ImportedNet("gpt3", gpt3.Config(**TINY | NEO), plain, [])
    model = exported(actual, tmp_path, transformers.GPTNeoForCausalLM)
    assert_same_logits(model, net, random_rows(19, [14, 5]))


@pytest.mark.parametrize(
    "keys",
    [{}, {"scale_scores": False}, {"qkv_bias": False}, {"window": None, "qkv_bias": False}],
    ids=["neither", "bias", "scale", "dense"],
)
def test_configs_that_gpt_neo_does_not_support_are_refused_with_the_keys_to_set(
    keys: dict[str, Any],
) -> None:
    net, config = random_net("gpt3", **TINY | keys)
    with pytest.raises(UserError, match="scale_scores: false and qkv_bias: false"):
        net_to_hf("gpt3", config, net)


def test_a_head_width_without_a_key_is_not_exported() -> None:
    """Of a net without windows the error advised to train one without windows."""
    for keys in (NEO, {"window": None}):
        net, config = random_net("gpt3", **TINY | keys | {"head_dim": 6})
        with pytest.raises(UserError, match=r"^head_dim is 6, .* d_model / num_heads \(4\) only"):
            net_to_hf("gpt3", config, net)
    net, config = random_net("gpt3", **TINY | NEO | {"head_dim": 4})
    assert net_to_hf("gpt3", config, net)[0]["model_type"] == "gpt_neo"


def test_a_file_of_gpt_neo_is_not_read_with_scaled_scores(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scale_scores: false"):
        imported(GPT3.model(), tmp_path, scale_scores=True)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_model_without_windows_is_exported_as_gpt_2(tied: bool, tmp_path: Path) -> None:
    keys = {"window": None, "tie_embeddings": tied, "d_ff": 7, "norm_eps": 1e-2}
    net, config = random_net("gpt3", **TINY | keys)
    actual = ImportedNet("gpt3", config, net, [])
    model = exported(actual, tmp_path, transformers.GPT2LMHeadModel)
    assert_same_logits(model, net, random_rows(19, [14, 5]))
    again = net_from_hf(read_hf_directory(tmp_path), "file")
    assert again.architecture == "gpt2"
    assert_same_net(again.net, net)


def test_head_widths_are_those_of_the_paper() -> None:
    widths = {}
    for size, keys in gpt3.SIZES.items():
        with torch.device("meta"):
            net = gpt3.build(gpt3.Config(**keys | {"num_layers": 1}))
        widths[size] = net.decoder.blocks[0].self_attention.sublayer.head_dim
    others = {"small": 64, "medium": 64, "large": 96, "2.7b": 80}
    assert widths == dict.fromkeys(gpt3.SIZES, 128) | others
