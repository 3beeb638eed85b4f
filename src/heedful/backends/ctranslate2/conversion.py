"""Converts nets to models of CTranslate2, or lists the reasons why it cannot run them.

A net is examined by its parts, not by the name of its architecture, so that nets of plugins can be
converted too.
"""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heedful.backends.ctranslate2.vocabulary import Vocabulary
from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention, MultiHead
from heedful.parts.embeddings import PositionTable, TokenEmbedding
from heedful.parts.feedforward import FUNCTIONS, FeedForward, gelu_tanh
from heedful.parts.heads import ClassificationHead, OutputHead, Scale
from heedful.parts.positions import AlibiBias, RelativePositionBias, RotaryPositions
from heedful.parts.residual import OutputNorm, PostNorm, PreNorm, SandwichNorm, ZeroCenteredRMSNorm

ACTIVATIONS = {  # names of ctranslate2.specs.Activation
    nn.functional.relu: "RELU",
    gelu_tanh: "GELUTanh",
    nn.functional.silu: "SWISH",
    nn.functional.gelu: "GELU",
    torch.tanh: "Tanh",
}
assert set(FUNCTIONS.values()) <= set(ACTIVATIONS)
RESIDUALS = {PostNorm: "post", PreNorm: "pre", SandwichNorm: "sandwich", OutputNorm: "output"}
PRECISIONS = ("float32", "bfloat16", "int8")


def refusals(net: nn.Module) -> list[str]:
    """Every reason why CTranslate2 cannot run a net; empty where it can."""
    if not isinstance(net, EncoderDecoder | DecoderOnly | EncoderOnly):
        return [f"a net of the type {type(net).__name__}"]
    reasons = [*_norm_reasons(net), *_linear_reasons(net)]
    for embedding, stack, causal in _sides(net):
        reasons += _embedding_reasons(embedding, stack)
        reasons += _stack_reasons(stack, causal)
    if not isinstance(net, DecoderOnly):
        reasons += [
            f"a window of {size} keys outside a decoder of one stack" for size in _windows(net)
        ]
    if isinstance(net.head, ClassificationHead):
        if not isinstance(net.head.norm, nn.Identity):
            reasons.append("a norm in the head for classes")
    elif not isinstance(net, EncoderOnly) and not isinstance(
        net.head.transform, nn.Identity | Scale
    ):
        reasons.append(f"a {type(net.head.transform).__name__} before the output matrix")
    return list(dict.fromkeys(reasons))


def longest_prompt(net: nn.Module) -> int | None:
    """Most tokens of a prompt for a net with windows; None: the positions of the net.

    CTranslate2 applies windows to new tokens only, so that a prompt longer than the smallest window
    would be encoded without it.
    """
    return min(_windows(net), default=None)


def embeddings_of(net: nn.Module) -> list[TokenEmbedding]:
    """The embeddings of source and target, or the only one; raises UserError for other nets."""
    if not isinstance(net, EncoderDecoder | DecoderOnly | EncoderOnly):
        raise UserError(f"CTranslate2 cannot run this model: {refusals(net)[0]}")
    return [embedding for embedding, _, _ in _sides(net)]


def write(net: nn.Module, directory: Path, vocabulary: Vocabulary, precision: str) -> None:
    """Write the files of CTranslate2 into an existing directory.

    Raises UserError with every reason why CTranslate2 cannot run the net.
    """
    if reasons := refusals(net):
        raise UserError(f"CTranslate2 cannot run this model: {'; '.join(reasons)}")
    spec = _spec(net, vocabulary)
    spec.validate()
    spec.optimize(quantization=precision)
    spec.save(str(directory))


def _sides(net: Any) -> list[tuple[TokenEmbedding, Stack, bool]]:
    """Embedding, stack, and True for a decoder."""
    if isinstance(net, EncoderDecoder):
        return [(net.src_embedding, net.encoder, False), (net.tgt_embedding, net.decoder, True)]
    if isinstance(net, DecoderOnly):
        return [(net.embedding, net.decoder, True)]
    return [(net.embedding, net.encoder, False)]


# --- reasons against a net ----------------------------------------------------------------------


def _norm_reasons(net: nn.Module) -> Iterator[str]:
    epsilons = {norm.eps for norm in _norms(net) if hasattr(norm, "eps")}
    if len(epsilons) > 1:
        yield f"norms with more than one epsilon ({', '.join(map(str, sorted(epsilons)))})"


def _norms(net: nn.Module) -> list[Any]:
    return [
        m for m in net.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm | ZeroCenteredRMSNorm)
    ]


