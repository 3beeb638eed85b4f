"""GPT-3 (Brown et al. 2020, "Language Models are Few-Shot Learners").

GPT-2 with a context of 2048 tokens; every second layer has a sliding window (sec. 2.1). The paper
lists 24 heads for xl, which would make it 1.5B; 16 give its nominal size. The width of the window
is not published: 256 is that of GPT-Neo (EleutherAI 2021), the public reproduction, whose files
are read and written. GPT-Neo differs in two details: scores are not scaled, and queries, keys and
values have no bias.
"""

from functools import partial
from typing import Annotated, Any

from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import Activation, FeedForward
from heedful.parts.residual import PreNorm
from heedful.zoo import gpt, gpt2
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import ACTIVATIONS, Hf, HfConfig
from heedful.zoo.names import Names


@model_config
class Config(gpt.Config):
    """GPT's keys; the defaults are the paper's smallest model.

    Args:
        head_dim: width of a head; None: d_model / num_heads.
        window: number of keys that a query of every second layer attends to, itself included;
            None: no windows.
        dropout: dropout probability as in GPT; the paper names none.
        scale_scores: divide scores by √head_dim, as GPT-2 does and GPT-Neo does not.
        qkv_bias: bias of queries, keys and values: GPT-2 has it, GPT-Neo does not.
    """

    vocab_size: int = 50257
    d_model: Annotated[int, Hf("hidden_size")] = 768
    num_heads: Annotated[int, Hf("num_heads")] = 12
    head_dim: int | None = None
    num_layers: Annotated[int, Hf("num_layers")] = 12
    d_ff: Annotated[int | None, Hf("intermediate_size")] = None
    max_length: Annotated[int, Hf("max_position_embeddings")] = 2048
    window: int | None = 256
    dropout: Annotated[float, Hf("resid_dropout", "embed_dropout", "attention_dropout")] = 0.0
    activation: Annotated[Activation, Hf("activation_function", values=ACTIVATIONS)] = "gelu_tanh"  # type: ignore[assignment]  # GPT has fewer
    scale_scores: bool = True
    qkv_bias: bool = True


SIZES: dict[str, dict[str, Any]] = {  # Table 2.1, and the parameters of each
    "small": {},  # 125M
    "medium": {"d_model": 1024, "num_heads": 16, "num_layers": 24},  # 350M
    "large": {"d_model": 1536, "num_heads": 16, "num_layers": 24},  # 760M
    "xl": {"d_model": 2048, "num_heads": 16, "num_layers": 24},  # 1.3B
    "2.7b": {"d_model": 2560, "num_heads": 32, "num_layers": 32},  # 2.7B
    "6.7b": {"d_model": 4096, "num_heads": 32, "num_layers": 32},  # 6.7B
    "13b": {"d_model": 5140, "num_heads": 40, "head_dim": 128, "num_layers": 40},  # 13.0B
    "175b": {"d_model": 12288, "num_heads": 96, "num_layers": 96},  # 175.0B
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in GPT-2 from torch's random generator."""
    width, residual = config.d_model, partial(PreNorm, dropout=config.dropout)
    norm = partial(nn.LayerNorm, width, eps=config.norm_eps)

    def block(number: int) -> Block:
        attention = Attention(
            width,
            config.num_heads,
            head_dim=config.head_dim,
            scale=None if config.scale_scores else 1.0,
            window=config.window if number % 2 else None,
            dropout=config.dropout,
            bias=config.qkv_bias,
        )
        feedforward = FeedForward(width, config.d_ff, config.activation)
        return Block(residual(attention, norm()), None, residual(feedforward, norm()))

    decoder = Stack(map(block, range(config.num_layers)), norm())
    return decoder_only(config, decoder, positions=LearnedTable)


def _layers(num_layers: int, window: int | None) -> list[str]:
    """The type of each layer in the GPT-Neo format: global or local."""
    return ["local" if window and layer % 2 else "global" for layer in range(num_layers)]


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    types = content.get("attention_types", [[["global", "local"], 12]])
    num_layers = keys["num_layers"]
    layers = [kind for kinds, times in types for kind in kinds * times]
    for window in (content.get("window_size", 256), None):
        if layers == _layers(num_layers, window):
            return {"window": window, "scale_scores": False, "qkv_bias": False}
    raise UserError(
        f"config.json: attention_types is {types}, but heedful's gpt3 supports {num_layers} layers "
        "that alternate between global and local, or are all global"
    )


def export_as(config: Config, net: nn.Module) -> tuple[str, Any, nn.Module]:
    """Architecture, Config and net for the export: GPT-2 if the model is equal to one."""
    has_default_width = config.head_dim in (None, config.d_model / config.num_heads)
    if config.window is None and config.scale_scores and config.qkv_bias and has_default_width:
        shared = gpt2.Config.__dataclass_fields__.keys() & Config.__dataclass_fields__.keys()
        return "gpt2", gpt2.Config(**{key: getattr(config, key) for key in shared}), net
    return "gpt3", config, net


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names; raises UserError for a Config that GPT-Neo does not support."""
    if config.head_dim not in (None, config.d_model / config.num_heads):
        raise UserError(
            f"head_dim is {config.head_dim}, but the Hugging Face formats of gpt2 and gpt_neo "
            f"support d_model / num_heads ({config.d_model / config.num_heads:g}) only"
        )
    if config.scale_scores or config.qkv_bias:
        raise UserError(
            "layers with a window are exported as GPT-Neo, which has no scaled scores and no bias "
            "of queries, keys and values: train with scale_scores: false and qkv_bias: false (or "
            "with scale_scores: true, qkv_bias: true and window: null, which is GPT-2)"
        )
    layer = gpt.HF_LAYER | {
        "self_attention.sublayer.qkv": "attn.attention.{q,k,v}_proj",
        "self_attention.sublayer.out": "attn.attention.out_proj",
    }
    buffers = r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)"
    return gpt.decoder_names(layer, buffers)


HF = HfConfig(
    model_type="gpt_neo",
    classes={"GPTNeoForCausalLM": {}, "GPTNeoModel": {}},
    defaults={"d_model": 2048, "num_heads": 16, "num_layers": 24},
    read=_read,
    write=lambda config: {
        "attention_types": [[_layers(config.num_layers, config.window), 1]],
        "window_size": config.window or 256,
    },
)
FORMATS: Formats = {"hf": Format(HF, hf_names, export_as), "gguf": Format[Any](export_as=export_as)}
ARCHITECTURE = Architecture("gpt3", Config, build, SIZES, FORMATS)
