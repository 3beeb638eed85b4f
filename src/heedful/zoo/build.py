"""Builders of the three families from finished stacks: embeddings, head, initial weights.

Attention and blocks are made in each architecture's file of the modules of `parts/` and `models/`,
for rotary decoders in `rotary.py`. All
Configs have the same names for sizes (`d_model`, `max_length`, `dropout`, …), so the builders read
those of embeddings and heads from the Config.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Stack
from heedful.parts import init
from heedful.parts.embeddings import LearnedTable, Positions, TokenEmbedding
from heedful.parts.feedforward import Activation
from heedful.parts.heads import (
    ClassificationHead,
    MaskedTokenHead,
    MaskedTokenTransform,
    OutputHead,
    tied_linear,
)
from heedful.parts.init import Initializer, init_weights, normal, xavier
from heedful.parts.residual import Norm

Tying = Literal["none", "decoder", "all"]


def embed(
    config: Any,
    tokens: nn.Embedding,
    positions: Positions | None,
    *,
    scale: float = 1.0,
    round_scale: bool = False,
    types: nn.Embedding | None = None,
    norm: nn.Module | None = None,
) -> TokenEmbedding:
    """The embedding of a Config: its width, length and dropout. See `TokenEmbedding`."""
    length = config.max_length
    table = None if positions is None else positions(length, config.d_model)
    return TokenEmbedding(
        tokens,
        table,
        types=types,
        norm=norm,
        max_length=length,
        scale=scale,
        round_scale=round_scale,
        dropout=config.dropout,
    )


def decoder_only(
    config: Any,
    decoder: Stack,
    *,
    positions: Positions | None = None,
    scale: float = 1.0,
    round_scale: bool = False,
    softcap: float | None = None,
    shrink_residuals: bool = True,
) -> DecoderOnly:
    """A language model with weights N(0, 0.02²).

    Args:
        config: `tie_embeddings`: share the matrix of the embeddings with the output.
        decoder: the stack.
        positions: makes the position table added to the embeddings; default: none.
        scale, round_scale: factor of the embeddings, see `TokenEmbedding`.
        softcap: bound of the logits; default: none.
        shrink_residuals: divide the last weight of each residual branch by √(2L), as in GPT-2.
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    head = OutputHead(tied_linear(tokens.weight, tied=config.tie_embeddings), softcap=softcap)
    embedding = embed(config, tokens, positions, scale=scale, round_scale=round_scale)
    net = DecoderOnly(embedding, decoder, head)
    init_weights(net, normal(0.02))
    if shrink_residuals:
        init.shrink_residuals(net)
    return net


def encoder_only(
    config: Any,
    encoder: Stack,
    *,
    norm: Norm,
    positions: Positions | None = LearnedTable,
    num_types: int | None = None,
    head_activation: Activation | None = None,
    head_bias: bool = True,
    classifier: Callable[..., ClassificationHead] = ClassificationHead,
    initializer: Initializer | None = None,
) -> EncoderOnly:
    """BERT or a descendant: norm(embeddings), the encoder, and the `head` of the Config.

    Args:
        config: `head`: mlm, classify or none.
        encoder: the stack.
        norm: makes the norm of the embeddings and of the masked-token head.
        positions: makes the position table added to the embeddings; default: a learned one.
        num_types: rows of the token type embedding; default: no such embedding.
        head_activation: activation of the masked-token head; default: that of the layers.
        head_bias: bias of the first matrix of that head.
        classifier: makes the head `classify` from a width, a number of classes and `dropout`.
        initializer: initializes a weight; default: N(0, 0.02²).
    """
    width = config.d_model
    tokens = nn.Embedding(config.vocab_size, width)
    types = None if num_types is None else nn.Embedding(num_types, width)
    head: MaskedTokenHead | ClassificationHead | None = None
    if config.head == "mlm":
        out = tied_linear(tokens.weight, bias=True, tied=config.tie_embeddings)
        activation = head_activation or config.activation
        transform = MaskedTokenTransform(width, norm(width), activation, bias=head_bias)
        head = MaskedTokenHead(out, transform)
    elif config.head == "classify":
        head = classifier(width, config.num_labels, dropout=classifier_dropout(config))
    embedding = embed(config, tokens, positions, norm=norm(width), types=types)
    net = EncoderOnly(embedding, encoder, head)
    init_weights(net, initializer or normal(0.02))
    return net


def classifier_dropout(config: Any) -> float:
    """Dropout before the linear layer of the classes; default: that of the layers."""
    dropout: float | None = config.classifier_dropout
    return config.dropout if dropout is None else dropout


def encoder_decoder(
    config: Any,
    encoder: Stack,
    decoder: Stack,
    *,
    tie: Tying | Literal["embeddings"],
    scale_embeddings: bool = False,
    positions: Positions | None = None,
    bias: bool = False,
    transform: nn.Module | None = None,
    norm: Norm | None = None,
    initializer: Initializer = xavier,
) -> EncoderDecoder:
    """A sequence-to-sequence model.

    Args:
        config: vocabulary sizes, width, longest sequences, dropout.
        encoder, decoder: the stacks; the decoder has cross-attention.
        tie: matrices that are shared: none; embeddings: source and target; decoder: target and
            output; all three.
        scale_embeddings: multiply the embeddings by √d_model.
        positions: makes the position tables added to the embeddings; default: none.
        bias: bias of the logits.
        transform: module between the decoder and the output matrix; default: none.
        norm: makes the norms of the embeddings; default: none.
        initializer: initializes a weight.
    """
    width = config.d_model
    tgt = nn.Embedding(config.tgt_vocab_size, width)
    is_shared = tie in ("embeddings", "all")
    src = tgt if is_shared else nn.Embedding(config.src_vocab_size, width)

    def embedding(tokens: nn.Embedding) -> TokenEmbedding:
        scale = width**0.5 if scale_embeddings else 1.0
        return embed(
            config, tokens, positions, scale=scale, norm=None if norm is None else norm(width)
        )

    out = tied_linear(tgt.weight, bias=bias, tied=tie in ("decoder", "all"))
    head = OutputHead(out, transform)
    net = EncoderDecoder(embedding(src), encoder, embedding(tgt), decoder, head)
    init_weights(net, initializer)
    return net
