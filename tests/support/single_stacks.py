"""The option space of all families, built from parts.

As in `option_space.py` nets are in fp64 with every weight random, so that properties can be checked
to 1e-9. Angles of rotary positions are in fp32, but equal however a text is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.embeddings import LearnedTable, Positions, SinusoidalTable, TokenEmbedding
from heedful.parts.feedforward import Activation, FeedForward, Gate
from heedful.parts.heads import (
    ClassificationHead,
    MaskedTokenHead,
    MaskedTokenTransform,
    OutputHead,
    Scale,
    tied_linear,
)
from heedful.parts.init import init_weights
from heedful.parts.positions import (
    AlibiBias,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RelativePositionBias,
    RotaryPositions,
    Scaling,
    YarnScaling,
)
from heedful.parts.residual import PLACEMENTS, Norm, NormPlacement, Residual
from option_space import VOCAB, configs, random_net, randomized

MAX_LENGTH = 40
LABELS = 3
STRETCHES: list[Scaling] = [
    LinearScaling(2.0),
    NtkScaling(4.0),
    Llama3Scaling(original_length=16),
    YarnScaling(4.0, 16),
]
# By name, so that one can be selected: the scheme of the embeddings, and that of attention.
ADDED: dict[str, Positions] = {
    "sinusoidal": SinusoidalTable,
    "sinusoidal-halves": partial(SinusoidalTable, halves=True),
    "learned": LearnedTable,
    "learned-offset": partial(LearnedTable, offset=2),
}
RELATIVE: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "rotary": lambda heads, width, causal: RotaryPositions(width, 100.0),
    "rotary-interleaved": lambda heads, width, causal: RotaryPositions(width, 100.0, "interleaved"),
    **{
        f"rotary-{type(s).__name__}": lambda heads, width, causal, s=s: RotaryPositions(
            width, 100.0, scaling=s
        )
        for s in STRETCHES
    },
    "alibi": lambda heads, width, causal: AlibiBias(heads),
    "buckets": lambda heads, width, causal: RelativePositionBias(heads, 8, 6, causal=causal),
    "buckets-few": lambda heads, width, causal: RelativePositionBias(heads, 4, 3, causal=causal),
}
SCHEMES = [*ADDED, "none", *RELATIVE]


@dataclass(frozen=True)
class Single:
    """One stack's choices; `windows` has one entry a layer, None: all keys."""

    scheme: str = "rotary"
    d_model: int = 6
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 4
    d_ff: int = 5
    windows: tuple[int | None, ...] = (None, None)
    norm: Norm = nn.RMSNorm
    placement: NormPlacement = "pre"
    network: Activation | Gate = "swiglu"
    bias: bool = False
    tied: bool = True
    final_norm: bool = True
    embedding_norm: bool = False
    scale: float | None = None
    dropout: float = 0.0


@st.composite
def singles(draw: st.DrawFn, *, dropout: float = 0.0) -> Single:
    """Every choice at tiny sizes: odd widths, heads that are no part of the model's width."""
    scheme = draw(st.sampled_from(SCHEMES))
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]))
    half = draw(st.integers(1, 3))
    window = st.none() | st.integers(1, 4)
    layers = draw(st.integers(1, 3))
    return Single(
        scheme=scheme,
        d_model=draw(st.integers(4, 7)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=2 * half if scheme.startswith("rotary") else draw(st.integers(1, 5)),
        d_ff=draw(st.integers(4, 8)),
        windows=tuple(draw(window) for _ in range(layers)),
        norm=draw(st.sampled_from([nn.LayerNorm, partial(nn.LayerNorm, bias=False), nn.RMSNorm])),
        placement=draw(st.sampled_from(get_args(NormPlacement))),
        network=draw(st.sampled_from([*get_args(Activation), *get_args(Gate)])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0])),
        dropout=dropout,
    )


WRITERS = ["decoder", "two stacks", "vaswani"]
READERS = ["none", "tokens", "classes"]


