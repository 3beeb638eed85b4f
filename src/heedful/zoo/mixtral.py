"""Mixtral (Jiang et al. 2024, "Mixtral of Experts").

Mistral without its window, whose feed-forward is the sum of the two out of eight experts that a
router chooses for each token (sec. 2.1). 8x7B has 46.7B parameters, of which a token meets 12.9B;
8x22B is the later, larger release.
"""

from dataclasses import replace
from typing import Annotated, Any

from heedful.models.decoder_only import DecoderOnly
from heedful.zoo import mistral, rotary_decoder
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.build import ExpertsSpec, StackSpec, decoder_only
from heedful.zoo.hf import Hf, HfConfig
from heedful.zoo.model_config import model_config
from heedful.zoo.names import Names, layer_names
from heedful.zoo.rotary_decoder import read_rotary, rotary_block, sizes_to_hf


@model_config
class Config(mistral.Config):
    """Mistral's keys with the paper's values (Table 1); the defaults are 8x7B.

    Args:
        d_ff: width of an expert's hidden units.
        num_experts: of each layer.
        top_k: experts that a token meets.
        balance_weight: in training, of the loss that keeps experts equally busy; None: none.
    """

    d_ff: int = 14336
    window: Annotated[int | None, Hf("sliding_window")] = None
    rope_base: float = 1000000.0
    num_experts: Annotated[int, Hf("num_local_experts")] = 8
    top_k: Annotated[int, Hf("num_experts_per_tok")] = 2
    balance_weight: float | None = 0.02

    def check(self) -> None:
        """Refuse more experts of a token than there are."""
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is above num_experts {self.num_experts}")


SIZES: dict[str, dict[str, Any]] = {
    "8x7b": {},
    "8x22b": {"d_model": 6144, "num_heads": 48, "num_layers": 56, "d_ff": 16384}
    | {"max_length": 65536},
}


def build(config: Config) -> DecoderOnly:
    """A new model, its weights drawn as `llama.build` draws them."""
    block = rotary_block(config)
    experts = ExpertsSpec(config.num_experts, config.top_k, config.balance_weight or 0.0)
    block = replace(
        block,
        attention=replace(block.attention, window=config.window),
        feedforward=replace(block.feedforward, experts=experts),
    )
    return decoder_only(config, StackSpec(config.d_model, [block] * config.num_layers, block.norm))


_BALANCE = "router_aux_loss_coef"


def _read(content: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    return {"balance_weight": content.get(_BALANCE, 0.001) or None, **read_rotary(content, ours)}


def hf_names(config: Config) -> Names:
    """Hugging Face tensor names, of files: in memory transformers joins the experts."""
    ours, theirs = "feedforward.sublayer", "block_sparse_moe"
    layer = {k: v for k, v in rotary_decoder.HF_LAYER.items() if not k.startswith(ours)}
    layer |= {f"{ours}.router": f"{theirs}.gate"}
    for number in range(config.num_experts):
        expert = {"up": "{w1,w3}", "down": "w2"}
        names = layer_names(f"{ours}.experts.{number}", f"{theirs}.experts.{number}", expert)
        layer |= {name.path: name.hf_name for name in names}
    return rotary_decoder.hf_names(config, layer)


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
ARCHITECTURE = Architecture("mixtral", Config, build, SIZES, {"hf": Format(HF, hf_names)})
