"""GPT-3 (Brown et al. 2020, "Language Models are Few-Shot Learners").

| Table 2.1 | layers | d_model | heads | head_dim | parameters |
|-----------|--------|---------|-------|----------|------------|
| small     | 12     | 768     | 12    | 64       | 125M       |
| medium    | 24     | 1024    | 16    | 64       | 350M       |
| large     | 24     | 1536    | 16    | 96       | 760M       |
| xl        | 24     | 2048    | 16    | 128      | 1.3B       |
| 2.7b      | 32     | 2560    | 32    | 80       | 2.7B       |
| 6.7b      | 32     | 4096    | 32    | 128      | 6.7B       |
| 13b       | 40     | 5140    | 40    | 128      | 13.0B      |
| 175b      | 96     | 12288   | 96    | 128      | 175.0B     |

GPT-2 with a context of 2048 tokens, whose layers in turn see the whole text and a band of it (sec.
2.1). The paper prints 24 heads for xl, which would be wider than the model and make it 1.5B; 16
give the size that it is named after. It does not say how wide the band is: 256 is GPT-Neo's
(EleutherAI 2021), the public reproduction, whose files are read and written here. GPT-Neo differs
in two details: it does not scale scores, and its queries, keys and values have no bias.
"""

from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import Activation, Mlp
from heedful.parts.heads import OutputProjection
from heedful.parts.init import init_weights, normal, shrink_residuals
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import Learned
from heedful.parts.residual import PreNorm
from heedful.zoo import gpt2
from heedful.zoo.checks import check_sizes
from heedful.zoo.hf import HfFormat
from heedful.zoo.names import Name, Names


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """The paper's sizes and choices; the defaults are its smallest model.

    Args:
        head_dim: width of a head; None: d_model / num_heads.
        d_ff: width of the feed-forward's hidden units; None: 4 · d_model.
        max_length: longest text, in tokens.
        window: keys that a query of every second layer sees, its own counted; None: all layers see
            the whole text.
        dropout: on embeddings, sub-layers' outputs and attention weights; the paper names none.
        scale_scores: divide scores by √head_dim, as GPT-2 does and GPT-Neo does not.
        qkv_bias: of queries, keys and values: GPT-2 has it, GPT-Neo does not.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: int = 50257
    d_model: int = 768
    num_heads: int = 12
    head_dim: int | None = None
    num_layers: int = 12
    d_ff: int | None = None
    max_length: int = 2048
    window: int | None = 256
    dropout: float = 0.0
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-5
    scale_scores: bool = True
    qkv_bias: bool = True
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "medium": {"d_model": 1024, "num_heads": 16, "num_layers": 24},
    "large": {"d_model": 1536, "num_heads": 16, "num_layers": 24},
    "xl": {"d_model": 2048, "num_heads": 16, "num_layers": 24},
    "2.7b": {"d_model": 2560, "num_heads": 32, "num_layers": 32},
    "6.7b": {"d_model": 4096, "num_heads": 32, "num_layers": 32},
    "13b": {"d_model": 5140, "num_heads": 40, "head_dim": 128, "num_layers": 40},
    "175b": {"d_model": 12288, "num_heads": 96, "num_layers": 96},
}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying, as GPT-2's are."""
    tokens = nn.Embedding(config.vocab_size, config.d_model)
    positions = Learned().build(config.max_length, config.d_model)
    head = tokens.weight if config.tie_embeddings else nn.Parameter(tokens.weight.clone())
    net = DecoderOnly(
        TokenEmbedding(tokens, positions, dropout=config.dropout),
        Stack(
            (_block(config, kind) for kind in _layers(config.num_layers, config.window)),
            _norm(config),
        ),
        OutputProjection(head),
    )
    init_weights(net, normal(0.02))
    shrink_residuals(net)
    return net


def _layers(num_layers: int, window: int | None) -> list[str]:
    """What each layer sees, in GPT-Neo's words: global or local."""
    turns = ("global",) if window is None else ("global", "local")
    return [turns[layer % len(turns)] for layer in range(num_layers)]


def _block(config: Config, kind: str) -> Block:
    width, dropout = config.d_model, config.dropout
    attention = Attention(
        width,
        config.num_heads,
        head_dim=config.head_dim,
        scale=None if config.scale_scores else 1.0,
        window=config.window if kind == "local" else None,
        dropout=dropout,
        bias=config.qkv_bias,
    )
    mlp = Mlp(width, config.d_ff or 4 * width, config.activation)
    return Block(
        PreNorm(attention, _norm(config), dropout=dropout),
        None,
        PreNorm(mlp, _norm(config), dropout=dropout),
    )


