"""PEGASUS against transformers: logits, padding, import and export, sizes."""

from typing import Any

from test_marian import ODD
from test_marian import prepare as prepare_marian

from hf_parity import by_key, millions, transformers
from seq2seq_parity import BART_SIZES, BART_UNSUPPORTED, BartParityTests, Seq2SeqCase, tied_to

UNTIED: dict[str, Any] = {"tie_word_embeddings": False}


def prepare(model: Any, keys: dict[str, Any]) -> None:
    """As for Marian; an unused shared matrix equals that of the source."""
    prepare_marian(model, keys)
    getattr(model, "model", model).shared.weight.copy_(model.get_encoder().embed_tokens.weight)


PEGASUS = Seq2SeqCase(
    name="pegasus",
    hf_config=transformers.PegasusConfig,
    hf_class=transformers.PegasusForConditionalGeneration,
    base_class=transformers.PegasusModel,
    sizes=BART_SIZES | {"scale_embedding": True},
    configs=[
        {},
        UNTIED | {"activation_function": "gelu", "decoder_layers": 1},
        ODD | {"activation_function": "relu"},
    ],
    prepare=prepare,
    missing_key_values={
        "src_vocab_size": 50265,
        "tgt_vocab_size": 50265,
        "num_encoder_layers": 12,
        "num_decoder_layers": 12,
        "activation": "gelu",
        "scale_embeddings": False,
    },
    unsupported={
        message: keys
        for message, keys in BART_UNSUPPORTED.items()
        if keys.keys().isdisjoint(("tie_word_embeddings", "normalize_before"))
        and "add_final_layer_norm" not in keys
    }
    | by_key(normalize_before=False, add_final_layer_norm=False, normalize_embedding=True)
    | by_key(static_position_embeddings=False, tie_word_embeddings="decoder"),
    other_class="PegasusForCausalLM",
    invalid={
        "src_vocab_size is 7 and tgt_vocab_size 96103": {"src_vocab_size": 7},
        "'none' or 'all'": {"tie_embeddings": "decoder"},
    },
    published={"base": millions(272.2), "large": millions(568.7)},
    beyond=lambda config: -config.tgt_vocab_size,  # in transformers the bias is a buffer
    counted=transformers.PegasusForConditionalGeneration,
    tied=tied_to("model.shared.weight", "model."),
    optional=("final_logits_bias",),
)


class TestParity(BartParityTests):
    case = PEGASUS