def _linear_reasons(net: nn.Module) -> Iterator[str]:
    for module in net.modules():
        if isinstance(module, MultiHead | FeedForward | OutputHead):
            for name, child in module.named_children():
                is_linear = name in ("qkv", "q", "kv", "out", "up", "down")
                if is_linear and type(child) is not nn.Linear:
                    yield f"a {type(child).__name__} in place of a linear; merge it first"


def _embedding_reasons(embedding: TokenEmbedding, stack: Stack) -> Iterator[str]:
    table = embedding.positions
    if table is not None and not isinstance(table, PositionTable):
        yield f"positions by a {type(table).__name__}"
    if table is not None and _has_positions(stack):
        yield "positions both in the embeddings and in attention"


def _stack_reasons(stack: Stack, causal: bool) -> Iterator[str]:
    side = "decoder" if causal else "encoder"
    for residual in _residuals(stack):
        placement = RESIDUALS.get(type(residual))
        if placement is None:
            yield f"a residual of the type {type(residual).__name__}"
        elif placement == "output":
            yield "norms after the sub-layers alone (norm_placement output)"
        if isinstance(residual.norm, nn.Identity):
            yield "a sub-layer without its norm"
        elif not isinstance(residual.norm, nn.LayerNorm | nn.RMSNorm | ZeroCenteredRMSNorm):
            yield f"a norm of the type {type(residual.norm).__name__}"
    if len({type(residual) for residual in _residuals(stack)}) > 1:
        yield f"layers of the {side} with norms in different places"
    networks = [block.feedforward.sublayer for block in _blocks(stack)]
    for network in networks:
        if not isinstance(network, FeedForward):
            yield f"a feed-forward of the type {type(network).__name__}"
        elif network.activation not in ACTIVATIONS:
            yield f"the activation {getattr(network.activation, '__name__', network.activation)}"
    if len({(getattr(n, "is_gated", None), getattr(n, "activation", None)) for n in networks}) > 1:
        yield f"layers of the {side} with different feed-forwards"
    yield from _attention_reasons(stack, causal)


def _attention_reasons(stack: Stack, causal: bool) -> Iterator[str]:
    side = "decoder" if causal else "encoder"
    attentions = list(_attentions(stack))
    for attention in attentions:
        if attention.softcap is not None:
            yield f"scores of attention capped at {attention.softcap}"
        position = attention.position
        if isinstance(position, AlibiBias) and not causal:
            yield "ALiBi in an encoder"
        elif isinstance(position, RotaryPositions) and (
            position.factor != 1 and 2 * len(position.table) < attention.head_dim
        ):  # CTranslate2 has a factor of whole heads only
            yield "rotary positions with a factor, on a part of each head"
        elif position is not None and not isinstance(
            position, RotaryPositions | RelativePositionBias | AlibiBias
        ):
            yield f"positions in attention by a {type(position).__name__}"
    shapes = {(a.num_heads, a.num_kv_heads, a.head_dim) for a in attentions}
    if len(shapes) > 1:
        yield f"layers of the {side} with different heads"
    positions = [a.position for a in attentions if isinstance(a, Attention)]
    if len({id(None if isinstance(p, RotaryPositions) else p) for p in positions}) > 1:
        yield f"layers of the {side} with different scores by distance"


def _windows(net: nn.Module) -> list[int]:
    """Windows that are smaller than the net's length, ascending."""
    longest = max((e.max_length for e in net.modules() if isinstance(e, TokenEmbedding)), default=0)
    sizes = {m.window for m in net.modules() if isinstance(m, MultiHead) and m.window is not None}
    return sorted(size for size in sizes if size < longest)


def _blocks(stack: Stack) -> list[Block]:
    return list(stack.blocks)  # type: ignore[arg-type]


def _residuals(stack: Stack) -> Iterator[Any]:
    for block in _blocks(stack):
        yield block.self_attention
        if block.cross_attention is not None:
            yield block.cross_attention
        yield block.feedforward


def _attentions(stack: Stack) -> Iterator[Any]:
    return (r.sublayer for r in _residuals(stack) if isinstance(r.sublayer, MultiHead))


def _has_positions(stack: Stack) -> bool:
    """The attention layers have rotary, relative or ALiBi positions."""
    return any(attention.position is not None for attention in _attentions(stack))


# --- the net in the format of CTranslate2 -------------------------------------------------------


def _specs() -> Any:
    """The classes of the optional package."""
    return importlib.import_module("ctranslate2.specs")