def _norm(config: Config) -> nn.Module:
    return LayerNorm(config.norm_eps).build(config.d_model)


def _read(given: dict[str, Any]) -> dict[str, Any]:
    layers = [kind for kinds, times in given["attention_types"] for kind in kinds * times]
    for window in (given["window_size"], None):
        if layers == _layers(given["num_layers"], window):
            return {"window": window, "scale_scores": False, "qkv_bias": False}
    raise UserError(
        f"config.json: attention_types is {given['attention_types']}, but heedful's gpt3 is built "
        f"for {given['num_layers']} layers that are global and local in turn, or all global"
    )


def _write(config: Config) -> dict[str, Any]:
    layers = _layers(config.num_layers, config.window)
    turns = sorted(set(layers))
    times, rest = divmod(len(layers), len(turns))
    types = [[turns, times]] + ([[turns[:rest], 1]] if rest else [])
    return {
        "attention_types": types,
        "window_size": config.window or 256,
        "embed_dropout": config.dropout,
        "attention_dropout": config.dropout,
    }


HF = HfFormat(
    model_type="gpt_neo",
    classes={"GPTNeoForCausalLM": {}, "GPTNeoModel": {}},
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_heads": "num_heads",
        "num_layers": "num_layers",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "max_length",
        "resid_dropout": "dropout",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    values={
        "activation_function": (
            "activation",
            {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"},
        )
    },
    defaults={
        "hidden_size": 2048,
        "num_heads": 16,
        "num_layers": 24,
        "intermediate_size": None,
        "attention_types": [[["global", "local"], 12]],
        "window_size": 256,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
)


def written_as(config: Config) -> tuple[str, Any]:
    """The architecture in whose format this model is written: GPT-2's where it is one."""
    usual = config.head_dim in (None, config.d_model / config.num_heads)
    if config.window is None and config.scale_scores and config.qkv_bias and usual:
        kept = gpt2.Config.__dataclass_fields__.keys() & Config.__dataclass_fields__.keys()
        return "gpt2", gpt2.Config(**{key: getattr(config, key) for key in kept})
    return "gpt3", config


def hf_names(config: Config) -> Names:
    """Our tensors and what they are called over there; raises UserError for what GPT-Neo is not."""
    if config.scale_scores or config.qkv_bias:
        raise UserError(
            "the Hugging Face format that has layers with a window is GPT-Neo's, without scaled "
            "scores and without bias of queries, keys and values: it needs scale_scores: false and "
            "qkv_bias: false from the training on (or scale_scores: true, qkv_bias: true and "
            "window: null, which is GPT-2)"
        )
    if config.head_dim not in (None, config.d_model / config.num_heads):
        raise UserError(
            f"head_dim is {config.head_dim}, but the Hugging Face format of gpt_neo knows d_model "
            f"/ num_heads ({config.d_model / config.num_heads:g}) alone"
        )
    layer, block = "transformer.h.{i}.", "decoder.blocks.{i}."
    attention, mlp = f"{block}self_attention.", f"{block}feedforward."
    inner = f"{layer}attn.attention."
    names = [
        Name("embedding.tokens.weight", "transformer.wte.weight"),
        Name("embedding.positions.weight", "transformer.wpe.weight"),
        Name(
            f"{attention}sublayer.qkv.weight",
            tuple(f"{inner}{part}_proj.weight" for part in "qkv"),
        ),
    ]
    for ours, theirs in (
        (f"{attention}norm", f"{layer}ln_1"),
        (f"{attention}sublayer.out", f"{inner}out_proj"),
        (f"{mlp}norm", f"{layer}ln_2"),
        (f"{mlp}sublayer.up", f"{layer}mlp.c_fc"),
        (f"{mlp}sublayer.down", f"{layer}mlp.c_proj"),
        ("decoder.final_norm", "transformer.ln_f"),
    ):
        names.append(Name(f"{ours}.weight", f"{theirs}.weight"))
        names.append(Name(f"{ours}.bias", f"{theirs}.bias"))
    if not config.tie_embeddings:
        names.append(Name("head.weight", "lm_head.weight"))
    return Names(
        tuple(names),
        prefix="transformer.",
        aliases={"lm_head.weight": "transformer.wte.weight"} if config.tie_embeddings else {},
        buffers=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    )
