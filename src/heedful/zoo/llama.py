"""LLaMA (Touvron et al. 2023a), Llama 2 (Touvron et al. 2023b) and Llama 3 (Dubey et al. 2024).

| model       | layers | d_model | heads | k/v heads | d_ff  | length  | vocabulary | parameters |
|-------------|--------|---------|-------|-----------|-------|---------|------------|------------|
| 1, 7B       | 32     | 4096    | 32    | 32        | 11008 | 2048    | 32000      | 6.7B       |
| 1, 13B      | 40     | 5120    | 40    | 40        | 13824 | 2048    | 32000      | 13.0B      |
| 1, 33B      | 60     | 6656    | 52    | 52        | 17920 | 2048    | 32000      | 32.5B      |
| 1, 65B      | 80     | 8192    | 64    | 64        | 22016 | 2048    | 32000      | 65.3B      |
| 2, 7B / 13B | as 1   | as 1    | as 1  | as 1      | as 1  | 4096    | 32000      | as 1       |
| 2, 70B      | 80     | 8192    | 64    | 8         | 28672 | 4096    | 32000      | 69.0B      |
| 3, 8B       | 32     | 4096    | 32    | 8         | 14336 | 8192    | 128256     | 8.0B       |
| 3, 70B      | 80     | 8192    | 64    | 8         | 28672 | 8192    | 128256     | 70.6B      |
| 3.1, 405B   | 126    | 16384   | 128   | 8         | 53248 | 131,072 | 128256     | 405.9B     |
| 3.2, 1B     | 16     | 2048    | 32    | 8         | 8192  | 131,072 | 128256     | 1.24B      |
| 3.2, 3B     | 28     | 3072    | 24    | 8         | 8192  | 131,072 | 128256     | 3.21B      |

A pre-norm decoder with RMSNorm, SwiGLU and rotary positions (LLaMA, sec. 2.2), no biases and no
dropout. Llama 2 groups the key heads of its largest models, Llama 3 those of all, with a rotary
base of 500,000; 3.1 stretches the low frequencies (`Llama3Scaling`); the two small ones of 3.2 tie
their embeddings.
"""

import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Gate, Gated
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, normal, shrink_residuals
from heedful.parts.norms import RMSNorm
from heedful.parts.positions import NoPositions
from heedful.parts.residual import PreNorm
from heedful.parts.rotary import Layout
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names
from heedful.zoo.rope import RopeScaling, check_rope, head_width, rope_from_hf, rope_to_hf, rotary

AnyConfig = TypeVar("AnyConfig")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The papers' sizes and choices; the defaults are LLaMA 7B.

    Args:
        num_kv_heads: heads of keys and values; None: num_heads.
        head_dim: width of a head; None: d_model / num_heads.
        d_ff: width of the hidden units; None: 8/3 · d_model (sec. 2.2), rounded up to a multiple of
            256 as in the authors' code.
        max_length: longest text that we accept, in tokens.
        dropout: on embeddings and sub-layers' outputs.
        attention_dropout: on the attention weights.
        activation: the gate of the feed-forward.
        rope_base: of the rotary frequencies.
        rope_layout: half as in the Hugging Face format, interleaved as the authors released it.
        rope_scaling: how the rotary positions are stretched over longer texts: `type` (linear, ntk,
            yarn, llama3) and the arguments of that class in `parts/rotary.py`; None: they are not.
        attention_bias, mlp_bias: in all four matrices of attention, all three of feed-forward.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: int = 32000
    d_model: int = 4096
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_layers: int = 32
    d_ff: int | None = None
    max_length: int = 2048
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Gate = "swiglu"
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_layout: Layout = "half"
    rope_scaling: RopeScaling = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        check_rope(self)


_TWO: dict[str, Any] = {"max_length": 4096, "norm_eps": 1e-5}
_THREE: dict[str, Any] = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "max_length": 8192,
    "norm_eps": 1e-5,
    "rope_base": 500000.0,
}
_STRETCHED = _THREE | {"max_length": 131072, "rope_scaling": {"type": "llama3"}}
_13B: dict[str, Any] = {"d_model": 5120, "num_heads": 40, "num_layers": 40}
_65B: dict[str, Any] = {"d_model": 8192, "num_heads": 64, "num_layers": 80}
_70B = _65B | {"num_kv_heads": 8, "d_ff": 28672}
_SMALL = _STRETCHED | {
    "d_ff": 8192,
    "rope_scaling": {"type": "llama3", "factor": 32.0},
    "tie_embeddings": True,
}

SIZES: dict[str, dict[str, Any]] = {
    "7b": {},
    "13b": _13B,
    "33b": {"d_model": 6656, "num_heads": 52, "num_layers": 60},
    "65b": _65B,
    "2-7b": _TWO,
    "2-13b": _TWO | _13B,
    "2-70b": _TWO | _70B,
    "3-8b": _THREE | {"d_ff": 14336},
    "3-70b": _THREE | _70B,
    "3.1-8b": _STRETCHED | {"d_ff": 14336},
    "3.1-70b": _STRETCHED | _70B,
    "3.1-405b": _STRETCHED | {"d_model": 16384, "num_heads": 128, "num_layers": 126, "d_ff": 53248},
    "3.2-1b": _SMALL | {"d_model": 2048, "num_layers": 16},
    "3.2-3b": _SMALL | {"d_model": 3072, "num_heads": 24, "num_layers": 28},
}