def _spec(net: Any, vocabulary: Vocabulary) -> Any:
    sides = [_side(*side) for side in _sides(net)]
    if isinstance(net, EncoderDecoder):
        spec = _specs().TransformerSpec(*sides)
        spec.register_source_vocabulary(vocabulary.source)
        spec.register_target_vocabulary(vocabulary.target)
    else:
        side = "Decoder" if isinstance(net, DecoderOnly) else "Encoder"
        spec = getattr(_specs(), f"Transformer{side}ModelSpec")(*sides)
        spec.register_vocabulary(vocabulary.target)
    if not isinstance(net, EncoderOnly):
        _fill_head(spec.decoder, net.head)
    elif isinstance(net.head, ClassificationHead):
        activation = np.int8(_activation(net.head.activation))
        _add(spec, pooler_dense=_linear(net.head.dense), pooler_activation=activation)
    _configure(spec.config, net, vocabulary)
    return spec


def _configure(config: Any, net: nn.Module, vocabulary: Vocabulary) -> None:
    config.layer_norm_epsilon = next(iter(norm.eps for norm in _norms(net)), None)
    for key, token in (
        ("unk", vocabulary.unknown),
        ("bos", vocabulary.start),
        ("eos", vocabulary.end),
    ):
        # All three are required: the first token is used for one that the model lacks.
        setattr(config, f"{key}_token", vocabulary.target[token or 0])
    if isinstance(net, EncoderDecoder):
        config.decoder_start_token = vocabulary.target[vocabulary.start or 0]
        config.add_source_eos = vocabulary.adds_end


def _side(embedding: TokenEmbedding, stack: Stack, causal: bool) -> Any:
    """The encoder or the decoder, with its embedding."""
    first = _blocks(stack)[0]
    attention: Any = first.self_attention.sublayer
    network: Any = first.feedforward.sublayer
    placement = RESIDUALS[type(first.self_attention)]
    keys: dict[str, Any] = {
        "pre_norm": placement != "post",
        "activation": _activation(network.activation),
        "ffn_glu": network.is_gated,
        "rms_norm": not isinstance(first.self_attention.norm, nn.LayerNorm),
        "pre_post_layer_norm": placement == "sandwich",
        "num_heads_kv": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "qk_norm": attention.query_norm is not None,
        "relative_attention_bias": isinstance(attention.position, RelativePositionBias),
        "no_final_norm": True,
    }
    if causal:
        keys["with_encoder_attention"] = first.cross_attention is not None
        keys["alibi"] = isinstance(attention.position, AlibiBias)
        keys["external_pre_post_encoder_layers"] = placement == "sandwich"
    else:
        keys["num_source_embeddings"] = 1 if embedding.types is None else 2
        keys["embeddings_merge"] = _specs().common_spec.EmbeddingsMerge.ADD
    kind = getattr(_specs(), f"Transformer{'Decoder' if causal else 'Encoder'}Spec")
    spec = kind(len(stack.blocks), attention.num_heads, **keys)
    _fill_embedding(spec, embedding, _has_positions(stack))
    if not isinstance(stack.final_norm, nn.Identity):
        _add(spec, layer_norm=_norm(stack.final_norm))
    for layer, block in zip(spec.layer, _blocks(stack), strict=True):
        _fill_layer(layer, block)
    return spec


def _fill_embedding(spec: Any, embedding: TokenEmbedding, has_positions: bool) -> None:
    tables = spec.embeddings if isinstance(spec.embeddings, list) else [spec.embeddings]
    tables[0].weight = _array(embedding.tokens.weight)
    if embedding.types is not None:
        tables[1].weight = _array(embedding.types.weight)
    spec.scale_embeddings = float(embedding.scale)
    if not isinstance(embedding.norm, nn.Identity):
        _add(spec, layernorm_embedding=_norm(embedding.norm))
    if has_positions:
        vars(spec).pop("position_encodings", None)
        return
    # Always a table: CTranslate2's own sinusoids have another layout, and are its default.
    table: Any = embedding.positions
    rows = torch.zeros(embedding.max_length, embedding.tokens.weight.size(1))
    if table is not None:
        rows = table.weight[table.offset :]
    spec.position_encodings.encodings = _array(rows)


