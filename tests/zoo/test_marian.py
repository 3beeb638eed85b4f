"""Marian against transformers: logits, padding, import and export, sizes."""

import math
from typing import Any

import pytest
import torch

from heedful.zoo import marian
from hf_parity import by_key, millions, transformers
from seq2seq_parity import (
    BART_SIZES,
    BART_UNSUPPORTED,
    BartParityTests,
    Seq2SeqCase,
    random_bias,
    tied_to,
)

SRC_VOCAB, TGT_VOCAB = 23, 29
SEPARATE: dict[str, Any] = {
    "share_encoder_decoder_embeddings": False,
    "decoder_vocab_size": TGT_VOCAB,
}
ODD: dict[str, Any] = {
    "d_model": 15,  # a sine more than cosines
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 7,
    "decoder_ffn_dim": 9,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "scale_embedding": False,
}


def prepare(model: Any, keys: dict[str, Any]) -> None:
    """Random position tables are kept; the logits get a bias, if the model has one."""
    for stack in (model.get_encoder(), model.get_decoder()):
        stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
    random_bias(model, keys)


MARIAN = Seq2SeqCase(
    name="marian",
    hf_config=transformers.MarianConfig,
    hf_class=transformers.MarianMTModel,
    base_class=transformers.MarianModel,
    base_configs=({}, SEPARATE),
    sizes=BART_SIZES
    | {"pad_token_id": 22, "decoder_start_token_id": 22, "scale_embedding": True}
    | {"activation_function": "swish"},
    configs=[
        {},
        SEPARATE | {"activation_function": "gelu", "decoder_layers": 1},
        SEPARATE | {"tie_word_embeddings": False, "activation_function": "relu", "dropout": 0},
        ODD,
    ],
    prepare=prepare,
    missing_key_values={
        "d_model": 1024,
        "num_heads": 16,
        "num_encoder_layers": 12,
        "num_decoder_layers": 12,
        "d_ff": 4096,
        "max_length": 1024,
        "activation": "gelu",
        "scale_embeddings": False,
    },
    unsupported=BART_UNSUPPORTED
    | by_key(normalize_embedding=True, static_position_embeddings=False),
    other_class="MarianForCausalLM",
    published={"base": millions(73.9), "big": millions(235.9)},
    beyond=lambda config: -config.tgt_vocab_size,  # in transformers the bias is a buffer
    counted=transformers.MarianMTModel,
    tied=tied_to("model.shared.weight", "model."),
    buffers={
        "model.encoder.embed_positions.weight": torch.zeros(12, 12),
        "model.decoder.embed_positions.weight": torch.zeros(12, 12),
    },
    optional=("final_logits_bias",),
)


class TestParity(BartParityTests):
    case = MARIAN


def test_a_file_of_opus_mt_is_the_base_size() -> None:
    """The config of its first models, many keys of which are no longer read."""
    content = {
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bad_words_ids": [[58100]],
        "d_model": 512,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 2048,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 6,
        "decoder_start_token_id": 58100,
        "dropout": 0.1,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 6,
        "eos_token_id": 0,
        "is_encoder_decoder": True,
        "max_length": 512,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 6,
        "num_hidden_layers": 6,
        "pad_token_id": 58100,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "vocab_size": 58101,
    }
    assert MARIAN.read(**content) == marian.Config()


@torch.no_grad()
def test_a_new_model_is_initialized_as_in_marian() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 128, "tie_embeddings": "decoder"}
    net = marian.build(marian.Config(50, 60, **sizes))
    for embedding in (net.src_embedding, net.tgt_embedding):
        weight = embedding.tokens.weight
        assert weight.std() == pytest.approx(64**-0.5, rel=0.05)
        assert weight.abs().max() <= math.sqrt(3 / 64)
        assert weight.norm(dim=1).mean() == pytest.approx(1, abs=0.05)
    up = net.encoder.blocks[0].feedforward.sublayer.up
    assert up.weight.abs().max() <= math.sqrt(6 / (64 + 128))
    assert up.weight.std() == pytest.approx(math.sqrt(2 / (64 + 128)), rel=0.05)
    assert not up.bias.any()
    assert not net.head.out.bias.any()
