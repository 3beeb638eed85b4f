"""Mistral against transformers: sliding windows with padding, import and export, sizes."""

import torch

from decoder_parity import HF_SIZES, TINY, DecoderCase, RotaryParityTests
from hf_parity import by_key, transformers

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
    lengths=(300, 131, 9, 1),
    ours=OURS,
    by_rule={"head_dim": 4},
    kept=("sliding_window",),
    missing_key_values={"head_dim": None, "max_length": 131072, "norm_eps": 1e-6},
    unsupported=by_key(hidden_act="tanh")
    | {
        "layer_types has full_attention": {"layer_types": ["full_attention"]},
        "'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "window must be at least 1": {"sliding_window": 0},
    },
    own_dropouts=("dropout",),
    other_class="MistralForSequenceClassification",
    published={"7b": 7_241_732_096, "7b-v0.2": 7_241_732_096, "7b-v0.3": 7_248_023_552},
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    buffers={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
)


class TestParity(RotaryParityTests):
    case = MISTRAL