def _fill_layer(layer: Any, block: Block) -> None:
    attention: Any = block.self_attention.sublayer
    network: Any = block.feedforward.sublayer
    _fill_attention(layer.self_attention, attention, [attention.qkv, attention.out])
    if block.cross_attention is not None:
        cross: Any = block.cross_attention.sublayer
        _fill_attention(layer.attention, cross, [cross.q, cross.kv, cross.out])
    if network.is_gated:
        layer.ffn.linear_0 = _linear(network.up, 0, 2)
        layer.ffn.linear_0_noact = _linear(network.up, 1, 2)
    else:
        layer.ffn.linear_0 = _linear(network.up)
    layer.ffn.linear_1 = _linear(network.down)
    if isinstance(block.self_attention, SandwichNorm):
        _fill_sandwich(layer, block)
        return
    layer.self_attention.layer_norm = _norm(block.self_attention.norm)
    layer.ffn.layer_norm = _norm(block.feedforward.norm)
    if block.cross_attention is not None:
        layer.attention.layer_norm = _norm(block.cross_attention.norm)


def _fill_sandwich(layer: Any, block: Any) -> None:
    layer.input_layer_norm = _norm(block.self_attention.norm)
    layer.post_attention_layer_norm = _norm(block.self_attention.output_norm)
    layer.pre_feedforward_layer_norm = _norm(block.feedforward.norm)
    layer.post_feedforward_layer_norm = _norm(block.feedforward.output_norm)
    if block.cross_attention is not None:
        layer.external_pre_encoder_attention_layer_norm = _norm(block.cross_attention.norm)
        layer.external_post_encoder_attention_layer_norm = _norm(block.cross_attention.output_norm)


def _fill_attention(spec: Any, attention: Any, linears: Iterable[nn.Linear]) -> None:
    spec.linear = [_linear(linear) for linear in linears]
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    position = attention.position
    if isinstance(position, RotaryPositions):
        scale *= position.factor**2  # heedful scales queries and keys
        _add(spec, **_rotary(position))
    elif isinstance(position, RelativePositionBias):
        spec.relative_attention_bias = _array(position.weight)
        spec.relative_attention_max_distance = np.int32(position.max_distance)
    spec.queries_scale = np.float32(scale)
    if attention.window is not None:
        _add(spec, sliding_window=np.int32(attention.window))
    if isinstance(attention, Attention) and attention.query_norm is not None:
        _add(spec, q_norm=_norm(attention.query_norm), k_norm=_norm(attention.key_norm))


def _rotary(position: RotaryPositions) -> dict[str, Any]:
    """The net's frequencies, of any scaling, as divisors of the frequencies of base 10,000."""
    width = 2 * len(position.table)
    standard = 10000.0 ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    divisors = (standard / position.table.double().cpu().numpy()).astype(np.float32)
    return {
        "rotary_dim": np.int32(width),
        "rotary_interleave": position.layout == "interleaved",
        "rotary_base": np.float32(10000.0),
        "rotary_scaling_type": np.int8(1),  # Su: a divisor for each frequency
        "rotary_scaling_long_factor": divisors,
        "rotary_scaling_short_factor": divisors,
    }


def _fill_head(spec: Any, head: OutputHead) -> None:
    spec.projection = _linear(head.out)
    if isinstance(head.transform, Scale):
        spec.scale_outputs = np.float32(head.transform.factor)
    if head.softcap is not None:
        spec.final_logit_softcapping = np.float32(head.softcap)


def _linear(linear: Any, part: int = 0, parts: int = 1) -> Any:
    """A linear layer, or one of `parts` equal groups of its outputs."""
    spec = _specs().common_spec.LinearSpec()
    spec.weight = _array(linear.weight.chunk(parts)[part])
    if linear.bias is not None:
        spec.bias = _array(linear.bias.chunk(parts)[part])
    return spec


def _norm(norm: Any) -> Any:
    """A norm; a LayerNorm without bias gets zeros, since one without `beta` would be an RMSNorm."""
    spec = _specs().common_spec.LayerNormSpec(rms_norm=not isinstance(norm, nn.LayerNorm))
    zero_centered = isinstance(norm, ZeroCenteredRMSNorm)
    spec.gamma = _array(norm.weight.float() + 1 if zero_centered else norm.weight)
    if isinstance(norm, nn.LayerNorm):
        spec.beta = _array(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)
    return spec


def _activation(function: Any) -> Any:
    return _specs().common_spec.Activation[ACTIVATIONS[function]]


def _array(tensor: Tensor) -> np.ndarray:
    """A copy in float32, since quantization works in place."""
    return np.array(tensor.detach().float().cpu().numpy(), order="C")


def _add(spec: Any, **attributes: Any) -> None:
    """Set attributes that the class declares only for some of CTranslate2's own converters."""
    vars(spec).update(attributes)
