"""Assembly from a specification of blocks to whole nets of the three families.

A published model says what its blocks are by frozen dataclasses, of which each turns itself into
modules of `parts/` and `models/`. A Config calls its sizes alike in every paper (`d_model`,
`max_length`, `dropout`, …), so those of embeddings and heads are read here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention, CrossAttention
from heedful.parts.dropout import Dropout
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.experts import Experts
from heedful.parts.feedforward import Activation, FeedForward, Gate
from heedful.parts.heads import (
    ClassificationHead,
    MaskedTokenHead,
    MaskedTokenTransform,
    OutputHead,
    tied_linear,
)
from heedful.parts.init import Initializer, init_weights, normal, shrink_residuals, xavier
from heedful.parts.positions import LearnedTable, Positions
from heedful.parts.residual import Norm, Residual

Tying = Literal["none", "decoder", "all"]


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of a block, and its cross-attention, which has no positions and no window.

    Args:
        qk_norm: of queries and of keys, each head for itself; default: none.
        num_kv_heads, ...: as of `Attention`.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    position: nn.Module | None = None
    qk_norm: Norm | None = None
    dropout: float = 0.0
    bias: bool = True
    out_bias: bool = True

    def build(self, width: int) -> Attention:
        """Self-attention of states of a width."""
        head_dim = self.head_dim or width // self.num_heads
        query_norm, key_norm = (self.qk_norm and self.qk_norm(head_dim) for _ in range(2))
        return Attention(
            width,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            position=self.position,
            query_norm=query_norm,
            key_norm=key_norm,
            dropout=self.dropout,
            bias=self.bias,
            out_bias=self.out_bias,
        )

    def build_cross(self, width: int) -> CrossAttention:
        """Cross-attention of states of a width."""
        return CrossAttention(
            width,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.dropout,
            bias=self.bias,
            out_bias=self.out_bias,
        )


@dataclass(frozen=True)
class ExpertsSpec:
    """Feed-forwards of which a router chooses `top_k` for each token; as of `Experts`."""

    num_experts: int
    top_k: int
    balance_weight: float


@dataclass(frozen=True)
class FeedForwardSpec:
    """The feed-forward of a block, as of `FeedForward`.

    Args:
        experts: how many there are in place of one; default: one.
    """

    d_ff: int
    kind: Activation | Gate
    dropout: float = 0.0
    bias: bool = True
    experts: ExpertsSpec | None = None

    def build(self, width: int) -> nn.Module:
        """The feed-forward of states of a width."""
        one = partial(
            FeedForward, width, self.d_ff, self.kind, dropout=self.dropout, bias=self.bias
        )
        if self.experts is None:
            return one()
        many = self.experts
        return Experts(width, many.num_experts, many.top_k, one, balance_weight=many.balance_weight)


@dataclass(frozen=True)
class BlockSpec:
    """Sub-layers, each in its residual.

    Args:
        residual: where the norms stand.
        norm: makes a norm of a width.
        dropout: on the outputs of the sub-layers.
        feedforward_dropout: on that of the feed-forward; default: as `dropout`.
        attention_norm: of self-attention; default: `norm`.
    """

    residual: type[Residual]
    norm: Norm
    attention: AttentionSpec
    feedforward: FeedForwardSpec
    dropout: float = 0.0
    feedforward_dropout: float | None = None
    attention_norm: Norm | None = None

    def build(self, width: int, *, cross: bool) -> Block:
        """A block of states of a width; `cross`: with cross-attention."""

        def with_residual(
            sublayer: nn.Module, norm: Norm = self.norm, dropout: float = self.dropout
        ) -> Residual:
            return self.residual(sublayer, norm(width), dropout=dropout)

        last = self.dropout if self.feedforward_dropout is None else self.feedforward_dropout
        return Block(
            with_residual(self.attention.build(width), self.attention_norm or self.norm),
            with_residual(self.attention.build_cross(width)) if cross else None,
            with_residual(self.feedforward.build(width), dropout=last),
        )


@dataclass(frozen=True)
class StackSpec:
    """A stack: the blocks in their order, which may differ, and what follows the last.

    Args:
        width: D of the states.
        final_norm: default: none.
        final_dropout: after it; default: none.
    """

    width: int
    blocks: Sequence[BlockSpec]
    final_norm: Norm | None = None
    final_dropout: float | None = None

    def build(self, *, cross: bool = False) -> Stack:
        """A stack with new weights; `cross`: with cross-attention in each block."""
        return Stack(
            (block.build(self.width, cross=cross) for block in self.blocks),
            None if self.final_norm is None else self.final_norm(self.width),
            final_dropout=None if self.final_dropout is None else Dropout(self.final_dropout),
        )


def two_stacks(
    config: Any,
    block: BlockSpec,
    final_norm: Norm | None = None,
    *,
    decoder_block: BlockSpec | None = None,
) -> tuple[StackSpec, StackSpec]:
    """The encoder and the decoder.

    Args:
        block: of each layer of the encoder.
        decoder_block: of each layer of the decoder; default: `block`.
    """
    return (
        StackSpec(config.d_model, [block] * config.num_encoder_layers, final_norm),
        StackSpec(config.d_model, [decoder_block or block] * config.num_decoder_layers, final_norm),
    )


def embed(
    config: Any,
    tokens: nn.Embedding,
    positions: Positions | None,
    *,
    scale: float = 1.0,
    types: nn.Embedding | None = None,
    norm: nn.Module | None = None,
) -> TokenEmbedding:
    """Tokens and positions of a Config; the others are those of `TokenEmbedding`."""
    length = config.max_length
    table = None if positions is None else positions(length, config.d_model)
    return TokenEmbedding(
        tokens,
        table,
        types=types,
        norm=norm,
        max_length=length,
        scale=scale,
        dropout=config.dropout,
    )


def decoder_only(
    config: Any,
    decoder: StackSpec,
    *,
    positions: Positions | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    shrinks: bool = True,
) -> DecoderOnly:
    """One stack between embeddings and logits, tied where the Config says so; all N(0, 0.02²).

    Args:
        positions: of the embeddings; default: attention has its own.
        scale: embeddings are multiplied by it.
        softcap: bound of the logits; default: none.
        shrinks: weights that end a residual branch are divided by √(2L), as in GPT-2.
    """
    stack = decoder.build()
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    head = OutputHead(tied_linear(tokens.weight, tied=config.tie_embeddings), softcap=softcap)
    net = DecoderOnly(embed(config, tokens, positions, scale=scale), stack, head)
    init_weights(net, normal(0.02))
    if shrinks:
        shrink_residuals(net)
    return net


def encoder_only(
    config: Any,
    encoder: StackSpec,
    *,
    norm: Norm,
    positions: Positions | None = LearnedTable,
    num_types: int | None = None,
    head_activation: Activation | None = None,
    head_bias: bool = True,
    classifier: Callable[..., ClassificationHead] = ClassificationHead,
    draw: Initializer | None = None,
) -> EncoderOnly:
    """BERT or a descendant: norm(embeddings), the encoder, and the Config's `head`.

    Args:
        num_types: rows of an embedding of types; default: there is none.
        norm: over the embeddings and in the head for masked tokens.
        head_activation: of the head for masked tokens; default: the layers'.
        head_bias: of its first matrix.
        classifier: makes the head classify of a width, a number of classes and `dropout`.
        draw: fills a new weight; default: N(0, 0.02²).
    """
    width = config.d_model
    tokens = nn.Embedding(config.vocab_size, width)
    types = None if num_types is None else nn.Embedding(num_types, width)
    stack = encoder.build()
    head: MaskedTokenHead | ClassificationHead | None = None
    if config.head == "mlm":
        out = tied_linear(tokens.weight, bias=True, tied=config.tie_embeddings)
        activation = head_activation or config.activation
        before = MaskedTokenTransform(width, norm(width), activation, bias=head_bias)
        head = MaskedTokenHead(out, before)
    elif config.head == "classify":
        head = classifier(width, config.num_labels, dropout=classifier_dropout(config))
    embedding = embed(config, tokens, positions, norm=norm(width), types=types)
    net = EncoderOnly(embedding, stack, head)
    init_weights(net, draw or normal(0.02))
    return net


def classifier_dropout(config: Any) -> float:
    """The dropout before the matrix of classes: its own, or that of the layers."""
    own: float | None = config.classifier_dropout
    return config.dropout if own is None else own


def encoder_decoder(
    config: Any,
    encoder: StackSpec,
    decoder: StackSpec,
    *,
    tie: Tying | Literal["embeddings"],
    scaled: bool = False,
    positions: Positions | None = None,
    bias: bool = False,
    transform: nn.Module | None = None,
    norm: Norm | None = None,
    draw: Initializer = xavier,
) -> EncoderDecoder:
    """Two stacks between two embeddings and logits.

    Args:
        tie: none; embeddings: source and target share one matrix; decoder: target and output; all.
        scaled: embeddings are multiplied by √d_model.
        positions: of the embeddings; default: attention has its own.
        bias: on the logits.
        transform: of the states that the output matrix reads; default: none.
        norm: over the embeddings; default: none.
        draw: fills a new weight.
    """
    width = config.d_model
    tgt = nn.Embedding(config.tgt_vocab_size, width)
    is_shared = tie in ("embeddings", "all")
    src = tgt if is_shared else nn.Embedding(config.src_vocab_size, width)

    def side(tokens: nn.Embedding) -> TokenEmbedding:
        built = None if norm is None else norm(width)
        scale = width**0.5 if scaled else 1.0
        return embed(config, tokens, positions, scale=scale, norm=built)

    out = tied_linear(tgt.weight, bias=bias, tied=tie in ("decoder", "all"))
    head = OutputHead(out, transform)
    stacks = encoder.build(), decoder.build(cross=True)
    net = EncoderDecoder(side(src), stacks[0], side(tgt), stacks[1], head)
    init_weights(net, draw)
    return net
