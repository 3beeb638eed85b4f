"""Qwen3 against transformers: norms of queries and keys, import and export, sizes."""

from decoder_parity import HF_SIZES, TINY, DecoderCase, RotaryParityTests
from hf_parity import by_key, transformers

QWEN3 = DecoderCase(
    name="qwen3",
    hf_config=transformers.Qwen3Config,
    hf_class=transformers.Qwen3ForCausalLM,
    sizes=HF_SIZES | {"head_dim": 6},
    configs=[
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {
            "hidden_size": 7,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        },
    ],
    ours=TINY,
    by_rule={"head_dim": 4},
    missing_key_values={"d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "num_layers": 32}
    | {"d_ff": 22016, "max_length": 32768, "tie_embeddings": False, "rope_base": 10000.0},
    unsupported=by_key(hidden_act="tanh", use_sliding_window=True)
    | {"layer_types has sliding_attention": {"layer_types": ["sliding_attention"]}},
    own_dropouts=("dropout",),
    other_class="Qwen3ForSequenceClassification",
    published={
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    },
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class TestParity(RotaryParityTests):
    case = QWEN3
