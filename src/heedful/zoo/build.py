"""Specifications of blocks and stacks, and builders of nets of the three families.

The file of a published model describes its blocks by frozen dataclasses, each of which builds its
module of `parts/` or `models/`. All Configs have the same names for sizes (`d_model`, `max_length`,
`dropout`, …), so the builders read those of embeddings and heads from the Config.
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
from heedful.parts import init
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
from heedful.parts.init import Initializer, init_weights, normal, xavier
from heedful.parts.positions import LearnedTable, Positions
from heedful.parts.residual import Norm, Residual

Tying = Literal["none", "decoder", "all"]


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of a block, and its cross-attention, which has no positions and no window.

    Args:
        qk_norm: norm of queries and of keys, over the width of a head; default: none.
        num_kv_heads, ...: see `Attention`.
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
        """Self-attention over states of this width."""
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
        """Cross-attention over states of this width."""
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
    """A mixture of feed-forward networks; see `Experts`."""

    num_experts: int
    top_k: int
    balance_weight: float


@dataclass(frozen=True)
class FeedForwardSpec:
    """The feed-forward network of a block; see `FeedForward`.

    Args:
        experts: a mixture of such networks; default: one network.
    """

    d_ff: int
    kind: Activation | Gate
    dropout: float = 0.0
    bias: bool = True
    experts: ExpertsSpec | None = None

    def build(self, width: int) -> nn.Module:
        """The feed-forward network (or the experts) of states of this width."""
        expert = partial(
            FeedForward, width, self.d_ff, self.kind, dropout=self.dropout, bias=self.bias
        )
        if self.experts is None:
            return expert()
        spec = self.experts
        return Experts(
            width, spec.num_experts, spec.top_k, expert, balance_weight=spec.balance_weight
        )


@dataclass(frozen=True)
class BlockSpec:
    """The sub-layers of a block, each in a residual connection.

    Args:
        residual: placement of the norms, for example `PreNorm`.
        norm: makes a norm from a width.
        attention: self-attention, and cross-attention if the stack has it.
        feedforward: the feed-forward network.
        dropout: on the outputs of the sub-layers.
        feedforward_dropout: on the output of the feed-forward network; default: `dropout`.
        attention_norm: norm of self-attention; default: `norm`.
    """

    residual: type[Residual]
    norm: Norm
    attention: AttentionSpec
    feedforward: FeedForwardSpec
    dropout: float = 0.0
    feedforward_dropout: float | None = None
    attention_norm: Norm | None = None

    def build(self, width: int, *, cross: bool) -> Block:
        """A block over states of this width; `cross`: with cross-attention."""

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
    """A stack of blocks, which may differ.

    Args:
        width: D of the states.
        blocks: in their order.
        final_norm: after the last block; default: none.
        final_dropout: after the final norm; default: none.
    """

    width: int
    blocks: Sequence[BlockSpec]
    final_norm: Norm | None = None
    final_dropout: float | None = None

    def build(self, *, cross: bool = False) -> Stack:
        """A stack with uninitialized weights; `cross`: with cross-attention in each block."""
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
    """The specifications of encoder and decoder.

    Args:
        config: width and numbers of layers.
        block: a block of the encoder.
        final_norm: of both stacks; default: none.
        decoder_block: a block of the decoder; default: `block`.
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
    decoder: StackSpec,
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
    stack = decoder.build()
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    head = OutputHead(tied_linear(tokens.weight, tied=config.tie_embeddings), softcap=softcap)
    embedding = embed(config, tokens, positions, scale=scale, round_scale=round_scale)
    net = DecoderOnly(embedding, stack, head)
    init_weights(net, normal(0.02))
    if shrink_residuals:
        init.shrink_residuals(net)
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
    stack = encoder.build()
    head: MaskedTokenHead | ClassificationHead | None = None
    if config.head == "mlm":
        out = tied_linear(tokens.weight, bias=True, tied=config.tie_embeddings)
        activation = head_activation or config.activation
        transform = MaskedTokenTransform(width, norm(width), activation, bias=head_bias)
        head = MaskedTokenHead(out, transform)
    elif config.head == "classify":
        head = classifier(width, config.num_labels, dropout=classifier_dropout(config))
    embedding = embed(config, tokens, positions, norm=norm(width), types=types)
    net = EncoderOnly(embedding, stack, head)
    init_weights(net, initializer or normal(0.02))
    return net


def classifier_dropout(config: Any) -> float:
    """Dropout before the linear layer of the classes; default: that of the layers."""
    dropout: float | None = config.classifier_dropout
    return config.dropout if dropout is None else dropout


def encoder_decoder(
    config: Any,
    encoder: StackSpec,
    decoder: StackSpec,
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
        encoder, decoder: the stacks.
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
    stacks = encoder.build(), decoder.build(cross=True)
    net = EncoderDecoder(embedding(src), stacks[0], embedding(tgt), stacks[1], head)
    init_weights(net, initializer)
    return net
