"""LLaMA against transformers: logits, all rotary scalings, import and export, sizes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_parity import (
    HF_SIZES,
    TINY,
    DecoderCase,
    RotaryParityTests,
    assert_same_logits,
    random_net,
)
from heedful.errors import UserError
from heedful.parts.positions import YarnScaling
from heedful.zoo.hf import ImportedNet, net_from_hf, net_to_hf, read_hf_directory
from heedful.zoo.rotary import rotary_module
from heedful.zoo.saved import make_config
from hf_parity import by_key, exported, random_rows, transformers

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
LLAMA = DecoderCase(
    name="llama",
    hf_config=transformers.LlamaConfig,
    hf_class=transformers.LlamaForCausalLM,
    sizes=HF_SIZES | {"num_key_value_heads": None},
    configs=[
        {"num_key_value_heads": 1},
        {
            "hidden_size": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "hidden_act": "gelu",
        },
        {
            "hidden_size": 10,
            "num_attention_heads": 5,
            "mlp_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_act": "relu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
        },
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 30,
            },
        },
        {
            "hidden_size": 16,
            "num_attention_heads": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        },
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 200, "beta_fast": 16},
        },
        {
            "hidden_size": 16,
            "num_attention_heads": 1,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 99,
                "beta_slow": 2.0,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
    ],
    lengths=(9, 4, 23, 1),
    ours=TINY | {"d_ff": None, "num_kv_heads": None},
    by_rule={"d_ff": 256, "num_kv_heads": 4, "head_dim": 4},
    missing_key_values={"d_ff": 11008},
    unsupported=by_key(hidden_act="tanh", partial_rotary_factor=0.5)
    | {
        "'dynamic'; it depends on the length": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'longrope'; it depends on the length": {
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}
        },
        "'proportional'; supported: default, linear, llama3, yarn": {
            "rope_parameters": {"rope_type": "proportional"}
        },
        "facto of rope_scaling": {"rope_scaling": {"type": "linear", "facto": 2.0}},
        "factor of rope_parameters is not supported for default": {
            "rope_parameters": {"rope_theta": 5.0, "factor": 2.0}
        },
        "full_attention of rope_parameters": {
            "rope_parameters": {"full_attention": {"rope_theta": 5.0}}
        },
        "lacks factor": {"rope_scaling": {"type": "linear"}},
        "lacks high_freq_factor": {
            "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        },
        "partial_rotary_factor is 0.25": {
            "rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.25}
        },
    },
    own_dropouts=("dropout",),
    other_class="LlamaForSequenceClassification",
    invalid={
        "rope_scaling: Input tag 'dynamic' found using 'type' does not match": {
            "rope_scaling": {"type": "dynamic"}
        },
        "rope_scaling: Unable to extract tag using discriminator 'type'": {
            "rope_scaling": {"factor": 2.0}
        },
        "rope_scaling.linear.factr: Unexpected keyword": {
            "rope_scaling": {"type": "linear", "factor": 2.0, "factr": 2.0}
        },
        "original_length": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "ntk.factor: Input": {"rope_scaling": {"type": "ntk", "factor": "much"}},
        "ntk.factor: Input should be greater": {"rope_scaling": {"type": "ntk", "factor": 0}},
        "llama3: low 4.0 must": {"rope_scaling": {"type": "llama3", "low": 4.0}},
        "yarn: slow 40.0 must": {
            "rope_scaling": {"type": "yarn", "factor": 2, "original_length": 9, "slow": 40}
        },
        "even head_dim, not 5": {"head_dim": 5},
        "even head_dim, not 3": {"d_model": 12, "num_heads": 4},
        "d_model 4096 is not divisible by num_heads 3": {"num_heads": 3},
        "not divisible by num_kv_heads 5": {"num_kv_heads": 5},
        "rope_base must be above 0": {"rope_base": 0.0},
    },
    published={
        "7b": 6_738_415_616,
        "13b": 13_015_864_320,
        "33b": 32_528_943_616,
        "65b": 65_285_660_672,
        "2-7b": 6_738_415_616,
        "2-13b": 13_015_864_320,
        "2-70b": 68_976_648_192,
        "3-8b": 8_030_261_248,
        "3-70b": 70_553_706_496,
        "3.1-8b": 8_030_261_248,
        "3.1-70b": 70_553_706_496,
        "3.1-405b": 405_853_388_800,
        "3.2-1b": 1_235_814_400,
        "3.2-3b": 3_212_749_824,
    },
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    buffers={
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.rotary_emb.inv_freq": torch.ones(2),
    },
)


class TestParity(RotaryParityTests):
    case = LLAMA


def loaded_by_transformers(net: Any, config: Any, directory: Path) -> Any:
    """heedful's net as loaded by transformers."""
    return exported(ImportedNet("llama", config, net, []), directory, transformers.LlamaForCausalLM)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_width_that_transformers_refuses_is_not_exported(name: str) -> None:
    net, config = random_net(name, **TINY | {"d_model": 15, "head_dim": 4})
    with pytest.raises(UserError, match="d_model 15 is not divisible by num_heads 4"):
        net_to_hf(name, config, net)


