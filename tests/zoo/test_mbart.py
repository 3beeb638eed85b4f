"""mBART-50 against transformers: logits, padding, import and export, sizes."""

from test_m2m100 import SIZES

from hf_parity import by_key, millions, transformers
from seq2seq_parity import BART_UNSUPPORTED, BartParityTests, Seq2SeqCase, random_bias, tied_to

MBART = Seq2SeqCase(
    name="mbart",
    hf_config=transformers.MBartConfig,
    hf_class=transformers.MBartForConditionalGeneration,
    base_class=transformers.MBartModel,
    sizes=SIZES | {"scale_embedding": True, "activation_function": "relu"},
    configs=[
        {},
        {"d_model": 15, "encoder_attention_heads": 5, "scale_embedding": False}
        | {"decoder_layers": 1, "decoder_ffn_dim": 9, "activation_function": "gelu"},
    ],
    prepare=random_bias,
    missing_key_values={
        "src_vocab_size": 50265,
        "tgt_vocab_size": 50265,
        "activation": "gelu",
        "scale_embeddings": False,
    },
    unsupported={
        message: keys
        for message, keys in BART_UNSUPPORTED.items()
        if keys.keys() & {"tie_word_embeddings", "is_decoder", "activation_function"}
    }
    | by_key(normalize_before=False, add_final_layer_norm=False, normalize_embedding=False),
    other_class="MBartForQuestionAnswering",
    published={"large": millions(610.9)},
    beyond=lambda config: -config.tgt_vocab_size,  # in transformers the bias is a buffer
    counted=transformers.MBartForConditionalGeneration,
    tied=tied_to("model.shared.weight", "model."),
    optional=("final_logits_bias",),
)


class TestParity(BartParityTests):
    case = MBART
