"""Properties of the stacks that the files of the zoo construct, which no parity test shows."""

from itertools import combinations

import torch
from torch import nn

from architectures import config_of, tiny
from heedful.parts.residual import SandwichNorm
from heedful.zoo import architecture

SIZES = {"d_model": 8, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "max_length": 16}
SIZES |= dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), 13)


def build(name, **keys):
    return architecture(name).build(config_of(name, SIZES, keys))


def test_layers_share_positions_and_no_weights():
    blocks = build("llama").decoder.blocks
    for first, second in combinations(blocks, 2):
        assert not {*map(id, first.parameters())} & {*map(id, second.parameters())}
    positions = {id(block.self_attention.sublayer.position) for block in blocks}
    assert len(positions) == 1


def test_local_and_global_layers_have_their_own_positions_and_windows():
    net = build("gemma3", num_layers=4, global_every=2, window=3, rope_base=50.0)
    attentions = [block.self_attention.sublayer for block in net.decoder.blocks]
    assert [attention.window for attention in attentions] == [3, None, 3, None]
    local, own = attentions[0].position, attentions[1].position
    assert [attention.position for attention in attentions] == [local, own, local, own]
    assert not torch.equal(local.table, own.table)


def test_queries_and_keys_have_separate_norms_over_the_head_width():
    for name in ("qwen3", "gemma3"):
        attention = build(name, head_dim=6).decoder.blocks[0].self_attention.sublayer
        assert attention.query_norm is not attention.key_norm
        assert attention.query_norm.weight.shape == attention.key_norm.weight.shape == (6,)


def test_cross_attention_has_no_positions():
    block = tiny("t5").decoder.blocks[1]
    own, cross = block.self_attention.sublayer, block.cross_attention.sublayer
    assert own.position is not None
    assert (cross.position, cross.scale, cross.q.bias) == (None, 1.0, None)
    assert tiny("t5").encoder.blocks[0].cross_attention is None


def test_final_norm_and_dropout_exist_if_the_paper_has_them():
    plain = build("bert").encoder
    assert isinstance(plain.final_norm, nn.Identity)
    assert isinstance(plain.final_dropout, nn.Identity)
    ended = build("t5", dropout=0.3).encoder
    assert ended.final_norm.normalized_shape == (8,)
    assert ended.final_dropout.p == 0.3


def test_dropouts_of_a_block_are_those_of_the_config():
    block = build("modernbert", dropout=0.1, attention_dropout=0.2, d_ff=12).encoder.blocks[1]
    assert (block.self_attention.dropout.p, block.feedforward.dropout.p) == (0.2, 0.0)
    assert block.feedforward.sublayer.dropout.p == 0.1
    block = build("distilbert", dropout=0.1).encoder.blocks[0]
    assert (block.self_attention.dropout.p, block.feedforward.dropout.p) == (0.0, 0.1)


def test_a_norm_of_the_embeddings_replaces_the_first_norm_of_modernbert():
    norms = [block.self_attention.norm for block in build("modernbert", d_ff=12).encoder.blocks]
    assert [type(norm) for norm in norms] == [nn.Identity, nn.LayerNorm, nn.LayerNorm]


def test_both_norms_of_a_sandwich_are_separate():
    residual = build("gemma3").decoder.blocks[0].feedforward
    assert isinstance(residual, SandwichNorm)
    assert residual.norm is not residual.output_norm


def test_the_decoder_may_have_other_heads_and_hidden_units():
    for name in ("bart", "marian", "pegasus"):
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 2, "d_ff": 20}
        actual = {}
        for keys in ({}, {"num_decoder_heads": 1, "decoder_d_ff": 16}):
            net = build(name, **layers, **keys)
            blocks = [*net.encoder.blocks, *net.decoder.blocks]
            heads = [block.self_attention.sublayer.num_heads for block in blocks]
            hidden = [block.feedforward.sublayer.up.out_features for block in blocks]
            actual[len(keys)] = [*zip(heads, hidden, strict=True)]
        assert actual == {0: [(4, 20)] * 3, 2: [(4, 20), (1, 16), (1, 16)]}