# --- rotary positions -----------------------------------------------------------------------

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OURS_LLAMA3 = {"type": "llama3", "factor": 32.0, "low": 1.0, "high": 4.0}
OURS_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_length": 2048,
    "slow": 1.0,
    "fast": 32.0,
    "attention_factor": None,
    "truncate": True,
}
ORIGINAL = "original_max_position_embeddings"
LINEAR = {"type": "linear", "factor": 2.0}


ROPE_FILES: dict[str, tuple[dict[str, Any], float, dict[str, Any] | None]] = {
    "nothing": ({}, 1e4, None),
    "old-default": ({"rope_theta": 5, "rope_scaling": None}, 5.0, None),
    "new-default": ({"rope_parameters": {"rope_theta": 7.0}}, 7.0, None),
    "new-with-base-outside": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_theta": 9.0},
        9.0,
        LINEAR,
    ),
    "old-type": ({"rope_scaling": LINEAR}, 1e4, LINEAR),
    "both-types": (
        {"rope_scaling": {"rope_type": "linear", **LINEAR}, "rope_theta": 3.0},
        3.0,
        LINEAR,
    ),
    "old-wins": ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 7.0}}, 1e4, LINEAR),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", ORIGINAL: 8192, **LLAMA3}},
        1e4,
        {**OURS_LLAMA3, "original_length": 8192},
    ),
    "llama3-without-original": (
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        1e4,
        {**OURS_LLAMA3, "original_length": 2048},
    ),
    "original-outside-wins": (
        {"rope_parameters": {"rope_type": "llama3", ORIGINAL: 8192, **LLAMA3}, ORIGINAL: 512},
        1e4,
        {**OURS_LLAMA3, "original_length": 512},
    ),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4, "finetuned": True}}, 1e4, OURS_YARN),
    "yarn-factor-from-lengths": (
        {"rope_parameters": {"rope_type": "yarn", "factor": None, ORIGINAL: 2048}}
        | {"max_position_embeddings": 8192},
        1e4,
        OURS_YARN,
    ),
    "yarn-attention-factor-wins": (
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}
            | {"mscale": 1.0, "mscale_all_dim": 0.7}
        },
        1e4,
        OURS_YARN | {"attention_factor": 1.5},
    ),
}


@pytest.mark.parametrize(("content", "base", "scaling"), ROPE_FILES.values(), ids=ROPE_FILES.keys())
def test_rotary_keys_of_old_and_new_files(
    content: dict[str, Any], base: float, scaling: dict[str, Any] | None
) -> None:
    """As transformers reads them."""
    config = LLAMA.read(**content)
    assert config.rope_base == base
    assert asdict(config)["rope_scaling"] == scaling
    reference = transformers.LlamaConfig(**json.loads(json.dumps(content)))
    rotation = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(reference)
    ours = rotary_module(config)
    torch.testing.assert_close(ours.table, rotation.inv_freq, rtol=1e-5, atol=0)
    assert ours.factor == pytest.approx(rotation.attention_scaling)


@torch.no_grad()
def test_ntk_scaling_is_exported_as_a_larger_base(tmp_path: Path) -> None:
    """And imported as such, with bit-equal frequencies."""
    keys = TINY | {"d_model": 32, "rope_scaling": {"type": "ntk", "factor": 3}}
    net, config = random_net("llama", **keys)
    assert_same_logits(loaded_by_transformers(net, config, tmp_path), net, random_rows(19, [12, 5]))
    again = net_from_hf(read_hf_directory(tmp_path), "file")
    assert again.config.rope_base == 10000.0 * 3 ** (8 / 6)
    assert again.config.rope_scaling is None
    ids = torch.stack(random_rows(19, [12]))
    assert torch.equal(again.net(ids), net(ids))


def test_all_values_of_a_scaling_are_stored_as_plain_keys() -> None:
    config = make_config(
        "llama", {"rope_scaling": {"type": "yarn", "factor": 4, "original_length": 9}}
    )
    assert config.rope_scaling == YarnScaling(4.0, 9)
    assert asdict(config)["rope_scaling"] == OURS_YARN | {"original_length": 9}
    assert make_config("llama", json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("factor", [0.5, 4.0])
@pytest.mark.parametrize("over", [None, 0.7, 1.0])
@pytest.mark.parametrize("under", [None, 0.5, 1.0])
def test_the_default_attention_factor_of_yarn_equals_transformers(
    factor: float, over: float | None, under: float | None
) -> None:
    """For every subset of the two numbers that determine the factor."""
    both = {"mscale": over, "mscale_all_dim": under}
    scaling = YARN | {"factor": factor, ORIGINAL: 16}
    scaling |= {key: value for key, value in both.items() if value is not None}
    config = transformers.LlamaConfig(**LLAMA.sizes, rope_parameters=scaling)
    ours = rotary_module(LLAMA.read(**config.to_dict()))
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert ours.factor == pytest.approx(reference.attention_scaling)
    torch.testing.assert_close(ours.table, reference.inv_freq)
