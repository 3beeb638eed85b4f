"""BART against transformers: logits, padding, import and export, sizes of the paper."""

import torch

from heedful.zoo import bart
from hf_parity import assert_initialized, by_key, millions, transformers
from seq2seq_parity import (
    BART_SIZES,
    BART_UNSUPPORTED,
    BartParityTests,
    Seq2SeqCase,
    random_bias,
    tied_to,
)

BART = Seq2SeqCase(
    name="bart",
    hf_config=transformers.BartConfig,
    hf_class=transformers.BartForConditionalGeneration,
    base_class=transformers.BartModel,
    sizes=BART_SIZES,
    configs=[
        {},
        {"scale_embedding": True, "activation_function": "gelu_new", "decoder_layers": 1},
        {
            "d_model": 10,
            "encoder_attention_heads": 5,
            "decoder_attention_heads": 1,
            "encoder_ffn_dim": 7,
            "decoder_ffn_dim": 9,
            "encoder_layers": 1,
            "decoder_layers": 3,
            "activation_function": "relu",
        },
        {"d_model": 14, "encoder_attention_heads": 7, "decoder_attention_heads": 2, "dropout": 0},
    ],
    prepare=random_bias,
    missing_key_values={"attention_dropout": 0.0, "activation_dropout": 0.0} | bart.SIZES["large"],
    unsupported=BART_UNSUPPORTED
    | by_key(normalize_embedding=False, static_position_embeddings=True),
    other_class="BartForSequenceClassification",
    invalid={
        "src_vocab_size is 7 and tgt_vocab_size 50265": {"src_vocab_size": 7},
        "d_model 768 is not divisible by num_decoder_heads 5": {"num_decoder_heads": 5},
    },
    published={"base": millions(139.4), "large": millions(406.3)},
    beyond=lambda config: -config.tgt_vocab_size,  # in transformers the bias is a buffer
    counted=transformers.BartForConditionalGeneration,
    tied=tied_to("model.shared.weight", "model."),
    buffers={"model.encoder.version": torch.tensor([3.0])},  # of the code
    optional=("final_logits_bias",),
)


class TestParity(BartParityTests):
    case = BART


def test_a_new_model_is_initialized_as_published() -> None:
    torch.manual_seed(0)
    net = bart.build(bart.Config(50, 50, d_model=64, num_heads=4, d_ff=128, max_length=64))
    assert_initialized(net, 0.02)
