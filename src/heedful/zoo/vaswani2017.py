"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017).

| Table 3 | N | d_model | d_ff | h | dropout | parameters |
|---------|---|---------|------|---|---------|------------|
| base    | 6 | 512     | 2048 | 8 | 0.1     | 65M        |
| big     | 6 | 1024    | 4096 | 16| 0.3     | 213M       |

Source, target and output share a vocabulary of about 37,000 entries and one matrix (sec. 3.4).
`tiny` is the size of Wu et al. 2021 for Multi30k.
"""

from functools import partial
from typing import Any, Literal

from torch import nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.embeddings import LearnedTable, Positions, SinusoidalTable
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.positions import RotaryPositions
from heedful.parts.residual import PLACEMENTS, NormPlacement
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import Tying, encoder_decoder
from heedful.zoo.hf_tables import vaswani2017_to_hf


@model_config
class Config:
    """The paper's sizes and choices; the defaults are its base model.

    Args:
        dropout: dropout probability of outputs of sub-layers and of embeddings (sec. 5.4).
        attention_dropout: dropout probability of the attention weights; None: as `dropout`.
        activation_dropout: dropout probability of the hidden units of the feed-forward; None: as
            `dropout`.
        max_length: longest source and longest target, in tokens with EOS or BOS.
        norm_placement: position of the norm: post norm(x + f(x)), pre x + f(norm(x)), output
            x + norm(f(x)).
        final_norm: a norm after each stack; None: for all placements but post.
        positions: tables that are added to the embeddings (sinusoidal, learned); rotary: rotation
            of queries and keys in self-attention (Su et al. 2021, "RoFormer"); or none.
        tie_embeddings: shared matrices: none; decoder: target and output; all: source, target and
            output.
        bias: biases in attention and feed-forward; the output matrix has none.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    d_ff: int = 2048
    dropout: float = 0.1
    max_length: int = 512
    norm_placement: NormPlacement = "post"
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    activation: Activation = "relu"
    tie_embeddings: Tying = "all"
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    final_norm: bool | None = None
    norm_eps: float = 1e-5
    bias: bool = True
    scale_embeddings: bool = True


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "num_heads": 4, "d_ff": 256, "dropout": 0.3}
    | {"num_encoder_layers": 4, "num_decoder_layers": 4},
    "base": {},
    "big": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout": 0.3},
}


def build(config: Config) -> EncoderDecoder:
    """A new model, initialized from torch's random generator."""
    width, heads, bias = config.d_model, config.num_heads, config.bias
    norm = partial(nn.LayerNorm, width, eps=config.norm_eps)
    residual = partial(PLACEMENTS[config.norm_placement], dropout=config.dropout)
    rope = RotaryPositions(width // heads) if config.positions == "rotary" else None
    dropout, hidden_dropout = config.attention_dropout, config.activation_dropout
    dropout = config.dropout if dropout is None else dropout
    hidden_dropout = config.dropout if hidden_dropout is None else hidden_dropout
    options: Any = {"dropout": dropout, "bias": bias, "out_bias": bias}
    has_final_norm = config.final_norm
    if has_final_norm is None:
        has_final_norm = config.norm_placement != "post"

    def block(*, cross: bool) -> Block:
        attention = Attention(width, heads, position=rope, **options)
        memory = CrossAttention(width, heads, **options) if cross else None
        feedforward = FeedForward(
            width, config.d_ff, config.activation, dropout=hidden_dropout, bias=bias
        )
        return Block(
            residual(attention, norm()),
            None if memory is None else residual(memory, norm()),
            residual(feedforward, norm()),
        )

    def stack(num_layers: int, *, cross: bool) -> Stack:
        blocks = (block(cross=cross) for _ in range(num_layers))
        return Stack(blocks, norm() if has_final_norm else None)

    tables: dict[str, Positions] = {"sinusoidal": SinusoidalTable, "learned": LearnedTable}
    return encoder_decoder(
        config,
        stack(config.num_encoder_layers, cross=False),
        stack(config.num_decoder_layers, cross=True),
        positions=tables.get(config.positions),
        tie=config.tie_embeddings,
        scale_embeddings=config.scale_embeddings,
    )


HF = Format[Any](export_as=vaswani2017_to_hf)
ARCHITECTURE = Architecture("vaswani2017", Config, build, SIZES, {"hf": HF})
