"""Tensor parallelism: attention heads and feed-forward units divided over processes.

Shoeybi et al. 2019, "Megatron-LM", sec. 3. Matrices that several parts share (queries, keys and
values; a gate and its units) are divided part by part, which the placements of DTensor cannot
express; the divided net therefore holds plain tensors, and DDP and all optimizers take it as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from heedful.config import Training
from heedful.errors import UserError
from heedful.parts.attention import Attention, CrossAttention, MultiHead
from heedful.parts.dropout import Dropout, DropoutShare
from heedful.parts.experts import Experts
from heedful.parts.feedforward import FeedForward
from heedful.parts.lora import LoRALinear
from heedful.parts.positions import AlibiBias, RelativePositionBias
from heedful.processes import Processes


@dataclass(frozen=True)
class Division:
    """The division of a tensor over processes: each of its parts into equal shares.

    Attributes:
        dim: dimension that is divided.
        parts: sizes of the parts along it.
        count: number of processes.

    >>> Division(0, (4, 2), 2).share(torch.arange(6), 1)
    tensor([2, 3, 5])
    """

    dim: int
    parts: tuple[int, ...]
    count: int

    def share(self, whole: Tensor, index: int) -> Tensor:
        """A copy of the share of a process."""
        parts = whole.split(self.parts, self.dim)
        return torch.cat([part.chunk(self.count, self.dim)[index] for part in parts], self.dim)

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the shares of all processes."""
        sizes = [size // self.count for size in self.parts]
        pieces = [share.split(sizes, self.dim) for share in shares]
        columns = (piece for column in zip(*pieces, strict=True) for piece in column)
        return torch.cat([*columns], self.dim)

    def whole_shape(self, share: Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        shape = [*share.shape]
        shape[self.dim] = sum(self.parts)
        return torch.Size(shape)


class _Enter(torch.autograd.Function):
    """The identity; its gradient is the sum over the processes, each of which has some outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over the processes, each of which has some inputs; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of a tensor over the processes of a group, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


class ColumnLinear(nn.Linear):
    """A linear layer of which this process has some outputs."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        entered: Tensor = _Enter.apply(x, self.group)  # type: ignore[no-untyped-call]
        return F.linear(entered, self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer of which this process has some inputs; the bias is added to the sum."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Leave.apply(F.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


def divide_net(net: nn.Module, index: int, count: int, group: ProcessGroup) -> dict[str, Division]:
    """Divide a net in place over the processes of a group, and return the divisions.

    Args:
        index: the number of this process in the group.
        count: number of processes in it.

    Returns:
        By name the divisions of parameters; all processes have the other parameters whole.

    Raises:
        UserError: a net that cannot be divided into `count` shares.
    """
    _check_divisible(net, count)
    divider = _Divider(index, count, group)
    for module in [*net.modules()]:
        if isinstance(module, MultiHead):
            divider.divide_attention(module)
        elif isinstance(module, FeedForward):
            divider.divide_feedforward(module)
        elif isinstance(module, AlibiBias):
            module.slopes = module._on_device = module.slopes.chunk(count)[index]
        elif isinstance(module, RelativePositionBias):
            module.weight = divider.share(module.weight, 1, module.weight.size(1))
    return {
        name: divider.divisions[id(parameter)]
        for name, parameter in net.named_parameters()
        if id(parameter) in divider.divisions
    }


def _check_divisible(net: nn.Module, count: int) -> None:
    """Raise UserError for a net that cannot be divided into `count` shares."""
    on_cpu = next(net.parameters()).device.type == "cpu"
    for module in net.modules():
        sizes, reason = {}, None
        if isinstance(module, Experts):
            reason = "it does not divide experts; set it to 1"
        elif isinstance(module, LoRALinear):
            reason = "it does not divide an adapter (adapter.rank); set it to 1"
        elif isinstance(module, MultiHead):
            sizes = {"heads": module.num_heads, "key/value heads": module.num_kv_heads}
        elif isinstance(module, FeedForward):
            sizes = {"feed-forward units": module.down.in_features}
        elif isinstance(module, Dropout) and module.p > 0 and not on_cpu:
            reason = "masks of dropout are divided on a CPU only; set model.dropout to 0"
        for name, size in sizes.items():
            if size % count and reason is None:
                reason = f"it must divide the {size:,} {name}; change one of them"
        if reason is not None:
            raise UserError(f"training.tensor_parallel {count}: {reason}")


class _Divider:
    """Replaces parameters by shares of them.

    Attributes:
        divisions: of the shares, by `id`.
    """

    def __init__(self, index: int, count: int, group: ProcessGroup) -> None:
        self._index, self._count, self._group = index, count, group
        self.divisions: dict[int, Division] = {}

    def share(self, whole: Tensor, dim: int, *parts: int) -> nn.Parameter:
        """The share of a parameter that has these parts along a dimension."""
        division = Division(dim, parts, self._count)
        share = nn.Parameter(division.share(whole.detach(), self._index), whole.requires_grad)
        self.divisions[id(share)] = division
        return share

    def divide_attention(self, attention: MultiHead) -> None:
        """Divide the heads; each process has whole heads with their keys and values."""
        width, kv_width = (
            heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
        )
        if isinstance(attention, Attention):
            self._divide_outputs(attention.qkv, width, kv_width, kv_width)
            for norm in (attention.query_norm, attention.key_norm):
                self._sum_gradients(norm)
        else:
            assert isinstance(attention, CrossAttention)
            self._divide_outputs(attention.q, width)
            self._divide_outputs(attention.kv, kv_width, kv_width)
        self._divide_inputs(attention.out)
        attention.num_heads //= self._count
        attention.num_kv_heads //= self._count
        attention.dropout.share = DropoutShare(1, self._index, self._count)

    def divide_feedforward(self, feedforward: FeedForward) -> None:
        """Divide the hidden units."""
        units = feedforward.down.in_features
        self._divide_outputs(feedforward.up, *[units] * (2 if feedforward.is_gated else 1))
        self._divide_inputs(feedforward.down)
        feedforward.dropout.share = DropoutShare(-1, self._index, self._count)

    def _divide_outputs(self, linear: nn.Linear, *parts: int) -> None:
        linear.weight = self.share(linear.weight, 0, *parts)
        if linear.bias is not None:
            linear.bias = self.share(linear.bias, 0, *parts)
        linear.out_features //= self._count
        self._let_exchange(linear, ColumnLinear)

    def _divide_inputs(self, linear: nn.Linear) -> None:
        linear.weight = self.share(linear.weight, 1, linear.in_features)
        linear.in_features //= self._count
        self._let_exchange(linear, RowLinear)

    def _let_exchange(self, linear: Any, kind: type[ColumnLinear | RowLinear]) -> None:
        """Change the class of a linear layer, which keeps its parameters and their order."""
        linear.__class__, linear.group = kind, self._group

    def _sum_gradients(self, norm: nn.Module | None) -> None:
        """Let the gradient of a norm of heads be that of the heads of all processes."""
        for parameter in () if norm is None else norm.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: sum_over(grad, self._group))


class DataProcesses(Processes):
    """The processes that take different batches, each a group of `count` that divides the net.

    Args:
        everyone: all processes; a group has adjacent ranks.
    """

    def __init__(self, everyone: Processes, count: int) -> None:
        self._everyone, self._per_group = everyone, count
        self.rank, self.count = everyone.rank // count, everyone.count // count

    def sum(self, values: Sequence[int]) -> list[int]:
        return [total // self._per_group for total in self._everyone.sum(values)]


def data_processes(processes: Processes, settings: Training) -> Processes:
    """The processes by which batches are divided; all of them without tensor parallelism."""
    count = settings.tensor_parallel
    return processes if count == 1 else DataProcesses(processes, count)