@st.composite
def nets(draw: st.DrawFn, kinds: Sequence[str] = (*WRITERS, *READERS)) -> Any:
    """A net of these kinds with any of its options."""
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 99))
    if kind == "vaswani":
        return random_net(draw(configs()), seed)
    single = draw(singles())
    if kind in READERS:
        return encoder(single, kind, seed)
    return (decoder if kind == "decoder" else two_stacks)(single, seed)


def decoder(single: Single, seed: int = 0) -> DecoderOnly:
    """A language model in fp64 and eval mode, every weight random."""
    torch.manual_seed(seed)
    embedding, stack = _embedding(single), _stack(single, causal=True)
    out = tied_linear(embedding.tokens.weight, bias=single.bias, tied=single.tied)
    return _random(DecoderOnly(embedding, stack, OutputHead(out, Scale(0.7))))


def two_stacks(single: Single, seed: int = 0) -> EncoderDecoder:
    """An encoder and a decoder with cross-attention, as `decoder`."""
    torch.manual_seed(seed)
    target, source = _embedding(single), _embedding(single)
    stacks = _stack(single, causal=False), _stack(single, causal=True, cross=True)
    out = tied_linear(target.tokens.weight, bias=single.bias, tied=single.tied)
    return _random(EncoderDecoder(source, stacks[0], target, stacks[1], OutputHead(out)))


def encoder(single: Single, head: str = "none", seed: int = 0) -> EncoderOnly:
    """An encoder with a head (none, tokens, classes), as `decoder`."""
    torch.manual_seed(seed)
    embedding, stack = _embedding(single, types=True), _stack(single, causal=False)
    heads: dict[str, Any] = {
        "none": lambda: None,
        "tokens": lambda: MaskedTokenHead(
            tied_linear(embedding.tokens.weight, bias=True),
            MaskedTokenTransform(single.d_model, single.norm(single.d_model)),
        ),
        "classes": lambda: ClassificationHead(single.d_model, LABELS),
    }
    return _random(EncoderOnly(embedding, stack, heads[head]()))


def _random(net: Any) -> Any:
    return randomized(init_weights(net).double())


def _embedding(single: Single, *, types: bool = False) -> TokenEmbedding:
    added = ADDED.get(single.scheme)
    return TokenEmbedding(
        nn.Embedding(VOCAB, single.d_model),
        None if added is None else added(MAX_LENGTH, single.d_model),
        max_length=MAX_LENGTH,
        scale=1.5,
        dropout=single.dropout,
        norm=single.norm(single.d_model) if single.embedding_norm else None,
        types=nn.Embedding(2, single.d_model) if types else None,
    )


def _stack(single: Single, *, causal: bool, cross: bool = False) -> Stack:
    position = None
    if single.scheme in RELATIVE:
        position = RELATIVE[single.scheme](single.num_heads, single.head_dim, causal)
    norm = single.norm(single.d_model) if single.final_norm else None
    return Stack((_block(single, position, window, cross) for window in single.windows), norm)


def _block(single: Single, position: nn.Module | None, window: int | None, cross: bool) -> Block:
    shared: dict[str, Any] = {
        "num_kv_heads": single.num_kv_heads,
        "head_dim": single.head_dim,
        "scale": single.scale,
        "dropout": single.dropout,
        "bias": single.bias,
        "out_bias": single.bias,
    }
    width, heads = single.d_model, single.num_heads
    attention = Attention(width, heads, window=window, position=position, **shared)
    across = _residual(single, CrossAttention(width, heads, **shared)) if cross else None
    network = FeedForward(
        single.d_model, single.d_ff, single.network, dropout=single.dropout, bias=single.bias
    )
    return Block(_residual(single, attention), across, _residual(single, network))


def _residual(single: Single, sublayer: nn.Module) -> Residual:
    norm = single.norm(single.d_model)
    return PLACEMENTS[single.placement](sublayer, norm, dropout=single.dropout)
