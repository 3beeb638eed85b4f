"""GPT (Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training").

| sec. 4.1 | layers | d_model | heads | d_ff | length | vocabulary | parameters as counted here |
|----------|--------|---------|-------|------|--------|------------|----------------------------|
| GPT      | 12     | 768     | 12    | 3072 | 512    | 40478      | 117M                       |

The decoder of the Transformer of 2017 without its cross-attention: norms after the sub-layers' sums
and none at the end, but with GELU (its tanh approximation, in the authors' code) and learned
positions. Output and input share one matrix.
"""

from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Mlp
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, normal
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned
from heedful.parts.residual import PostNorm
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices.

    Args:
        d_ff: width of the feed-forward's hidden units; None: 4 · d_model.
        max_length: longest text, in tokens.
        dropout: on embeddings, sub-layers' outputs and attention weights.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: int = 40478
    d_model: int = 768
    num_heads: int = 12
    num_layers: int = 12
    d_ff: int | None = None
    max_length: int = 512
    dropout: float = 0.1
    activation: Literal["gelu_tanh", "relu", "silu"] = "gelu_tanh"
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


SIZES: dict[str, dict[str, Any]] = {"base": {}}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying.

    All weights N(0, 0.02²) (sec. 4.1).
    """
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    positions = Learned().build(config.max_length, config.d_model)
    head = tokens.weight if config.tie_embeddings else nn.Parameter(tokens.weight.clone())
    net = DecoderOnly(
        TokenEmbedding(tokens, positions, dropout=config.dropout),
        Stack(_block(config) for _ in range(config.num_layers)),
        OutputProjection(head),
    )
    init_weights(net, normal(0.02))
    return net


def _block(config: Config) -> Block:
    width, norm = config.d_model, LayerNorm(config.norm_eps)
    attention = Attention(width, config.num_heads, dropout=config.dropout)
    mlp = Mlp(width, config.d_ff or 4 * width, config.activation)
    return Block(
        PostNorm(attention, norm.build(width), dropout=config.dropout),
        None,
        PostNorm(mlp, norm.build(width), dropout=config.dropout),
    )


def _write(config: Config) -> dict[str, Any]:
    if config.d_ff not in (None, 4 * config.d_model):
        raise UserError(
            f"d_ff is {config.d_ff}, but the Hugging Face format of openai-gpt knows 4 · d_model "
            f"({4 * config.d_model}) alone"
        )
    return {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}


HF = HfFormat(
    model_type="openai-gpt",
    classes={"OpenAIGPTLMHeadModel": {}, "OpenAIGPTModel": {}},
    keys={
        "vocab_size": "vocab_size",
        "n_embd": "d_model",
        "n_head": "num_heads",
        "n_layer": "num_layers",
        "n_positions": "max_length",
        "resid_pdrop": "dropout",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    # What they call gelu here is its tanh approximation.
    values={
        "afn": (
            "activation",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
        )
    },
    defaults={"afn": "gelu", "tie_word_embeddings": True},
    write=_write,
)


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there."""
    layer, block = "transformer.h.{i}.", "decoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    names = [
        Name("embedding.tokens.weight", "transformer.tokens_embed.weight"),
        Name("embedding.positions.weight", "transformer.positions_embed.weight"),
    ]
    for ours, theirs, transposed in (
        (f"{attention}sublayer.qkv", f"{layer}attn.c_attn", True),
        (f"{attention}sublayer.out", f"{layer}attn.c_proj", True),
        (f"{attention}norm", f"{layer}ln_1", False),
        (f"{mlp}sublayer.up", f"{layer}mlp.c_fc", True),
        (f"{mlp}sublayer.down", f"{layer}mlp.c_proj", True),
        (f"{mlp}norm", f"{layer}ln_2", False),
    ):
        names.append(Name(f"{ours}.weight", f"{theirs}.weight", transposed=transposed))
        names.append(Name(f"{ours}.bias", f"{theirs}.bias"))
    if not config.tie_embeddings:
        names.append(Name("head.weight", "lm_head.weight"))
    tokens = "transformer.tokens_embed.weight"
    return Names(
        tuple(names),
        prefix="transformer.",
        aliases={"lm_head.weight": tokens} if config.tie_embeddings else {},
        buffers=(r"transformer\.(h\.\d+\.attn\.bias|position_ids)",),
    )
