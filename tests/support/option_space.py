"""The option space of the 2017 Transformer at tiny sizes, for the tests that search it.

Nets are in fp64 with every weight random (biases and norms too), so that properties can be checked
to 1e-9 and no leak is taken for rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import PaddingSide, Tokens
from heedful.zoo.vaswani2017 import Config, build

EXACT = {"rtol": 1e-9, "atol": 1e-9}
VOCAB = 13
MAX_LENGTH = 16
SIDES = st.sampled_from(["right", "left"])
SEARCH = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@st.composite
def configs(draw: st.DrawFn, *, dropout: float = 0.0) -> Config:
    """Every option that a user can set, with odd head widths and odd head counts."""
    num_heads = draw(st.integers(1, 3))
    width = draw(st.integers(2, 5))
    tie = draw(st.sampled_from(["none", "decoder", "all"]))
    positions = draw(st.sampled_from(["sinusoidal", "learned", "rotary", "none"]))
    width += width % 2 if positions == "rotary" else 0
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
        positions=positions,
        activation=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])),
        tie_embeddings=tie,
        final_norm=draw(st.sampled_from([None, True, False])),
        bias=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
    )


def random_net(config: Config, seed: int = 0) -> EncoderDecoder:
    """A net in fp64 and eval mode in which no weight is zero or one by its initialization."""
    torch.manual_seed(seed)
    return randomized(build(config).double())


@torch.no_grad()
def randomized(net: Any, by: float = 0.3) -> Any:
    """The net in eval mode, no weight as its initialization left it."""
    for parameter in net.parameters():
        if parameter.requires_grad:  # transformers' Marian has a table of sines among them
            parameter.add_(torch.randn_like(parameter) * by)
    return net.eval()


def lengths_of(batch: int, low: int, high: int) -> st.SearchStrategy[list[int]]:
    """`batch` lengths."""
    return st.lists(st.integers(low, high), min_size=batch, max_size=batch)


def random_rows(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """One row of random ids for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


class Text(NamedTuple):
    """A row of ids and, for an encoder-decoder, its source."""

    ids: Tensor
    source: Tensor

    def then(self, more: Tensor) -> "Text":
        """The text with more ids appended."""
        return self._replace(ids=torch.cat([self.ids, more]))


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[Text]:
    """Random texts of these lengths, their sources between 0 and 5 tokens long."""
    sources = random_rows([(3 * n + seed + i) % 6 for i, n in enumerate(lengths)], seed + 1)
    return [Text(*both) for both in zip(random_rows(lengths, seed), sources, strict=True)]


def tokens_of(rows: Sequence[Tensor], side: PaddingSide = "right", **padding: Any) -> Tokens:
    """Rows as one padded batch."""
    return Tokens.from_ids(pad(rows, side, **padding), lengths_in(rows), side)


def lengths_in(rows: Sequence[Tensor]) -> Tensor:
    """The length of each row."""
    return torch.tensor([row.numel() for row in rows])


def outputs(
    net: Any, texts: Sequence[Text], side: PaddingSide = "right", **padding: Any
) -> list[Tensor]:
    """Outputs of a net at the real tokens of each text, from one padded batch."""
    rows, sources = [text.ids for text in texts], [text.source for text in texts]
    ids = pad(rows, side, **padding)
    if isinstance(net, EncoderDecoder):
        both = (lengths_in(sources), lengths_in(rows))
        given = net(pad(sources, side, **padding), ids, *both, padding_side=side)
    else:
        given = net(ids, lengths_in(rows), padding_side=side)
    if given.dim() == 2:  # one class a text
        return list(given)
    width = ids.size(1)
    return [out[real(row.numel(), width, side)] for out, row in zip(given, rows, strict=True)]


def alone(net: Any, texts: Sequence[Text]) -> list[Tensor]:
    """The same for each text in a batch of its own, without padding and without lengths."""
    two = isinstance(net, EncoderDecoder)
    return [
        (net(text.source[None], text.ids[None]) if two else net(text.ids[None]))[0]
        for text in texts
    ]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, **EXACT)


def pad(rows: Sequence[Tensor], side: str, *, width: int = 0, pad_id: int | None = 0) -> Tensor:
    """Rows as one batch, at least `width` wide. `pad_id` None pads with random ids."""
    width = max(width, *(row.numel() for row in rows), 0)
    batch = torch.randint(VOCAB, (len(rows), width))
    if pad_id is not None:
        batch.fill_(pad_id)
    for out, row in zip(batch, rows, strict=True):
        out[real(row.numel(), width, side)] = row
    return batch


def real(length: int, width: int, side: str) -> slice:
    """The indices of the `length` real tokens in a row of `width`."""
    return slice(0, length) if side == "right" else slice(width - length, width)
