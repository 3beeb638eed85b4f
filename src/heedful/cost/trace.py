"""A training step on tensors without data: its memory and its FLOPs.

The step is that of a run (`LossNet`, optimizer, clipping), on torch's fake tensors, which have
shapes and storages but no values. All storages are counted while they live.
"""

import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.config import Training
from heedful.cost.flops import ProductCounter
from heedful.data.collate import Batch
from heedful.parts.attention import MultiHead
from heedful.parts.helpers import simulated_device
from heedful.parts.tokens import Tokens
from heedful.training.averaging import MovingAverage
from heedful.training.optimizer import AUTOCAST, make_optimizer
from heedful.training.step import LossNet
from heedful.zoo.saved import trainable

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepCost:
    """Bytes and FLOPs of a process in a training step.

    Attributes:
        weights: of all parameters and tables.
        gradients: of the trained parameters.
        optimizer_state: averages and momentums of the optimizer.
        averages: the moving average of `training.ema_decay`.
        activations: kept from the forward pass of a batch for its backward pass; the gradients of
            the head, which the chunked loss computes in the forward pass, included.
        peak: the largest sum at any time of the step, with temporary tensors. It may be less than
            the sum of the parts: activations are freed while gradients are made.
        forward_flops, backward_flops: of the matrix products. The gradients of the head, which the
            chunked loss computes, are in the forward pass; what activation checkpointing repeats
            is in the backward pass.
    """

    weights: int
    gradients: int
    optimizer_state: int
    averages: int
    activations: int
    peak: int
    forward_flops: int
    backward_flops: int


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of the storages that operations in the block make, while they live.

    Memory that a kernel takes and returns within one operation is not seen.

    Attributes:
        live: bytes now.
        peak: largest value of `live`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def trace_step(
    loss_net: LossNet,
    batches: Sequence[Batch],
    settings: Training,
    precision: str,
    *,
    on_accelerator: bool = False,
) -> StepCost:
    """Run an optimizer step without data, and return its cost.

    Args:
        loss_net: with a net on the meta device, whose tensors are replaced by fake ones of the CPU.
        batches: of the step, on the CPU. Their values are not used.
        on_accelerator: choose fused attention and the calls of experts as on a GPU. Kernels that
            only a GPU has are represented by the CPU's, which keep the same tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_tensors(loss_net, lambda tensor: FakeTensor(mode, tensor.detach().to("meta"), _CPU))
    if on_accelerator:
        _use_fused_attention(loss_net.net)
    with mode, simulated_device("cuda" if on_accelerator else "cpu"):
        fake = [fake_batch(batch, mode) for batch in batches]
        return count_step(loss_net, fake, settings, precision)


def count_step(
    loss_net: LossNet, batches: Sequence[Batch], settings: Training, precision: str
) -> StepCost:
    """Run an optimizer step whose optimizer has its state, and count its memory and FLOPs."""
    net = loss_net.train().net
    parameters = [*trainable(net).values()]
    optimizer = make_optimizer(net, settings.optimizer, layer_decay=settings.layer_lr_decay)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state
    optimizer.zero_grad(set_to_none=True)
    average = None if settings.ema_decay is None else MovingAverage(net, settings.ema_decay)
    weights = _sizes([*net.parameters(), *net.buffers()])
    state = _sizes(
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    averages = 0 if average is None else _sizes(average.tensors().values())
    counter, products = StorageCounter(), ProductCounter()
    activations = forward_flops = 0
    num_targets = max(1, sum(batch.num_targets for batch in batches))
    with counter:
        for batch in batches:
            before, flops_before = counter.live, products.flops
            with products, torch.autocast("cpu", AUTOCAST[precision], enabled=precision != "fp32"):
                sums = loss_net(batch)
            activations = max(activations, counter.live - before)
            forward_flops += products.flops - flops_before
            with products:
                (sums.loss / num_targets).backward()
            del sums
        gradients = _sizes(p.grad for p in parameters if p.grad is not None)
        # As `StepTimer.take`, and as `WeightUpdates.take` of `training/step.py`.
        used = [p for p in parameters if p.grad is not None]
        if settings.clip_norm is not None and used:
            nn.utils.clip_grad_norm_(used, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.update(1)
    peak = weights + state + averages + counter.peak
    flops = forward_flops, products.flops - forward_flops
    return StepCost(weights, gradients, state, averages, activations, peak, *flops)


def fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    """The batch with fake tensors."""

    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return map_fields(value) if isinstance(value, Tokens) else value

    def map_fields(value: Any) -> Any:
        return replace(value, **{name: fake(part) for name, part in vars(value).items()})

    result: Batch = map_fields(batch)
    return result


def with_random_weights(net: nn.Module) -> nn.Module:
    """A copy, on the CPU, of a net on the meta device, with random weights and tables."""

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.empty(tensor.shape, dtype=tensor.dtype).normal_(std=0.02)

    copy = deepcopy(net)
    replace_tensors(copy, filled)
    return copy


def replace_tensors(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace the parameters, buffers and tables of a module; shared ones stay shared."""
    copies: dict[int, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copy = replacement(tensor)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
            copies[id(tensor)] = copy
        return copies[id(tensor)]

    originals = []  # kept until the end, so that no id is used again
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for table in tables:
            for name, value in [*table.items()]:
                if isinstance(value, Tensor):
                    originals.append(value)
                    table[name] = copy_of(value)


def _use_fused_attention(net: nn.Module) -> None:
    """A fused kernel repeats the random numbers of its dropout, and keeps no tensor of it."""
    for module in net.modules():
        if isinstance(module, MultiHead):
            module.preferred_kernel = "fused"
            module.dropout.p = 0.0


def _sizes(tensors: Any) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
