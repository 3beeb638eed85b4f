"""Gemma 3 against transformers: local and global layers, caps, import and export, sizes."""

from functools import partial
from pathlib import Path

import pytest
import torch

from decoder_parity import (
    HF_SIZES,
    TINY,
    DecoderCase,
    DecoderParityTests,
    assert_same_logits,
)
from heedful.errors import UserError
from heedful.parts.positions import LinearScaling
from heedful.parts.tokens import Tokens
from heedful.zoo.hf import net_to_hf
from hf_parity import CLOSE, by_key, imported, millions, padded, random_rows, transformers

LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}
OURS = TINY | {"num_layers": 3, "window": 3, "global_every": 2}
GEMMA3 = DecoderCase(
    name="gemma3",
    hf_config=transformers.Gemma3TextConfig,
    hf_class=transformers.Gemma3ForCausalLM,
    sizes=HF_SIZES
    | {"num_hidden_layers": 3, "head_dim": 6, "max_position_embeddings": 400, "sliding_window": 3}
    | {"query_pre_attn_scalar": 5, "sliding_window_pattern": 2},
    configs=[
        {},
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
            "sliding_window_pattern": 6,
        },
        {
            "hidden_size": 10,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ],
    lengths=(300, 131, 9, 1),
    ours=OURS,
    shrinks=False,
    by_rule={"head_dim": 4},
    kept=("sliding_window", "layer_types", "rope_parameters", "final_logit_softcapping"),
    missing_key_values={"vocab_size": 262208, "d_model": 2304, "num_heads": 8, "num_kv_heads": 4}
    | {"d_ff": 9216, "max_length": 131072, "window": 4096},
    unsupported=by_key(
        hidden_activation="tanh", use_bidirectional_attention=True, attn_logit_softcapping=0.5
    )
    | {
        "layer_types is full_attention, sliding_attention, but every k-th": {
            "layer_types": ["full_attention", "sliding_attention"]
        },
        "rope_theta of rope_parameters is not supported": {"rope_parameters": {"rope_theta": 5.0}},
        "rope_type of sliding_attention is linear": {
            "rope_parameters": {"sliding_attention": LINEAR}
        },
        "'dynamic'": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "window": {"sliding_window": None},
    },
    own_dropouts=("dropout",),
    other_class="Gemma3ForSequenceClassification",
    invalid={"rope_layout": {"rope_layout": "interleaved"}},
    # Table 1 for those from 4B on, there rounded; of the others the files' own.
    published={
        "270m": 268_098_176,
        "1b": 999_885_952,
        "4b": millions(3_884, 5),
        "12b": millions(11_771, 6),
        "27b": millions(27_016, 7),
    },
    counted=transformers.Gemma3ForCausalLM,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class TestParity(DecoderParityTests):
    case = GEMMA3


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_by_the_factor_in_their_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """√12 is 3.4641, in bf16 3.46875."""
    model = GEMMA3.model()
    net = imported(model, tmp_path).net.to(dtype)
    ids = torch.stack(random_rows(23, [9]))
    theirs = model.to(dtype).model.embed_tokens(ids)
    assert torch.equal(net.embedding(Tokens.from_ids(ids)), theirs)
    assert (net.embedding.tokens(ids) * net.embedding.scale == theirs).all() == (
        dtype == torch.float32
    )


def test_scores_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the function of transformers, which its Gemma 3 does not use."""
    model = GEMMA3.model()
    net = imported(model, tmp_path, score_softcap=0.5).net
    rows = random_rows(23, [9, 4])
    with pytest.raises(AssertionError):
        assert_same_logits(model, net, rows)
    reference = transformers.models.gemma3.modeling_gemma3
    capped = partial(reference.eager_attention_forward, softcap=0.5)
    monkeypatch.setattr(reference, "eager_attention_forward", capped)
    assert_same_logits(model, net, rows)


def test_a_cap_of_the_scores_which_transformers_ignores_is_not_exported(tmp_path: Path) -> None:
    capped = imported(GEMMA3.model(), tmp_path, score_softcap=0.5)
    with pytest.raises(
        UserError, match=r"score_softcap is 0\.5, which transformers does not apply"
    ):
        net_to_hf("gemma3", capped.config, capped.net)


@torch.no_grad()
def test_a_cache_is_filled_by_more_tokens_than_a_window_takes_at_once(tmp_path: Path) -> None:
    net = imported(GEMMA3.model(), tmp_path, score_softcap=0.5).net
    ids, lengths, mask = padded(random_rows(23, [150, 4, 1, 7]), "left")
    tokens, cache = Tokens.from_ids(ids, lengths, "left"), net.start(4, capacity=150)
    parts = (tokens.ids, tokens.positions, mask.bool())
    pieces = zip(*(part.split([130, 1, 19], dim=1) for part in parts), strict=True)
    logits = torch.cat([net.head(net.decode(Tokens(*piece), cache)) for piece in pieces], dim=1)
    whole = net(ids, lengths, padding_side="left")
    torch.testing.assert_close(logits[mask.bool()], whole[mask.bool()], **CLOSE)


def test_files_of_early_transformers_5_have_the_same_config() -> None:
    """They have a base of null and a type beside the types of layers."""
    types = {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 7.0}}
    beside = {"rope_theta": None, "rope_type": "default"}
    assert GEMMA3.read(rope_parameters=types | beside) == GEMMA3.read(rope_parameters=types)


def test_files_of_the_first_release_have_the_same_config() -> None:
    """With bases, and a scaling of the global layers only."""
    old = {"rope_theta": 9.0, "rope_local_base_freq": 7.0, "sliding_window_pattern": 3}
    config = GEMMA3.read(**old, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (config.rope_base, config.local_rope_base, config.global_every) == (9.0, 7.0, 3)
    assert config.rope_scaling == LinearScaling(8.0)
