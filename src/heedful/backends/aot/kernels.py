"""Linear layers and attention of compiled graphs: custom operators with kernels in C++.

Weights of the packed linear layers are stored in the order in which `packed.cpp` reads them;
`attention.cpp` is the attention of a decoding step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.backends.aot.private import c_shims, int8_matmul

SOURCES = [Path(__file__).with_name(name) for name in ("packed.cpp", "attention.cpp")]
OUTPUTS, INPUTS = 64, 4  # adjacent in packed weights; inputs: of int8 weights only


def pack(weight: Float[Tensor, "N K"]) -> Float[Tensor, "blocks K 64"]:
    """The weight in blocks of 64 outputs, the last filled up with zeros."""
    padded = F.pad(weight, (0, 0, 0, -weight.size(0) % OUTPUTS))
    return padded.view(-1, OUTPUTS, weight.size(1)).transpose(1, 2).contiguous()


def pack_int8(weight: Int[Tensor, "N K"]) -> Int[Tensor, "blocks quarters 64 4"]:
    """See `pack` for int8, with four inputs of each output adjacent; K is a multiple of 4."""
    padded = F.pad(weight, (0, 0, 0, -weight.size(0) % OUTPUTS))
    parts = padded.view(-1, OUTPUTS, weight.size(1) // INPUTS, INPUTS)
    return parts.transpose(1, 2).contiguous()


def quantize(weight: Float[Tensor, "N K"]) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N"]]:
    """The weight as int8 times a scale for each output."""
    weight = weight.detach().float()
    scale = _row_scale(weight)
    return torch.round(weight / scale).to(torch.int8), scale[:, 0]


@torch.library.custom_op("heedful::heedful_float32_linear", mutates_args=())
def float32_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (M, K) through a packed weight: (M, N). This body is the reference of the kernel."""
    return F.linear(x, weight.transpose(1, 2).flatten(0, 1)[: len(bias)], bias)


@torch.library.custom_op("heedful::heedful_int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, bias: Tensor) -> Tensor:
    """x (M, K), quantized by row, through a packed int8 weight: (M, N). Reference of the kernel."""
    x_scale = _row_scale(x)
    unpacked = weight.transpose(1, 2).flatten(0, 1).flatten(1)[: len(bias)]
    return F.linear(torch.round(x / x_scale) * x_scale, unpacked.float() * scale[:, None], bias)


@torch.library.custom_op("heedful::heedful_attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """softmax(q kᵀ + bias) v (B, H, T, E), with the strides of (B, T, H, E). Reference of the
    kernel."""
    output = (query @ key.mT + bias).softmax(-1) @ value
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)


@float32_linear.register_fake
@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    bias = others[-1]
    return x.new_empty(x.size(0), bias.size(0))


def _row_scale(x: Float[Tensor, "M K"]) -> Float[Tensor, "M 1"]:
    """The largest magnitude of each row over 127; 1 for rows of zeros."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, scale, 1.0)


def _declaration(name: str, *inputs: str) -> list[str]:
    """The C declaration of a kernel."""
    parameters = ", ".join(f"AtenTensorHandle {parameter}" for parameter in inputs)
    return [f"AOTITorchError aoti_torch_cpu_heedful_{name}({parameters}, AtenTensorHandle* ret0)"]


KERNELS = c_shims(
    {
        float32_linear: _declaration("float32_linear", "x", "weight", "bias"),
        attention: _declaration("attention", "query", "key", "value", "bias"),
        int8_linear: _declaration("int8_linear", "x", "weight", "scale", "shift", "bias"),
    }
)


class PackedLinear(nn.Module):
    """A linear layer in float32 for few rows: the packed kernel reads each weight once."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", pack(linear.weight.detach().float()))
        self.register_buffer("bias", _bias(linear))

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        buffers: Any = (self.weight, self.bias)
        return float32_linear(x.reshape(-1, x.size(-1)), *buffers).view(*x.shape[:-1], -1)


class PackedInt8Linear(nn.Module):
    """A linear layer in int8 for few rows, by the packed kernel.

    Weights are quantized with one scale for each output, inputs with one for each row.

    Args:
        linear: with a multiple of four inputs.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight)
        self.register_buffer("weight", pack_int8(weight))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", 128 * weight.sum(1, dtype=torch.int32))
        self.register_buffer("bias", _bias(linear))

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        buffers: Any = (self.weight, self.scale, self.shift, self.bias)
        return int8_linear(x.reshape(-1, x.size(-1)), *buffers).view(*x.shape[:-1], -1)


class Int8MatmulLinear(nn.Module):
    """See `PackedInt8Linear` for many rows, as encoders have: by torch's own int8 product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight)
        self.register_buffer("weight", weight.t().contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", _bias(linear))

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        weight, scale, bias = (self.get_buffer(name) for name in ("weight", "scale", "bias"))
        flat = x.reshape(-1, x.size(-1))
        x_scale = _row_scale(flat)
        product = int8_matmul(torch.round(flat / x_scale).to(torch.int8), weight)
        return (product * (x_scale * scale) + bias).view(*x.shape[:-1], -1)


def packed_linear(linear: nn.Linear, precision: str) -> nn.Module:
    """A packed layer in the precision, or in float32 where the inputs do not allow int8."""
    if precision == "int8" and linear.in_features % INPUTS == 0:
        return PackedInt8Linear(linear)
    return PackedLinear(linear)


def replace_linears(net: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every linear layer of a net by `make(layer)`."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child))


def _bias(linear: nn.Linear) -> Float[Tensor, "N"]:
    """The bias in float32; zeros where the layer has none."""
    bias: Tensor | None = linear.bias
    if bias is None:
        return linear.weight.new_zeros(linear.out_features, dtype=torch.float32)
    return bias.detach().float()