def build(config: Config, *, window: int | None = None) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying.

    The papers do not say how theirs were drawn. Here as in GPT-2: N(0, 0.02²), those that end a
    residual branch divided by √(2L).

    Args:
        window: keys that a query sees, its own counted (Mistral); default: all before it.
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    nowhere = NoPositions().build(config.max_length, config.d_model)
    head = tokens.weight if config.tie_embeddings else nn.Parameter(tokens.weight.clone())
    net = DecoderOnly(
        TokenEmbedding(tokens, nowhere, dropout=config.dropout),
        Stack(
            (_block(config, window) for _ in range(config.num_layers)),
            _norm(config),
            relative=_positions(config),
        ),
        OutputProjection(head),
    )
    init_weights(net, normal(0.02))
    shrink_residuals(net)
    return net


def _block(config: Config, window: int | None) -> Block:
    attention = Attention(
        config.d_model,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=window,
        dropout=config.attention_dropout,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    mlp = Gated(config.d_model, _hidden(config), config.activation, bias=config.mlp_bias)
    return Block(
        PreNorm(attention, _norm(config), dropout=config.dropout),
        None,
        PreNorm(mlp, _norm(config), dropout=config.dropout),
    )


def _norm(config: Config) -> nn.Module:
    return RMSNorm(config.norm_eps).build(config.d_model)


def _positions(config: Any) -> nn.Module:
    return rotary(config).build(config.num_heads, head_width(config), causal=True)


def _hidden(config: Any) -> int:
    """d_ff, given or by the authors' rule."""
    width: int = config.d_ff or -(-(8 * config.d_model // 3) // 256) * 256
    return width


@torch.no_grad()
def to_half_layout(net: DecoderOnly, config: AnyConfig) -> tuple[DecoderOnly, AnyConfig]:
    """A copy whose rotary layout is half, and its Config; what is half already comes back itself.

    The rows of each head's query and key change places: dimensions 2i and 2i + 1, which the
    interleaved layout pairs, become i and i + E/2. Scores, and so logits, stay what they were.
    Works for every net with `rope_layout` in its Config.
    """
    if config.rope_layout == "half":  # type: ignore[attr-defined]
        return net, config
    net, config = copy.deepcopy(net), replace(config, rope_layout="half")  # type: ignore[type-var]
    net.decoder.relative = _positions(config)
    for block in net.decoder.blocks:
        attention = block.self_attention.sublayer  # type: ignore[union-attr]
        assert isinstance(attention, Attention)
        for joint in (attention.qkv.weight, attention.qkv.bias):
            if joint is not None:
                query, key, _ = joint.split(attention.split_sizes)
                for part in (query, key):
                    part.copy_(_apart(part, attention.head_dim))
    return net, config


def _apart(rows: Tensor, width: int) -> Tensor:
    """In every head of this width the even rows, and after them the odd ones."""
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_length",
    "attention_dropout": "attention_dropout",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
HF_GATES: dict[str, Gate] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}
HF_DEFAULTS = {"hidden_act": "silu", "head_dim": None, "tie_word_embeddings": False}


def sizes_to_hf(config: Any) -> dict[str, Any]:
    """Sizes that we may leave to a rule, and the rotary keys. `dropout` has no place there."""
    return {
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": head_width(config),
        "intermediate_size": _hidden(config),
        **rope_to_hf(config),
    }


def _write(config: Config) -> dict[str, Any]:
    if config.d_model % config.num_heads:
        raise UserError(
            f"d_model {config.d_model} is not divisible by num_heads {config.num_heads}, which "
            "the Hugging Face format of llama demands even where head_dim is given"
        )
    return sizes_to_hf(config)


HF = HfFormat(
    model_type="llama",
    classes={"LlamaForCausalLM": {}, "LlamaModel": {}},
    keys={**HF_KEYS, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    values={"hidden_act": ("activation", HF_GATES)},
    defaults={**HF_DEFAULTS, "intermediate_size": 11008, "max_position_embeddings": 2048},
    read=rope_from_hf,
    write=_write,
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there; raises UserError for another layout."""
    if config.rope_layout != "half":
        raise UserError(
            f"the Hugging Face format has no rope_layout {config.rope_layout}; convert the net by "
            "heedful.zoo.llama.to_half_layout(net, config)"
        )
    layer, block = "model.layers.{i}.", "decoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    joined = tuple(f"{layer}self_attn.{part}_proj" for part in "qkv")
    halves = tuple(f"{layer}mlp.{part}_proj" for part in ("gate", "up"))
    names = [
        Name("embedding.tokens.weight", "model.embed_tokens.weight"),
        Name(f"{attention}norm.weight", f"{layer}input_layernorm.weight"),
        Name(f"{mlp}norm.weight", f"{layer}post_attention_layernorm.weight"),
        Name("decoder.final_norm.weight", "model.norm.weight"),
    ]
    for ours, theirs, has_bias in (
        (f"{attention}sublayer.qkv", joined, config.attention_bias),
        (f"{attention}sublayer.out", (f"{layer}self_attn.o_proj",), config.attention_bias),
        (f"{mlp}sublayer.up", halves, config.mlp_bias),
        (f"{mlp}sublayer.down", (f"{layer}mlp.down_proj",), config.mlp_bias),
    ):
        for part in ("weight", "bias") if has_bias else ("weight",):
            names.append(Name(f"{ours}.{part}", tuple(f"{each}.{part}" for each in theirs)))
    if not config.tie_embeddings:
        names.append(Name("head.weight", "lm_head.weight"))
    return Names(
        tuple(names),
        prefix="model.",
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {},
        buffers=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    )
