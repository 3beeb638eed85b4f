"""The net that several processes train together: DDP, FSDP2.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; Zhao et
al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from heedful.config import Training
from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.positions import RelativePositionBias
from heedful.processes import Processes
from heedful.training.shards import whole_tensor
from heedful.training.step import LossNet, TrainedNet
from heedful.zoo.architectures import host_memory


class ReplicatedNet(TrainedNet):
    """The whole net in every process (DistributedDataParallel)."""

    def __init__(self, loss_net: LossNet, processes: Processes) -> None:
        super().__init__(loss_net)
        self.loss_factor = processes.count  # DDP takes the mean over the processes
        self.scatter()  # before DDP compares the processes
        self.loss_net = self._ddp = nn.parallel.DistributedDataParallel(
            loss_net, gradient_as_bucket_view=True
        )
        self._ddp.broadcast_buffers = False  # buffers are constants

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        if is_last:
            return nullcontext()
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def scatter(self) -> None:
        _broadcast(self.net)

    def whole_in_all(self) -> AbstractContextManager[None]:
        self.scatter()
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor


class ShardedNet(TrainedNet):
    """Parameters, gradients and optimizer state sharded over the processes (FSDP2).

    Each block is a unit, and the rest of the net another one, which holds tied matrices. The given
    net may be on the meta device in other processes than the main one, where its parameters
    have no memory except for shards and, while these are set, one parameter at a time.

    The main process also has the whole net, to save it; the others have it during evaluations, if
    it fits into the memory of each: it takes a quarter of what a process needs to train with DDP
    and Adam.

    Args:
        in_bf16: gather the weights in bf16; their shards and the sums of gradients are in fp32.
    """

    is_sharded = True

    def __init__(self, loss_net: LossNet, processes: Processes, *, in_bf16: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        super().__init__(loss_net)
        self._is_main = processes.is_main
        kind = processes.gather(next(loss_net.net.parameters()).device.type)[0]
        is_cuda = kind == "cuda"
        device = torch.device(kind, torch.cuda.current_device()) if is_cuda else torch.device(kind)
        self._device = device
        (is_too_large,) = processes.any([not _fits(self.whole, device, processes.local_count)])
        self.evaluates_in_all = not is_too_large
        self.net = _copy_on_meta(loss_net.net)
        self.loss_net = loss_net.with_net(self.net)
        mesh = init_device_mesh(device.type, (processes.count,))
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if in_bf16
            else MixedPrecisionPolicy()
        )
        # The views are of relative position biases, which are never changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for module in (*_units(self.net), self.loss_net):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for module in self.loss_net.modules():
            if isinstance(module, FSDPModule):
                # The trainer divides by the number of targets. Gloo has no means, only sums.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        _apply(self.loss_net, lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        self._release_whole()
        _apply(self.whole, lambda t: t if t.is_meta else t.to(device))
        self.scatter()

    def _release_whole(self) -> None:
        """Free the whole net in all processes but the main one."""
        if not self._is_main:
            _replace_parameters(self.whole, "meta")

    def _pairs(self) -> Iterable[tuple[Any, Tensor | None]]:
        """The shard of a parameter, and in the main process the whole one, else None."""
        shards = [*self.net.parameters()]
        whole = self.whole.parameters() if self._is_main else [None] * len(shards)
        return zip(shards, whole, strict=True)

    @contextmanager
    def whole_in_all(self) -> Iterator[None]:
        if not self._is_main:
            _replace_parameters(self.whole, self._device)
        try:
            _broadcast(self.whole)
            yield
        finally:
            self._release_whole()

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        loss_net: Any = self.loss_net
        loss_net.set_requires_gradient_sync(is_last)
        return nullcontext()

    @torch.no_grad()
    def gather(self) -> None:
        for shard, whole in self._pairs():
            full = shard.full_tensor()
            if whole is not None:
                whole.copy_(full)

    @torch.no_grad()
    def scatter(self) -> None:
        from torch.distributed.tensor import distribute_tensor

        for shard, whole in self._pairs():
            full = torch.empty(shard.shape, device=shard.device) if whole is None else whole
            shard.copy_(distribute_tensor(full.detach(), shard.device_mesh, shard.placements))

    def sum(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return whole_tensor(super().gradient_norm(gradients))


def _broadcast(net: nn.Module) -> None:
    """Copy the parameters of a net in the main process to those of all."""
    for parameter in net.parameters():
        torch.distributed.broadcast(parameter.detach(), src=0)


def _apply(module: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module by a function of it; FSDP keeps ties."""
    module._apply(function)


def _copy_on_meta(net: nn.Module) -> nn.Module:
    """A copy of a net with its buffers, and with parameters on the meta device; tied as there."""
    copies = {
        id(old): nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
        for old in net.parameters()
    }
    return deepcopy(net, copies)


def _replace_parameters(net: nn.Module, device: torch.device | str) -> None:
    """Replace the parameters by uninitialized ones on a device; tied ones stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in net.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if old not in replaced:
                new = torch.empty_like(old, device=device)
                replaced[old] = nn.Parameter(new, requires_grad=old.requires_grad)
            setattr(module, name, replaced[old])


def _fits(net: nn.Module, device: torch.device, num_processes: int) -> bool:
    """True if each process may have a whole net, whose weights then take at most half the memory.

    Args:
        device: of the net; for a CPU the memory is shared by the processes of the machine.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    if device.type == "cuda":
        return 2 * size <= torch.cuda.mem_get_info(device)[0]
    return 2 * size * num_processes <= host_memory()


def _units(net: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one: those that blocks share, and the blocks."""
    modules = [*net.modules()]
    shared = [module for module in modules if isinstance(module, RelativePositionBias)]
    blocks = [block for module in modules if isinstance(module, Stack) for block in module.blocks]
    return [*dict.fromkeys([*shared, *blocks])]


def parallelism_of(settings: Training, processes: Processes, precision: str) -> str:
    """The parallelism of a run by several processes: ddp or fsdp.

    Raises:
        UserError: settings that do not fit each other or several processes.
    """
    if settings.parallel == "none":
        raise UserError(
            f"training.parallel none is for one process, not for {processes.count}; set it to ddp "
            "(each process has the whole net) or fsdp (each has a shard), or start without torchrun"
        )
    if settings.parallel != "fsdp":
        return "ddp"
    if reason := not_sharded_reason(settings, precision):
        raise UserError(f"training.parallel fsdp: {reason}, or set training.parallel=ddp")
    return "fsdp"


def not_sharded_reason(settings: Training, precision: str) -> str:
    """Why FSDP cannot train with some settings, with what to do; "" if it can."""
    reasons = {
        "training.optimizer.name muon needs whole matrices; use adamw": (
            settings.optimizer.name == "muon"
        ),
        "training.precision fp16 needs the overflows of all shards; use bf16 or fp32": (
            precision == "fp16"
        ),
        "training.compile makes one graph of a block, which FSDP's hooks divide; leave it out": (
            settings.compile
        ),
    }
    return next((reason for reason, is_unsupported in reasons.items() if is_unsupported), "")


def shared_net(
    loss_net: LossNet, settings: Training, processes: Processes, precision: str
) -> TrainedNet:
    """The net as several processes train it; raises UserError as `parallelism_of`."""
    if parallelism_of(settings, processes, precision) == "fsdp":
        return ShardedNet(loss_net, processes, in_bf16=precision == "bf16")
    return ReplicatedNet(loss_net, processes)
