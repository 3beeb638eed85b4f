"""What compiled steps call in place of torch's own products, each with its kernel in C++.

Linear layers whose weights lie in the order in which `packed.cpp` reads them, and the attention of
`attention.cpp`.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

SOURCES = [Path(__file__).with_name(name) for name in ("packed.cpp", "attention.cpp")]
OUTPUTS, INPUTS = 64, 4  # of a packed weight that lie side by side; inputs: in int8


def pack(weight: Float[Tensor, "N K"]) -> Float[Tensor, "blocks K 64"]:
    """Outputs in blocks, which are filled up with zeros."""
    padded = F.pad(weight, (0, 0, 0, -weight.size(0) % OUTPUTS))
    return padded.view(-1, OUTPUTS, weight.size(1)).transpose(1, 2).contiguous()


def pack_int8(weight: Int[Tensor, "N K"]) -> Int[Tensor, "blocks quarters 64 4"]:
    """The same of int8, four inputs of each output side by side."""
    padded = F.pad(weight, (0, 0, 0, -weight.size(0) % OUTPUTS))
    parts = padded.view(-1, OUTPUTS, weight.size(1) // INPUTS, INPUTS)
    return parts.transpose(1, 2).contiguous()


def quantize(weight: Float[Tensor, "N K"]) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N"]]:
    """Whole numbers in int8 and the scale of each output, whose product is the weight."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


@torch.library.custom_op("heedful::heedful_float32_linear", mutates_args=())
def float32_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the kernel works out, by torch as it is: (M, N)."""
    return F.linear(x, weight.transpose(1, 2).flatten(0, 1)[: len(bias)], bias)


@torch.library.custom_op("heedful::heedful_int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, bias: Tensor) -> Tensor:
    """What the kernel works out, by torch as it is: (M, N)."""
    size = x.abs().amax(-1, keepdim=True) / 127
    size = torch.where(size > 0, size, 1.0)
    whole = weight.transpose(1, 2).flatten(0, 1).flatten(1)[: len(bias)]
    return F.linear(torch.round(x / size) * size, whole.float() * scale[:, None], bias)


@torch.library.custom_op("heedful::heedful_attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """What the kernel works out, by torch as it is: (B, H, T, E), lying as (B, T, H, E)."""
    found = (query @ key.mT + bias).softmax(-1) @ value
    return found.transpose(1, 2).contiguous().transpose(1, 2)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)


@float32_linear.register_fake
@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    bias = others[-1]
    return x.new_empty(x.size(0), bias.size(0))


def _declaration(name: str, *inputs: str) -> list[str]:
    given = ", ".join(f"AtenTensorHandle {each}" for each in inputs)
    return [f"AOTITorchError aoti_torch_cpu_heedful_{name}({given}, AtenTensorHandle* ret0)"]


# The kernels of the three, in C.
KERNELS: dict[Any, list[str]] = {
    float32_linear._opoverload: _declaration("float32_linear", "x", "weight", "bias"),
    attention._opoverload: _declaration("attention", "query", "key", "value", "bias"),
    int8_linear._opoverload: _declaration("int8_linear", "x", "weight", "scale", "shift", "bias"),
}


class PackedLinear(nn.Module):
    """A linear layer in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self.register_buffer("weight", pack(weight))
        self.register_buffer("bias", bias.float())

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        parts: Any = (self.weight, self.bias)
        return float32_linear(x.reshape(-1, x.size(-1)), *parts).view(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """A linear layer in int8: weights by one scale an output, inputs by one a row.

    Args:
        linear: whose inputs are a multiple of four.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rounded, scale = quantize(linear.weight)
        bias = torch.zeros_like(scale) if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("weight", pack_int8(rounded))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", 128 * rounded.sum(1, dtype=torch.int32))
        self.register_buffer("bias", bias)

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        parts: Any = (self.weight, self.scale, self.shift, self.bias)
        return int8_linear(x.reshape(-1, x.size(-1)), *parts).view(*x.shape[:-1], -1)


def exchange_linears(net: nn.Module, precision: str) -> None:
    """Put packed ones in the place of a net's linear layers, in int8 where that is asked for."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                is_int8 = precision == "int8" and child.in_features % INPUTS == 0
                setattr(module, name, (Int8Linear if is_int8 else PackedLinear)(child))
