"""Assembly that the papers share: embeddings, stacks of blocks, heads, whole families."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.heads import (
    ClassificationHead,
    MaskedTokenHead,
    MaskedTokenTransform,
    OutputHead,
    tied_linear,
)
from heedful.parts.norms import LayerNorm, Norm
from heedful.parts.positions import Positions
from heedful.parts.residual import PostNorm, Residual

Tying = Literal["none", "decoder", "all"]


def stack(
    num_layers: int,
    *,
    width: int,
    residual: type[Residual],
    norm: Norm,
    attention: Callable[[int], nn.Module],
    feedforward: Callable[[], nn.Module],
    cross: Callable[[], nn.Module] | None = None,
    dropout: float = 0.0,
    final_norm: bool = False,
    **more: Any,
) -> Stack:
    """Blocks of sub-layers, each in its residual.

    Args:
        width: D.
        residual: where the norms stand.
        attention: gives a layer's self-attention from its number, counted from 0.
        cross: gives its cross-attention; default: none.
        dropout: on the sub-layers' outputs.
        final_norm: one more norm after the last block.
        more: of `Stack`.
    """

    def around(sublayer: nn.Module) -> Residual:
        return residual(sublayer, norm.build(width), dropout=dropout)

    blocks = (
        Block(
            around(attention(layer)),
            around(cross()) if cross is not None else None,
            around(feedforward()),
        )
        for layer in range(num_layers)
    )
    return Stack(blocks, norm.build(width) if final_norm else None, **more)


def embed(
    config: Any, tokens: nn.Embedding, positions: Positions | None, **more: Any
) -> TokenEmbedding:
    """Tokens and positions of a Config; `more`: of `TokenEmbedding`."""
    length = config.max_length
    table = None if positions is None else positions.build(length, config.d_model)
    return TokenEmbedding(tokens, table, max_length=length, dropout=config.dropout, **more)


def decoder_only(
    config: Any,
    decoder: Stack,
    *,
    positions: Positions | None = None,
    output: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> DecoderOnly:
    """One stack between `vocab_size` embeddings and logits, tied where the Config says so.

    `positions`: of the embeddings; default: attention has its own. `output`: further arguments of
    `OutputHead`; `more`: of `TokenEmbedding`.
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    head = OutputHead(tied_linear(tokens.weight, tied=config.tie_embeddings), **output)
    return DecoderOnly(embed(config, tokens, positions, **more), decoder, head)


def encoder_only(
    config: Any,
    positions: Positions,
    norm: LayerNorm,
    *,
    head_activation: Activation | None = None,
    classifier: Mapping[str, Any] | None = None,
    types: nn.Embedding | None = None,
) -> EncoderOnly:
    """BERT or a descendant: norm(embeddings), blocks with norms after the sums, and its `head`.

    Args:
        head_activation: of the head for masked tokens; default: the layers'.
        classifier: further arguments of `ClassificationHead`.
        types: BERT's embedding of which text a token is of; default: none.
    """
    width = config.d_model
    tokens = nn.Embedding(config.vocab_size, width)
    encoder = stack(
        config.num_layers,
        width=width,
        residual=PostNorm,
        norm=norm,
        attention=lambda layer: Attention(
            width, config.num_heads, dropout=config.attention_dropout
        ),
        feedforward=lambda: Mlp(width, config.d_ff, config.activation),
        dropout=config.dropout,
    )
    head: MaskedTokenHead | ClassificationHead | None = None
    if config.head == "mlm":
        out = tied_linear(tokens.weight, bias=True, tied=config.tie_embeddings)
        activation = head_activation or config.activation
        transform = MaskedTokenTransform(width, norm.build(width), activation)
        head = MaskedTokenHead(out, transform)
    elif config.head == "classify":
        dropout = classifier_dropout(config)
        head = ClassificationHead(width, config.num_labels, dropout=dropout, **classifier or {})
    embedding = embed(config, tokens, positions, norm=norm.build(width), types=types)
    return EncoderOnly(embedding, encoder, head)


def classifier_dropout(config: Any) -> float:
    """The dropout before the matrix of classes: its own, or that of the layers."""
    own: float | None = config.classifier_dropout
    return config.dropout if own is None else own


def encoder_decoder(
    config: Any,
    encoder: Stack,
    decoder: Stack,
    *,
    positions: Positions | None = None,
    tie: Tying | Literal["embeddings"],
    bias: bool = False,
    transform: nn.Module | None = None,
    norm: LayerNorm | None = None,
    **more: Any,
) -> EncoderDecoder:
    """Two stacks between two embeddings and logits.

    Args:
        tie: none; embeddings: source and target share one matrix; decoder: target and output; all.
        bias: on the logits.
        transform: of the states that the output matrix reads; default: none.
        norm: over the embeddings; default: none.
        more: of `TokenEmbedding`.
    """
    tgt = nn.Embedding(config.tgt_vocab_size, config.d_model)
    is_shared = tie in ("embeddings", "all")
    src = tgt if is_shared else nn.Embedding(config.src_vocab_size, config.d_model)

    def side(tokens: nn.Embedding) -> TokenEmbedding:
        built = norm.build(config.d_model) if norm is not None else None
        return embed(config, tokens, positions, norm=built, **more)

    out = tied_linear(tgt.weight, bias=bias, tied=tie in ("decoder", "all"))
    head = OutputHead(out, transform)
    return EncoderDecoder(side(src), encoder, side(tgt), decoder, head)
