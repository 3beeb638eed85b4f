"""StableLM against transformers: partly rotated heads, biases, import and export, sizes."""

from decoder_parity import HF_SIZES, TINY, DecoderCase, RotaryParityTests
from hf_parity import by_key, millions, transformers

STABLELM = DecoderCase(
    name="stablelm",
    hf_config=transformers.StableLmConfig,
    hf_class=transformers.StableLmForCausalLM,
    sizes=HF_SIZES | {"hidden_size": 24, "partial_rotary_factor": 0.25},
    configs=[
        {"use_qkv_bias": True, "tie_word_embeddings": True},
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 3, "layer_norm_eps": 1e-2}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
    ],
    ours=TINY | {"d_model": 32, "rope_fraction": 0.5},
    missing_key_values={"num_kv_heads": 32},
    unsupported=by_key(hidden_act="tanh", qk_layernorm=True, use_parallel_residual=True)
    | {"rotates 3 dimensions of a head": {"partial_rotary_factor": 0.0375}},
    own_dropouts=("dropout",),
    other_class="StableLmForSequenceClassification",
    published={"3b": millions(2795.4), "2-1.6b": millions(1644.5)},
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class TestParity(RotaryParityTests):
    case = STABLELM
