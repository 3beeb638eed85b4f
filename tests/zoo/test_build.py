"""Stacks built from specifications, with layers that differ."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from heedful.parts.experts import Experts
from heedful.parts.feedforward import FeedForward
from heedful.parts.residual import PostNorm, PreNorm
from heedful.zoo import bart
from heedful.zoo.build import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    StackSpec,
    two_stacks,
)

BLOCK = BlockSpec(PreNorm, nn.LayerNorm, AttentionSpec(2), FeedForwardSpec(8, "relu"), dropout=0.1)


def test_layers_do_not_share_modules():
    windowed = replace(
        BLOCK,
        residual=PostNorm,
        attention=replace(BLOCK.attention, num_kv_heads=1, window=3),
        feedforward=replace(BLOCK.feedforward, experts=ExpertsSpec(3, 2, 0.5)),
        feedforward_dropout=0.0,
        attention_norm=nn.Identity,
    )
    first, second = StackSpec(4, [BLOCK, windowed]).build().blocks
    assert isinstance(first.feedforward.sublayer, FeedForward)
    assert (first.self_attention.dropout.p, first.feedforward.dropout.p) == (0.1, 0.1)
    assert isinstance(second.self_attention, PostNorm)
    assert isinstance(second.self_attention.norm, nn.Identity)
    assert isinstance(second.feedforward.norm, nn.LayerNorm)
    attention = second.self_attention.sublayer
    assert (attention.num_heads, attention.num_kv_heads, attention.window) == (2, 1, 3)
    assert isinstance(second.feedforward.sublayer, Experts)
    assert (second.self_attention.dropout.p, second.feedforward.dropout.p) == (0.1, 0.0)


def test_queries_and_keys_have_separate_norms_over_the_head_width():
    normed = replace(BLOCK.attention, head_dim=6, qk_norm=partial(nn.RMSNorm, eps=1e-5))
    attention = normed.build(4)
    assert attention.query_norm is not attention.key_norm
    assert attention.query_norm.normalized_shape == attention.key_norm.normalized_shape == (6,)


def test_cross_attention_has_no_window_and_no_positions():
    position = nn.Identity()
    attention = AttentionSpec(2, scale=1.0, window=3, position=position, bias=False)
    block = replace(BLOCK, attention=attention).build(4, cross=True)
    own, cross = block.self_attention.sublayer, block.cross_attention.sublayer
    assert (own.window, own.position, cross.window, cross.position) == (3, position, None, None)
    assert (cross.scale, cross.q.bias) == (1.0, None)
    assert replace(BLOCK, attention=attention).build(4, cross=False).cross_attention is None


def test_final_norm_and_dropout_exist_if_specified():
    plain = StackSpec(4, [BLOCK]).build()
    assert isinstance(plain.final_norm, nn.Identity)
    assert isinstance(plain.final_dropout, nn.Identity)
    ended = StackSpec(4, [BLOCK], nn.LayerNorm, 0.3).build()
    assert ended.final_norm.normalized_shape == torch.Size([4])
    assert ended.final_dropout.p == 0.3


def test_the_decoder_may_have_other_heads_and_hidden_units():
    config = bart.Config(d_model=4, num_heads=4, num_encoder_layers=1, num_decoder_layers=2)
    encoder, decoder = two_stacks(config, BLOCK)
    assert (encoder.blocks, decoder.blocks) == ([BLOCK], [BLOCK, BLOCK])
    assert bart.decoder_block(config, BLOCK) == BLOCK
    config = replace(config, num_decoder_heads=1, decoder_d_ff=16)
    own = bart.decoder_block(config, BLOCK)
    encoder, decoder = two_stacks(config, BLOCK, decoder_block=own)
    actual = [(one.attention.num_heads, one.feedforward.d_ff) for one in decoder.blocks]
    assert (encoder.blocks, actual) == ([BLOCK], [(1, 16), (1, 16)])
