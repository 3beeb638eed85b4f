"""LLaMA (Touvron et al. 2023a), Llama 2 (Touvron et al. 2023b) and Llama 3 (Dubey et al. 2024).

A pre-norm decoder with RMSNorm, SwiGLU and rotary positions (LLaMA, sec. 2.2), no biases and no
dropout. Llama 2 groups the key heads of its largest models, Llama 3 those of all, with a rotary
base of 500,000; 3.1 stretches the low frequencies (`Llama3Scaling`); the two small ones of 3.2 tie
their embeddings.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.parts.feedforward import Gate
from heedful.parts.init import init_weights, normal, shrink_residuals
from heedful.parts.norms import RMSNorm
from heedful.parts.residual import PreNorm
from heedful.parts.rotary import Layout
from heedful.zoo.build import NONE, Keys, decoder_only, stack
from heedful.zoo.checks import model_config
from heedful.zoo.hf import GATES, Hf, HfFormat
from heedful.zoo.names import Name, Names, layer_names
from heedful.zoo.rope import (
    RopeScaling,
    check_rope,
    head_width,
    rope_from_hf,
    rope_to_hf,
    rotary_module,
)

AnyConfig = TypeVar("AnyConfig")


@model_config
class Base:
    """Sizes and choices of LLaMA and its descendants; the defaults are LLaMA 7B.

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
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 32000
    d_model: Annotated[int, Hf("hidden_size")] = 4096
    num_heads: Annotated[int, Hf("num_attention_heads")] = 32
    num_kv_heads: Annotated[int | None, Hf("num_key_value_heads")] = None
    head_dim: Annotated[int | None, Hf("head_dim")] = None
    num_layers: Annotated[int, Hf("num_hidden_layers")] = 32
    d_ff: Annotated[int | None, Hf("intermediate_size")] = None
    max_length: Annotated[int, Hf("max_position_embeddings")] = 2048
    dropout: float = 0.0
    attention_dropout: Annotated[float, Hf("attention_dropout")] = 0.0
    activation: Annotated[Gate, Hf("hidden_act", values=GATES)] = "swiglu"
    norm_eps: Annotated[float, Hf("rms_norm_eps")] = 1e-6
    rope_base: float = 10000.0
    rope_layout: Layout = "half"
    rope_scaling: RopeScaling = None
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = False

    def check(self) -> None:
        """Refuse heads that rotary positions cannot turn."""
        check_rope(self)


@model_config
class Config(Base):
    """LLaMA's.

    Args:
        attention_bias, mlp_bias: in all four matrices of attention, all three of feed-forward.
    """

    attention_bias: Annotated[bool, Hf("attention_bias")] = False
    mlp_bias: Annotated[bool, Hf("mlp_bias")] = False


_TWO: dict[str, Any] = {"max_length": 4096, "norm_eps": 1e-5}
_THREE: dict[str, Any] = {"vocab_size": 128256, "num_kv_heads": 8, "max_length": 8192}
_THREE |= {"norm_eps": 1e-5, "rope_base": 500000.0}
_STRETCHED = _THREE | {"max_length": 131072, "rope_scaling": {"type": "llama3"}}
_SMALL = _STRETCHED | {"d_ff": 8192, "tie_embeddings": True}
_SMALL |= {"rope_scaling": {"type": "llama3", "factor": 32.0}}
_13B: dict[str, Any] = {"d_model": 5120, "num_heads": 40, "num_layers": 40}
_65B: dict[str, Any] = {"d_model": 8192, "num_heads": 64, "num_layers": 80}
_70B = _65B | {"num_kv_heads": 8, "d_ff": 28672}

SIZES: dict[str, dict[str, Any]] = {  # and their parameters
    "7b": {},  # 6.7B
    "13b": _13B,  # 13.0B
    "33b": {"d_model": 6656, "num_heads": 52, "num_layers": 60},  # 32.5B
    "65b": _65B,  # 65.3B
    "2-7b": _TWO,
    "2-13b": _TWO | _13B,
    "2-70b": _TWO | _70B,  # 69.0B
    "3-8b": _THREE | {"d_ff": 14336},  # 8.0B
    "3-70b": _THREE | _70B,  # 70.6B
    "3.1-8b": _STRETCHED | {"d_ff": 14336},
    "3.1-70b": _STRETCHED | _70B,
    "3.1-405b": _STRETCHED  # 405.9B
    | {"d_model": 16384, "num_heads": 128, "num_layers": 126, "d_ff": 53248},
    "3.2-1b": _SMALL | {"d_model": 2048, "num_layers": 16},  # 1.24B
    "3.2-3b": _SMALL | {"d_model": 3072, "num_heads": 24, "num_layers": 28},  # 3.21B
}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn from torch's generator once, after tying.

    The papers do not say how theirs were drawn. Here as in GPT-2: N(0, 0.02²), those that end a
    residual branch divided by √(2L).
    """
    bias = config.attention_bias
    return assemble(config, mlp_bias=config.mlp_bias, bias=bias, out_bias=bias)


def assemble(
    config: Base,
    *,
    mlp_bias: bool = False,
    layer: Callable[[int], Keys] = lambda number: NONE,
    **attention: Any,
) -> DecoderOnly:
    """LLaMA or a descendant; `attention` and `layer`: further arguments as of `stack`."""
    position = rotary_module(config)
    keys: dict[str, Any] = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    keys |= {"dropout": config.attention_dropout, "bias": False, "out_bias": False}
    blocks = stack(
        config,
        residual=PreNorm,
        norm=RMSNorm(config.norm_eps),
        attention=keys | attention,
        layer=lambda number: {"position": position, **layer(number)},
        mlp={"d_ff": _hidden(config), "bias": mlp_bias},
        final_norm=True,
    )
    net = decoder_only(config, blocks)
    init_weights(net, normal(0.02))
    shrink_residuals(net)
    return net


def _hidden(config: Base) -> int:
    """d_ff, given or by the authors' rule."""
    return config.d_ff or -(-(8 * config.d_model // 3) // 256) * 256


def sizes_to_hf(config: Base) -> dict[str, Any]:
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
    config=Config,
    classes={"LlamaForCausalLM": {}, "LlamaModel": {}},
    defaults={"d_ff": 11008},
    read=lambda content: rope_from_hf({"max_position_embeddings": 2048} | content),
    write=_write,
)
HF_LAYER = {
    "self_attention.norm": "input_layernorm",
    "self_attention.sublayer.qkv": "self_attn.{q,k,v}_proj",
    "self_attention.sublayer.out": "self_attn.o_proj",
    "feedforward.norm": "post_attention_layernorm",
    "feedforward.sublayer.up": "mlp.{gate,up}_proj",
    "feedforward.sublayer.down": "mlp.down_proj",
}


def hf_names(config: Base, layer: dict[str, str] = HF_LAYER) -> Names:
    """Hugging Face tensor names; raises UserError for another layout."""
    if config.rope_layout != "half":
        raise UserError(
            f"the Hugging Face format has no rope_layout {config.rope_layout}; convert the net by "
            "heedful.zoo.rope.to_half_layout(net, config)"
        )
    return Names(
        [
            Name("embedding.tokens", "model.embed_tokens"),
            *layer_names("decoder.blocks.{i}", "model.layers.{i}", layer),
            Name("decoder.final_norm", "model.norm"),
            Name("head.out", "lm_head"),
        ],
        prefix="model.",
        buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    )
