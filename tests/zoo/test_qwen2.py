"""Qwen2 against transformers: biases, layers with a window, import and export, sizes."""

from decoder_parity import HF_SIZES, TINY, DecoderCase, RotaryParityTests
from hf_parity import by_key, millions, transformers

QWEN2 = DecoderCase(
    name="qwen2",
    hf_config=transformers.Qwen2Config,
    hf_class=transformers.Qwen2ForCausalLM,
    sizes=HF_SIZES,
    configs=[
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
        | {"num_hidden_layers": 3, "num_key_value_heads": 3},
        {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
    ],
    kept=("use_sliding_window", "sliding_window", "layer_types"),
    ours=TINY,
    missing_key_values={"d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "num_layers": 32}
    | {"d_ff": 22016, "tie_embeddings": False, "rope_base": 10000.0},
    unsupported=by_key(hidden_act="tanh")
    | {
        "sliding_attention, full_attention, but": {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "need use_sliding_window": {"layer_types": ["sliding_attention"]},
    },
    own_dropouts=("dropout",),
    other_class="Qwen2ForSequenceClassification",
    published={
        "0.5b": millions(494.0),
        "1.5b": millions(1543.7),
        "7b": millions(7615.6),
        "72b": millions(72706.2),
    },
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class TestParity(RotaryParityTests):
    case = QWEN2
