"""Mixtral (Jiang et al. 2024, "Mixtral of Experts").

Mistral without a window, with a mixture of experts: a router selects two of eight feed-forward
networks for each token (sec. 2.1). 8x7B has 46.7B parameters, of which 12.9B are used per token;
8x22B is the later, larger release.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from heedful.models.decoder_only import DecoderOnly
from heedful.models.stack import Block
from heedful.parts.experts import Experts
from heedful.zoo import gguf, mistral, rotary
from heedful.zoo.architectures import Architecture, Format, Formats, model_config
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.names import Names, layer_names
from heedful.zoo.rotary import (
    gated_feedforward,
    read_rotary,
    rotary_attention,
    rotary_block,
    rotary_decoder,
    rotary_module,
    sizes_to_hf,
)


@model_config
class Config(mistral.Config):
    """Keys as in Mistral with the values of the paper (Table 1); the defaults are 8x7B.

    Args:
        d_ff: width of the hidden units of an expert.
        num_experts: experts per layer.
        top_k: experts per token.
        balance_weight: weight of the load-balancing loss in training; None: no such loss.
    """

    d_ff: int = 14336
    window: Annotated[int | None, Hf("sliding_window")] = None
    rope_base: float = 1000000.0
    num_experts: Annotated[int, Hf("num_local_experts")] = 8
    top_k: Annotated[int, Hf("num_experts_per_tok")] = 2
    balance_weight: float | None = 0.02

    def check(self) -> None:
        """Raise ValueError if `top_k` is above `num_experts`."""
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is above num_experts {self.num_experts}")


SIZES: dict[str, dict[str, Any]] = {
    "8x7b": {},
    "8x22b": {"d_model": 6144, "num_heads": 48, "num_layers": 56, "d_ff": 16384}
    | {"max_length": 65536},
}


def build(config: Config) -> DecoderOnly:
    """A new model, initialized as in `llama.build`."""
    position, expert = rotary_module(config), partial(gated_feedforward, config)
    balance_weight = config.balance_weight or 0.0

    def block() -> Block:
        attention = rotary_attention(config, position, window=config.window)
        experts = Experts(
            config.d_model,
            config.num_experts,
            config.top_k,
            expert,
            balance_weight=balance_weight,
        )
        return rotary_block(config, attention, experts)

    return rotary_decoder(config, block)


_BALANCE = "router_aux_loss_coef"


def _read(content: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    return {"balance_weight": content.get(_BALANCE, 0.001) or None, **read_rotary(content, keys)}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names in files; in memory, transformers joins the experts."""
    path, hf_name = "feedforward.sublayer", "block_sparse_moe"
    layer = {k: v for k, v in rotary.HF_LAYER.items() if not k.startswith(path)}
    layer |= {f"{path}.router": f"{hf_name}.gate"}
    for number in range(config.num_experts):
        expert = {"up": "{w1,w3}", "down": "w2"}
        names = layer_names(f"{path}.experts.{number}", f"{hf_name}.experts.{number}", expert)
        layer |= {name.path: name.hf_name for name in names}
    return rotary.hf_names(config, layer)


HF = HfConfig(
    model_type="mixtral",
    classes={"MixtralForCausalLM": {}, "MixtralModel": {}},
    fixed={"router_jitter_noise": 0.0},
    defaults={"head_dim": None, "max_length": 131072},
    read=_read,
    write=lambda config: (
        sizes_to_hf(config) | {"head_dim": config.head_dim, _BALANCE: config.balance_weight or 0.0}
    ),
)


def gguf_names(config: Config) -> Names:
    """Tensor names of GGUF; the experts of a layer are joined when they are written."""
    path = "feedforward.sublayer"
    layer = {k: v for k, v in gguf.LAYER.items() if not k.startswith(path)}
    layer |= {f"{path}.router": "ffn_gate_inp"}
    for number in range(config.num_experts):
        expert = f"{path}.experts.{number}"
        layer |= {
            f"{expert}.up": f"ffn_{{gate,up}}.{number}",
            f"{expert}.down": f"ffn_down.{number}",
        }
    return gguf.rotary_names(config, layer)


GGUF = replace(
    mistral.GGUF,
    write=lambda config: (
        mistral.to_gguf(config)
        | {"expert_count": config.num_experts, "expert_used_count": config.top_k}
    ),
)
GGUF_FORMAT = Format(GGUF, gguf_names, gguf.in_layout("mixtral", "interleaved"))
FORMATS: Formats = {"hf": Format(HF, hf_names), "gguf": GGUF_FORMAT}
ARCHITECTURE = Architecture("mixtral", Config, build, SIZES, FORMATS)
