"""The option space of the 2017 Transformer at tiny sizes, for the tests that search it.

Nets are in fp64 with every weight random (biases and norms too), so that a law may be held to
1e-9: no leak is small enough to pass for rounding.
"""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.zoo.vaswani2017 import Config, build

EXACT = {"rtol": 1e-9, "atol": 1e-9}
VOCAB = 13
MAX_LENGTH = 16


@st.composite
def configs(draw: st.DrawFn, *, dropout: float = 0.0) -> Config:
    """Every option that a user can set, with odd head widths and odd head counts."""
    num_heads = draw(st.integers(1, 3))
    width = draw(st.integers(2, 5))
    tie = draw(st.sampled_from(["none", "decoder", "all"]))
    return Config(
        src_vocab_size=VOCAB if tie == "all" else VOCAB + 2,
        tgt_vocab_size=VOCAB,
        d_model=num_heads * width,
        num_heads=num_heads,
        num_encoder_layers=draw(st.integers(1, 2)),
        num_decoder_layers=draw(st.integers(1, 2)),
        d_ff=draw(st.integers(1, 7)),
        dropout=dropout,
        max_length=MAX_LENGTH,
        norm_placement=draw(st.sampled_from(["post", "pre", "output", "sandwich"])),
        positions=draw(st.sampled_from(["sinusoidal", "learned", "none"])),
        activation=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])),
        tie_embeddings=tie,
        final_norm=draw(st.sampled_from([None, True, False])),
        bias=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
    )


def random_net(config: Config, seed: int = 0) -> EncoderDecoder:
    """A net in fp64 and eval mode in which no weight is zero or one by its initialisation."""
    torch.manual_seed(seed)
    net = build(config).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return net


def lengths_of(batch: int, low: int, high: int) -> st.SearchStrategy[list[int]]:
    """`batch` lengths."""
    return st.lists(st.integers(low, high), min_size=batch, max_size=batch)


def random_rows(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """One row of random ids for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def pad(rows: Sequence[Tensor], side: str, *, width: int = 0, pad_id: int | None = 0) -> Tensor:
    """Rows as one batch, at least `width` wide. `pad_id` None pads with random ids."""
    width = max(width, *(row.numel() for row in rows))
    batch = torch.randint(VOCAB, (len(rows), width))
    if pad_id is not None:
        batch.fill_(pad_id)
    for out, row in zip(batch, rows, strict=True):
        out[real(row.numel(), width, side)] = row
    return batch


def real(length: int, width: int, side: str) -> slice:
    """Where the `length` real tokens stand in a row of `width`."""
    return slice(0, length) if side == "right" else slice(width - length, width)
