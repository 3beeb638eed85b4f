"""Linear layers, feed-forward networks and attention of compiled graphs: custom operators with
kernels in C++.

Weights of the packed linear layers are stored in the order in which `packed.cpp` reads them;
`attention.cpp` is the attention of a decoding step, `text_attention.cpp` that of encoders.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.backends.aot.private import c_shims
from heedful.parts.feedforward import FUNCTIONS, FeedForward, gelu_tanh

_FILES = ("packed.cpp", "feed_forward.cpp", "attention.cpp", "text_attention.cpp")
SOURCES = [Path(__file__).with_name(name) for name in _FILES]
ACTIVATIONS = (F.relu, F.gelu, gelu_tanh, F.silu)  # as `Activation` of `vectors.h`
OUTPUTS, INPUTS = 64, 4  # adjacent in packed weights; inputs: of int8 weights only
UNITS = 16  # the hidden units of an int8 feed-forward network are a multiple
assert {*ACTIVATIONS} == {*FUNCTIONS.values()}


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
def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, bias: Tensor, releases_lock: int
) -> Tensor:
    """x (M, K), quantized by row, through a packed int8 weight: (M, N). Reference of the kernel.

    The kernel releases Python's lock if `releases_lock` is not 0, so that batches run in several
    threads. It is not released in decoding steps: they are many short calls, and after each the
    thread would have to wait for the lock.
    """
    x_scale = _row_scale(x)
    unpacked = weight.transpose(1, 2).flatten(0, 1).flatten(1)[: len(bias)]
    return F.linear(torch.round(x / x_scale) * x_scale, unpacked.float() * scale[:, None], bias)


@torch.library.custom_op("heedful::heedful_int8_feed_forward", mutates_args=())
def int8_feed_forward(
    x: Tensor,
    up_weight: Tensor,
    up_scale: Tensor,
    up_shift: Tensor,
    up_bias: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    down_shift: Tensor,
    down_bias: Tensor,
    activation: int,
) -> Tensor:
    """x (M, D) through two packed int8 layers: (M, D). The activation is between them, or a gate if
    the first has twice the inputs of the second. Reference of the kernel."""
    hidden = int8_linear(x, up_weight, up_scale, up_shift, up_bias, 0)
    units = down_weight.size(1) * INPUTS
    gate, value = hidden[:, :units], hidden[:, units:]
    hidden = ACTIVATIONS[activation](gate)
    hidden = hidden * value if value.size(1) else hidden
    return int8_linear(hidden, down_weight, down_scale, down_shift, down_bias, 0)


@int8_feed_forward.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.size(0), others[-2].size(0))


@torch.library.custom_op("heedful::heedful_text_attention", mutates_args=())
def text_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, window: int
) -> Tensor:
    """softmax(scale · q kᵀ) v (N, H, E) within each text, texts packed one after the other.

    key, value: (N, G, E). starts (B + 1): the first token of each text, then N. window: keys less
    than this many positions away are visible; 0: all of the text. Reference of the kernel.
    """
    outputs = []
    repeats = query.size(1) // key.size(1)
    for first, last in pairwise(starts.tolist()):
        q, k, v = (item[first:last].transpose(0, 1) for item in (query, key, value))
        distance = torch.arange(last - first)[:, None] - torch.arange(last - first)
        hidden = distance.abs() >= (window or last - first)
        scores = scale * q @ k.repeat_interleave(repeats, 0).mT
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ v.repeat_interleave(repeats, 0)).transpose(0, 1))
    return torch.cat(outputs)


@text_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


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
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.size(0), bias.size(0))


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.size(0), scale.size(0))


def _row_scale(x: Float[Tensor, "M K"]) -> Float[Tensor, "M 1"]:
    """The largest magnitude of each row over 127; 1 for rows of zeros."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, scale, 1.0)


def _declaration(name: str, *inputs: str) -> list[str]:
    """The C declaration of a kernel: names of tensors, and other parameters with their types."""
    typed = (item if " " in item else f"AtenTensorHandle {item}" for item in inputs)
    parameters = ", ".join(typed)
    return [f"AOTITorchError aoti_torch_cpu_heedful_{name}({parameters}, AtenTensorHandle* ret0)"]


_LAYER = ("weight", "scale", "shift", "bias")  # the tensors of a `PackedInt8Linear`
KERNELS = c_shims(
    {
        float32_linear: _declaration("float32_linear", "x", "weight", "bias"),
        attention: _declaration("attention", "query", "key", "value", "bias"),
        int8_linear: _declaration("int8_linear", "x", *_LAYER, "int64_t releases_lock"),
        int8_feed_forward: _declaration(
            "int8_feed_forward",
            "x",
            *(f"{layer}_{item}" for layer in ("up", "down") for item in _LAYER),
            "int64_t activation",
        ),
        text_attention: _declaration(
            "text_attention", "query", "key", "value", "starts", "double scale", "int64_t window"
        ),
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
    """A linear layer in int8, by the packed kernel.

    Weights are quantized with one scale for each output, inputs with one for each row.

    Args:
        linear: with a multiple of four inputs.
        releases_lock: see `int8_linear`.
    """

    def __init__(self, linear: nn.Linear, *, releases_lock: bool = False) -> None:
        super().__init__()
        self.releases_lock = int(releases_lock)
        weight, scale = quantize(linear.weight)
        self.register_buffer("weight", pack_int8(weight))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", 128 * weight.sum(1, dtype=torch.int32))
        self.register_buffer("bias", _bias(linear))

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        buffers: Any = (self.weight, self.scale, self.shift, self.bias)
        flat = x.reshape(-1, x.size(-1))
        return int8_linear(flat, *buffers, self.releases_lock).view(*x.shape[:-1], -1)


class PackedFeedForward(nn.Module):
    """A `FeedForward` in int8 as one operator.

    Args:
        feed_forward: with linear layers of a multiple of four inputs, and of 16 hidden units.
    """

    def __init__(self, feed_forward: FeedForward) -> None:
        super().__init__()
        self.up = PackedInt8Linear(feed_forward.up)
        self.down = PackedInt8Linear(feed_forward.down)
        self.activation = ACTIVATIONS.index(feed_forward.activation)

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """The module is a feed-forward network of suitable widths."""
        if type(module) is not FeedForward or type(module.up) is not nn.Linear:
            return False
        up, down = module.up, module.down
        return up.in_features % INPUTS == 0 and down.in_features % UNITS == 0

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        layers: Any = [getattr(layer, name) for layer in (self.up, self.down) for name in _LAYER]
        flat = x.reshape(-1, x.size(-1))
        return int8_feed_forward(flat, *layers, self.activation).view(x.shape)


def packed_linear(linear: nn.Linear, precision: str, *, releases_lock: bool = False) -> nn.Module:
    """A packed layer in the precision, or in float32 where the inputs do not allow int8."""
    if precision == "int8" and linear.in_features % INPUTS == 0:
        return PackedInt8Linear(linear, releases_lock=releases_lock)
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
