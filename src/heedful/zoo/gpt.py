"""GPT (Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training").

| sec. 4.1 | layers | d_model | heads | d_ff | length | vocabulary | parameters as counted here |
|----------|--------|---------|-------|------|--------|------------|----------------------------|
| GPT      | 12     | 768     | 12    | 3072 | 512    | 40478      | 117M                       |

The decoder of Vaswani et al. 2017 (post-norm) without cross-attention, with GELU (the tanh
approximation, in the authors' code) and learned positions. Output and input share one matrix.
"""

from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block, Stack
from heedful.parts.attention import Attention
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import FeedForward
from heedful.parts.residual import PostNorm
from heedful.zoo.architectures import Architecture, Format, model_config
from heedful.zoo.build import decoder_only
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.names import Name, Names, layer_names

# In this format gelu is the tanh approximation.
HF_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


@model_config
class Config:
    """The paper's sizes and choices.

    Args:
        d_ff: width of the feed-forward's hidden units; None: 4 · d_model.
        max_length: longest text, in tokens.
        dropout: dropout probability of embeddings, outputs of sub-layers and attention weights.
        tie_embeddings: one matrix for input and output.
    """

    vocab_size: Annotated[int, Hf("vocab_size")] = 40478
    d_model: Annotated[int, Hf("n_embd")] = 768
    num_heads: Annotated[int, Hf("n_head")] = 12
    num_layers: Annotated[int, Hf("n_layer")] = 12
    d_ff: int | None = None
    max_length: Annotated[int, Hf("n_positions")] = 512
    dropout: Annotated[float, Hf("resid_pdrop", "embd_pdrop", "attn_pdrop")] = 0.1
    activation: Annotated[
        Literal["gelu_tanh", "relu", "silu"], Hf("afn", values=HF_ACTIVATIONS)
    ] = "gelu_tanh"
    norm_eps: Annotated[float, Hf("layer_norm_epsilon")] = 1e-5
    tie_embeddings: Annotated[bool, Hf("tie_word_embeddings")] = True


SIZES: dict[str, dict[str, Any]] = {"base": {}}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized from torch's random generator.

    Weights N(0, 0.02²) (sec. 4.1).
    """
    width, residual = config.d_model, partial(PostNorm, dropout=config.dropout)
    norm = partial(nn.LayerNorm, width, eps=config.norm_eps)

    def block() -> Block:
        attention = Attention(width, config.num_heads, dropout=config.dropout)
        feedforward = FeedForward(width, config.d_ff, config.activation)
        return Block(residual(attention, norm()), None, residual(feedforward, norm()))

    decoder = Stack(block() for _ in range(config.num_layers))
    return decoder_only(config, decoder, positions=LearnedTable, shrink_residuals=False)


def _write(config: Config) -> dict[str, Any]:
    if config.d_ff not in (None, 4 * config.d_model):
        raise UserError(
            f"d_ff is {config.d_ff}, but the Hugging Face format of openai-gpt supports "
            f"4 · d_model ({4 * config.d_model}) only"
        )
    return {}


HF_LAYER = {
    "self_attention.norm": "ln_1",
    "self_attention.sublayer.qkv": "attn.c_attn",
    "self_attention.sublayer.out": "attn.c_proj",
    "feedforward.norm": "ln_2",
    "feedforward.sublayer.up": "mlp.c_fc",
    "feedforward.sublayer.down": "mlp.c_proj",
}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names."""
    buffers = r"transformer\.(h\.\d+\.attn\.bias|position_ids)"
    embeddings = ("tokens_embed", "positions_embed")
    return decoder_names(HF_LAYER, buffers, embeddings, transposed=True)


def decoder_names(
    layer: dict[str, str], buffers: str, embeddings: tuple[str, str] = ("wte", "wpe"), **more: bool
) -> Names:
    """Tensor names of GPT, GPT-2 and GPT-Neo.

    Args:
        layer: names of the modules of a layer.
        buffers: see `Names`.
        embeddings: names of the token and position embeddings.
        more: attributes of the names of the layers.
    """
    return Names(
        [
            Name("embedding.tokens", f"transformer.{embeddings[0]}"),
            Name("embedding.positions", f"transformer.{embeddings[1]}"),
            *layer_names("decoder.blocks.{i}", "transformer.h.{i}", layer, **more),
            Name("decoder.final_norm", "transformer.ln_f", zero_bias=more.get("zero_bias", False)),
            Name("head.out", "lm_head"),
        ],
        prefix="transformer.",
        buffers=buffers,
    )


HF = HfConfig(
    model_type="openai-gpt",
    classes={"OpenAIGPTLMHeadModel": {}, "OpenAIGPTModel": {}},
    write=_write,
)
ARCHITECTURE = Architecture("gpt", Config, build, SIZES, {"hf": Format(HF, hf_names)})
