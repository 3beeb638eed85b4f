"""What the papers share: how a Config checks itself, and assembly from stacks to whole families.

A Config calls its sizes alike in every paper (`d_model`, `num_heads`, `d_ff`, `dropout`, …), so
they are read here; what a paper chooses besides is passed by its file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention, CrossAttention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.heads import (
    ClassificationHead,
    MaskedTokenHead,
    MaskedTokenTransform,
    OutputHead,
    tied_linear,
)
from heedful.parts.init import Draw, init_weights, normal, shrink_residuals, xavier
from heedful.parts.positions import LearnedTable, Positions
from heedful.parts.residual import Norm, PostNorm, Residual

Keys = Mapping[str, Any]
Side = Literal["", "encoder_", "decoder_"]
Tying = Literal["none", "decoder", "all"]
NONE: Keys = MappingProxyType({})
T = TypeVar("T")
_MOST_MODULES, _MOST = 1_024, 2**31 - 1  # DeepNet had 1,000 layers


@dataclass_transform(frozen_default=True)
def model_config(cls: type[T]) -> type[T]:
    """A frozen dataclass without unknown keys that checks its sizes, and by its own `check()`."""
    cls.__post_init__ = _check  # type: ignore[attr-defined]
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    return cast(type[T], made)


def _check(config: Any) -> None:
    """Refuse what no model can have; raises ValueError naming the key.

    Whole numbers must be at least 1 and below 2³¹, numbers of layers and of experts at most 1,024,
    dropouts in [0, 1), epsilons and bases above 0;
    heads must divide the width (unless `head_dim` is given) and be divided by `num_kv_heads`, and
    rotary positions need an even width of a head. One matrix for source and target, which is there
    unless `tie_embeddings` says none or decoder, needs one vocabulary.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if "dropout" in name:
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        elif isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        elif isinstance(value, int):
            most = _MOST_MODULES if name.endswith(("layers", "experts")) else _MOST
            if value > most:
                raise ValueError(f"{name} must be at most {most:,}, not {value:,}")
        elif isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value}")
    width, heads = values["d_model"], values["num_heads"]
    for name in ("num_heads", "num_decoder_heads"):
        count = values.get(name)
        if values.get("head_dim") is None and count is not None and width % count:
            raise ValueError(f"d_model {width} is not divisible by {name} {count}")
    groups = values.get("num_kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"num_heads {heads} is not divisible by num_kv_heads {groups}")
    is_rotary = "rope_base" in values or values.get("positions") == "rotary"
    if is_rotary and (head_dim := values.get("head_dim") or width // heads) % 2:
        raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
    if "src_vocab_size" in values and values.get("tie_embeddings") not in ("none", "decoder"):
        check_one_vocabulary(config)
    if hasattr(config, "check"):
        config.check()


def check_one_vocabulary(config: Any) -> None:
    """Refuse two vocabularies where one matrix serves both; raises ValueError with both sizes."""
    if config.src_vocab_size != config.tgt_vocab_size:
        raise ValueError(
            "one matrix for source and target needs one vocabulary, but src_vocab_size is "
            f"{config.src_vocab_size} and tgt_vocab_size {config.tgt_vocab_size}; "
            "use a joint tokenizer, or tie_embeddings=decoder where the model has it"
        )


def stack(
    config: Any,
    side: Side = "",
    *,
    residual: type[Residual],
    norm: Norm | None = None,
    attention: Keys = NONE,
    layer: Callable[[int], Keys] = lambda number: NONE,
    mlp: Keys = NONE,
    network: Callable[[], nn.Module] | None = None,
    final_norm: bool = False,
    **more: Any,
) -> Stack:
    """Blocks of sub-layers, each in its residual; cross-attention in the decoder of two stacks.

    Args:
        side: which of two stacks, whose layers, heads and d_ff may be its own.
        residual: where the norms stand.
        norm: default: layer normalisation with the Config's `norm_eps`.
        attention: arguments of `Attention` and `CrossAttention`.
        layer: further ones of a layer's `Attention` by its number, from 0.
        mlp: arguments of `FeedForward` in place of the Config's.
        network: gives a block's feed-forward itself, in place of `mlp`.
        final_norm: one more norm after the last block.
        more: of `Stack`.
    """
    width = config.d_model
    heads = getattr(config, f"num_{side}heads", None) or config.num_heads
    d_ff = getattr(config, f"{side}d_ff", None) or config.d_ff or 4 * width
    sizes = {"d_ff": d_ff, "kind": config.activation, **mlp}
    norm = norm or _layer_norm(config)

    def around(sublayer: nn.Module) -> Residual:
        return residual(sublayer, norm(width), dropout=config.dropout)

    def block(number: int) -> Block:
        cross = CrossAttention(width, heads, **attention) if side == "decoder_" else None
        return Block(
            around(Attention(width, heads, **attention, **layer(number))),
            None if cross is None else around(cross),
            around(FeedForward(width, **sizes) if network is None else network()),
        )

    blocks = (block(number) for number in range(getattr(config, f"num_{side}layers")))
    return Stack(blocks, norm(width) if final_norm else None, **more)


def embed(
    config: Any, tokens: nn.Embedding, positions: Positions | None, **more: Any
) -> TokenEmbedding:
    """Tokens and positions of a Config; `more`: of `TokenEmbedding`."""
    length = config.max_length
    table = None if positions is None else positions(length, config.d_model)
    return TokenEmbedding(tokens, table, max_length=length, dropout=config.dropout, **more)


def decoder_only(
    config: Any,
    decoder: Stack,
    *,
    positions: Positions | None = None,
    output: Keys = NONE,
    shrinks: bool = True,
    **more: Any,
) -> DecoderOnly:
    """One stack between embeddings and logits, tied where the Config says so; all N(0, 0.02²).

    Args:
        positions: of the embeddings; default: attention has its own.
        output: further arguments of `OutputHead`.
        shrinks: weights that end a residual branch are divided by √(2L), as in GPT-2.
        more: of `TokenEmbedding`.
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    head = OutputHead(tied_linear(tokens.weight, tied=config.tie_embeddings), **output)
    net = DecoderOnly(embed(config, tokens, positions, **more), decoder, head)
    init_weights(net, normal(0.02))
    if shrinks:
        shrink_residuals(net)
    return net


def encoder_only(
    config: Any,
    *,
    positions: Positions | None = LearnedTable,
    norm: Norm | None = None,
    encoder: Stack | None = None,
    head_activation: Activation | None = None,
    head_bias: bool = True,
    classifier: Keys = NONE,
    draw: Draw | None = None,
) -> EncoderOnly:
    """BERT or a descendant: norm(embeddings), the encoder, and the Config's `head`.

    Args:
        norm: default: layer normalisation with the Config's `norm_eps`.
        encoder: default: BERT's, with norms after the sums.
        head_activation: of the head for masked tokens; default: the layers'.
        head_bias: of its first matrix.
        classifier: further arguments of `ClassificationHead`.
        draw: fills a new weight; default: N(0, 0.02²).
    """
    width, norm = config.d_model, norm or _layer_norm(config)
    tokens = nn.Embedding(config.vocab_size, width)
    num_types = getattr(config, "type_vocab_size", None)
    types = None if num_types is None else nn.Embedding(num_types, width)
    if encoder is None:
        dropout = {"dropout": config.attention_dropout}
        encoder = stack(config, residual=PostNorm, norm=norm, attention=dropout)
    head: MaskedTokenHead | ClassificationHead | None = None
    if config.head == "mlm":
        out = tied_linear(tokens.weight, bias=True, tied=config.tie_embeddings)
        activation = head_activation or config.activation
        before = MaskedTokenTransform(width, norm(width), activation, bias=head_bias)
        head = MaskedTokenHead(out, before)
    elif config.head == "classify":
        keys = {"dropout": classifier_dropout(config), **classifier}
        head = ClassificationHead(width, config.num_labels, **keys)
    embedding = embed(config, tokens, positions, norm=norm(width), types=types)
    net = EncoderOnly(embedding, encoder, head)
    init_weights(net, draw or normal(0.02))
    return net


def classifier_dropout(config: Any) -> float:
    """The dropout before the matrix of classes: its own, or that of the layers."""
    own: float | None = config.classifier_dropout
    return config.dropout if own is None else own


def encoder_decoder(
    config: Any,
    stack_of: Callable[[Side], Stack],
    *,
    tie: Tying | Literal["embeddings"],
    positions: Positions | None = None,
    bias: bool = False,
    transform: nn.Module | None = None,
    norm: Norm | None = None,
    draw: Draw = xavier,
) -> EncoderDecoder:
    """Two stacks between two embeddings and logits.

    Args:
        stack_of: gives the encoder and the decoder.
        tie: none; embeddings: source and target share one matrix; decoder: target and output; all.
        positions: of the embeddings; default: attention has its own.
        bias: on the logits.
        transform: of the states that the output matrix reads; default: none.
        norm: over the embeddings; default: none.
        draw: fills a new weight.
    """
    width, is_scaled = config.d_model, getattr(config, "scale_embeddings", False)
    tgt = nn.Embedding(config.tgt_vocab_size, width)
    is_shared = tie in ("embeddings", "all")
    src = tgt if is_shared else nn.Embedding(config.src_vocab_size, width)

    def side(tokens: nn.Embedding) -> TokenEmbedding:
        built = None if norm is None else norm(width)
        scale = width**0.5 if is_scaled else 1.0
        return embed(config, tokens, positions, scale=scale, norm=built)

    out = tied_linear(tgt.weight, bias=bias, tied=tie in ("decoder", "all"))
    head = OutputHead(out, transform)
    encoder, decoder = stack_of("encoder_"), stack_of("decoder_")
    net = EncoderDecoder(side(src), encoder, side(tgt), decoder, head)
    init_weights(net, draw)
    return net


def _layer_norm(config: Any) -> Norm:
    return partial(nn.LayerNorm, eps=config.norm_eps)
