"""T5 against transformers: logits, padding, import and export, sizes of the paper."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heedful.errors import UserError
from heedful.parts.attention import Attention
from heedful.parts.tokens import Tokens
from heedful.zoo import t5
from heedful.zoo.hf import net_from_hf, net_to_hf, read_hf_directory, write_hf_directory
from hf_parity import (
    CLOSE,
    assert_round_trips,
    by_key,
    imported,
    random_hf,
    random_rows,
    transformers,
    written,
)
from seq2seq_parity import Seq2SeqCase, Seq2SeqParityTests, assert_same_logits, tied_to

VOCAB = 23
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def untie(model: Any, keys: dict[str, Any]) -> None:
    """A separate output matrix if the config has one.

    Transformers 5 ties it in new models whatever the config is, and not in loaded ones.
    """
    if keys.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, model.config.d_model) / 4)


T5 = Seq2SeqCase(
    name="t5",
    hf_config=transformers.T5Config,
    hf_class=transformers.T5ForConditionalGeneration,
    base_class=transformers.T5Model,
    sizes={
        "vocab_size": VOCAB,
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 3,
        "n_positions": 12,
    },
    configs=[
        {},
        V1_1,
        {
            "d_model": 10,
            "num_heads": 5,
            "d_kv": 3,  # not d_model / num_heads
            "num_layers": 1,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 6,
            "relative_attention_max_distance": 9,
            "feed_forward_proj": "gated-silu",
        },
        V1_1 | {"num_heads": 1, "d_kv": 7, "layer_norm_epsilon": 1e-3, "num_decoder_layers": 1},
        {"feed_forward_proj": "gated-gelu_python", "dropout_rate": 0, "d_ff": 5},
    ],
    prepare=untie,
    unsupported=by_key(
        is_decoder=True,
        is_encoder_decoder=False,
        feed_forward_proj="gated-tanh",
        dense_act_fn="silu",
        is_gated_act=True,
    )
    | {
        "scale_decoder_outputs is True": {
            "tie_word_embeddings": False,
            "scale_decoder_outputs": True,
        }
    },
    other_class="T5EncoderModel",
    invalid={"src_vocab_size is 7 and tgt_vocab_size 32128": {"src_vocab_size": 7}},
    published={
        "small": 60_506_624,
        "base": 222_903_552,
        "large": 737_668_096,
        "3b": 2_851_598_336,
        "11b": 11_307_321_344,
        "1.1-small": 76_961_152,
        "1.1-base": 247_577_856,
        "1.1-large": 783_150_080,
        "1.1-xl": 2_849_757_184,
        "1.1-xxl": 11_135_332_352,
    },
    tied=tied_to("shared.weight"),
)


class TestParity(Seq2SeqParityTests):
    case = T5


@torch.no_grad()
def test_relative_biases_are_stored_once_for_all_layers() -> None:
    actual = T5.net()
    tables = [name for name in written(actual) if "relative_attention_bias" in name]
    assert sorted(tables) == [
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ]
    src = torch.stack(random_rows(VOCAB, [9]))
    calls = []
    first, second = (block.self_attention.sublayer.position for block in actual.net.encoder.blocks)
    assert first is second
    first.register_forward_hook(lambda module, inputs, output: calls.append(output))
    actual.net.encode(Tokens.from_ids(src))
    (scores,) = calls  # formed once for all layers
    assert scores.abs().max() > 0


@torch.no_grad()
def test_hidden_units_beyond_the_range_of_fp16() -> None:
    """They occur in published models; bfloat16, which heedful uses, can represent them."""
    net = T5.net().net
    for stack in (net.encoder, net.decoder):
        for block in stack.blocks:
            block.feedforward.sublayer.up.weight *= 1e6
            block.feedforward.sublayer.down.weight *= 1e-6
    src, tgt = torch.stack(random_rows(VOCAB, [9, 9])), torch.stack(random_rows(VOCAB, [5, 5]))
    exact = net(src, tgt)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(src, tgt).float(), exact, rtol=0.1, atol=0.3)
    with torch.autocast("cpu", torch.float16):
        assert not net(src, tgt).isfinite().all()


@torch.no_grad()
def test_a_file_of_transformers_4_is_read(tmp_path: Path) -> None:
    """It declares an untied output, repeats shared matrices, and has an unused table."""
    model = T5.model(**V1_1)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["scale_decoder_outputs"], content["n_positions"]
    content |= {"tie_word_embeddings": False}
    tensors = dict(read_hf_directory(tmp_path).tensors)
    for side in ("encoder", "decoder"):
        tensors[f"{side}.embed_tokens.weight"] = tensors["shared.weight"].clone()
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[unused] = torch.zeros(32, 3)
    write_hf_directory(tmp_path / "old", content, tensors)
    actual = net_from_hf(read_hf_directory(tmp_path / "old"), "old", max_length=12)
    assert actual.notices == [f"old: ignored tensors that are not in the model: {unused}"]
    assert_same_logits(model, actual.net)


@torch.no_grad()
def test_an_output_that_transformers_5_tied_but_does_not_scale_is_read(tmp_path: Path) -> None:
    """A new model of version 1.1 is saved with one matrix, declared as two."""
    config = transformers.T5Config(**T5.sizes | V1_1)
    model = random_hf(transformers.T5ForConditionalGeneration, config)
    assert model.lm_head.weight is model.shared.weight
    actual = imported(model, tmp_path)
    assert actual.notices == [f"{tmp_path} lacks lm_head.weight: shared.weight is used instead"]
    assert not actual.config.tie_embeddings
    assert_same_logits(model, actual.net)
    assert_round_trips(model, actual, tmp_path, transformers.T5ForConditionalGeneration)


@torch.no_grad()
def test_max_length_limits_heedful_only(tmp_path: Path) -> None:
    model = T5.model()
    net = imported(model, tmp_path).net
    long = torch.stack(random_rows(VOCAB, [200]))
    with pytest.raises(UserError, match=r"200 tokens.*max_length 12"):
        net(long, long)
    net = imported(model, tmp_path, max_length=200).net
    reference = model(input_ids=long, decoder_input_ids=long, use_cache=False).logits
    torch.testing.assert_close(net(long, long), reference, **CLOSE)


@torch.no_grad()
def test_a_new_model_is_initialized_as_in_transformers(tmp_path: Path) -> None:
    """Every standard deviation except that of a separate output matrix."""
    sizes: dict[str, Any] = {
        "vocab_size": 200,
        "d_model": 64,
        "d_kv": 32,
        "d_ff": 160,
        "num_layers": 2,
        "num_heads": 5,
        "relative_attention_num_buckets": 128,
        "relative_attention_max_distance": 200,
    }
    config = T5.read(**sizes, feed_forward_proj="gated-gelu")
    torch.manual_seed(0)
    _, ours = net_to_hf("t5", config, t5.build(config))
    torch.manual_seed(0)
    reference = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
    ).state_dict()
    for name, tensor in ours.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert tensor.std() == pytest.approx(float(reference[name].std()), rel=0.1), name


@torch.no_grad()
def test_a_separate_output_matrix_starts_with_logits_of_size_one() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 128}
    net = t5.build(t5.Config(200, 200, **sizes, tie_embeddings=False)).eval()
    assert net.head.out.weight.std() == pytest.approx(64**-0.5, rel=0.05)
    src, tgt = torch.stack(random_rows(200, [9, 9])), torch.stack(random_rows(200, [9, 9], 1))
    assert net(src, tgt).std() == pytest.approx(1, abs=0.15)


def test_dropout_follows_the_final_norm() -> None:
    net = t5.build(t5.Config(9, 9, d_model=8, num_heads=2, head_dim=4, d_ff=8, dropout=0.5))
    for module in net.modules():
        if isinstance(module, Attention):
            assert module.dropout.p == 0.5
    torch.manual_seed(0)
    zeros = Tokens.from_ids(torch.zeros(4, 9, dtype=int))
    states = net.train().states(zeros, zeros)
    assert 0.3 < (states == 0).float().mean() < 0.7
    states = net.eval().states(zeros, zeros)
    assert (states != 0).all()
