"""The net that is trained, whole in one process or shared by several: DDP, FSDP2, tensor parallel.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; Zhao et
al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from heedful.config import Training
from heedful.errors import UserError
from heedful.models.stack import Stack
from heedful.parts.relative import RelativePositionBias
from heedful.processes import Processes
from heedful.training.shards import parameter_of, whole_tensor
from heedful.training.step import TrainedNet, TrainStep
from heedful.training.tensor_parallel import divide_net, sum_over
from heedful.zoo.sizes import host_memory


class ReplicatedNet(TrainedNet):
    """The whole net in every process (DistributedDataParallel)."""

    def __init__(self, step: TrainStep, processes: Processes) -> None:
        super().__init__(step)
        self.gradient_factor = processes.count  # DDP takes the mean over the processes
        self.scatter()  # before DDP compares the processes
        self.step = _data_parallel(step)

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        return _exchange(self.step, is_last=is_last)

    def scatter(self) -> None:
        _broadcast(self.net)

    def whole_in_all(self) -> AbstractContextManager[None]:
        self.scatter()
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor


class _PartialNet(TrainedNet):
    """Base: each process trains a part of the net.

    The main process also has the whole net, to save it; the others have it during evaluations, if
    it fits into the memory of each: it takes a quarter of what a process needs to train with DDP
    and Adam.

    Args:
        net: a copy of the step's net, of which this process gets its part.
    """

    def __init__(self, step: TrainStep, processes: Processes, net: nn.Module) -> None:
        super().__init__(step)
        self._is_main = processes.is_main
        kind = processes.gather(next(step.net.parameters()).device.type)[0]
        is_cuda = kind == "cuda"
        self._device = (
            torch.device(kind, torch.cuda.current_device()) if is_cuda else torch.device(kind)
        )
        self.net = net
        self.step = step.with_net(self.net)
        fits = _fits(self.whole, self._device, processes.local_count)
        (is_too_large,) = processes.any([not fits])
        self.evaluates_in_all = not is_too_large

    def _release_whole(self) -> None:
        """Free the whole net in all processes but the main one."""
        if not self._is_main:
            _replace_parameters(self.whole, "meta")

    def _pairs(self) -> Iterable[tuple[str, Any, Tensor | None]]:
        """Name, parameter of `net`, and in the main process that of `whole`, else None."""
        own = dict(self.net.named_parameters())
        whole = self.whole.parameters() if self._is_main else [None] * len(own)
        return zip(own, own.values(), whole, strict=True)

    @contextmanager
    def whole_in_all(self) -> Iterator[None]:
        if not self._is_main:
            _replace_parameters(self.whole, self._device)
        try:
            _broadcast(self.whole)
            yield
        finally:
            self._release_whole()


class ShardedNet(_PartialNet):
    """Parameters, gradients and optimizer state sharded over the processes (FSDP2).

    Each block is a unit, and the rest of the net another one, which holds tied matrices. The net of
    the step may be on the meta device in other processes than the main one, where its parameters
    have no memory except for shards and, while these are set, one parameter at a time.

    Args:
        in_bf16: gather the weights in bf16; their shards and the sums of gradients are in fp32.
    """

    is_sharded = True

    def __init__(self, step: TrainStep, processes: Processes, *, in_bf16: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        super().__init__(step, processes, _copy_on_meta(step.net))
        device = self._device
        mesh = init_device_mesh(device.type, (processes.count,))
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if in_bf16
            else MixedPrecisionPolicy()
        )
        # The views are of relative position biases, which are never changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for module in (*_units(self.net), self.step):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for module in self.step.modules():
            if isinstance(module, FSDPModule):
                # The trainer divides by the number of targets. Gloo has no means, only sums.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        _apply(self.step, lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        self._release_whole()
        _apply(self.whole, lambda t: t if t.is_meta else t.to(device))
        self.scatter()

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        step: Any = self.step
        step.set_requires_gradient_sync(is_last)
        return nullcontext()

    @torch.no_grad()
    def gather(self) -> None:
        for _, shard, whole in self._pairs():
            full = shard.full_tensor()
            if whole is not None:
                whole.copy_(full)

    @torch.no_grad()
    def scatter(self) -> None:
        from torch.distributed.tensor import distribute_tensor

        for _, shard, whole in self._pairs():
            full = torch.empty(shard.shape, device=shard.device) if whole is None else whole
            shard.copy_(distribute_tensor(full.detach(), shard.device_mesh, shard.placements))

    def sum(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return whole_tensor(super().gradient_norm(gradients))


class DividedNet(_PartialNet):
    """The net divided over groups of processes, and replicated over the groups (DDP).

    Args:
        count: number of processes of a group, which have adjacent ranks.
    """

    def __init__(self, step: TrainStep, processes: Processes, count: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(step, processes, deepcopy(step.net))
        num_groups, self._index = processes.count // count, processes.rank % count
        mesh = init_device_mesh(
            self._device.type, (num_groups, count), mesh_dim_names=("data", "tensor")
        )
        self._data, self._tensor = mesh["data"].get_group(), mesh["tensor"].get_group()
        self._divisions = divide_net(self.net, self._index, count, self._tensor)
        self._parameters = dict(self.net.named_parameters())
        self.scatter()
        self._release_whole()
        self.gradient_factor = num_groups
        if num_groups > 1:
            self.step = _data_parallel(self.step, self._data)

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        return _exchange(self.step, is_last=is_last)

    @torch.no_grad()
    def gather(self) -> None:
        for name, share, whole in self._pairs():
            full = self._join(name, share)
            if whole is not None:
                whole.copy_(full)

    @torch.no_grad()
    def scatter(self) -> None:
        for name, share, whole in self._pairs():
            division = self._divisions.get(name)
            shape = share.shape if division is None else division.whole_shape(share)
            full = torch.empty(shape, device=self._device) if whole is None else whole.detach()
            torch.distributed.broadcast(full, src=0)
            share.copy_(self._divide(name, full))

    def sum(self, tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor, group=self._data)
        return tensor

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        divided = [grad for name, grad in gradients.items() if name in self._divisions]
        others = [grad for name, grad in gradients.items() if name not in self._divisions]
        squares = [
            nn.utils.get_total_norm(part).to(self._device) ** 2 for part in (divided, others)
        ]
        return (sum_over(squares[0], self._tensor) + squares[1]).sqrt()

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {}
        for name, tensor in tensors.items():
            full = self._join(parameter_of(name, self._parameters), tensor)
            if self._is_main:
                whole[name] = full
        return whole

    def own_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._divide(parameter_of(name, self._parameters), tensor)
            for name, tensor in tensors.items()
        }

    def _join(self, name: str | None, share: Tensor) -> Tensor:
        """The whole of a tensor like a parameter: all processes of a group call it alike."""
        division = self._divisions.get(name or "")
        if name is None or division is None or share.shape != self._parameters[name].shape:
            return share
        shares = [torch.empty_like(share) for _ in range(division.count)]
        torch.distributed.all_gather(shares, share.contiguous(), group=self._tensor)
        return division.join(shares)

    def _divide(self, name: str | None, whole: Tensor) -> Tensor:
        """The share of a whole tensor like a parameter."""
        division = self._divisions.get(name or "")
        if name is None or division is None:
            return whole
        is_like = whole.shape == division.whole_shape(self._parameters[name])
        return division.share(whole, self._index) if is_like else whole


def _data_parallel(
    step: nn.Module, group: torch.distributed.ProcessGroup | None = None
) -> nn.parallel.DistributedDataParallel:
    """A step whose gradients are the means over the processes of a group, by default all."""
    ddp = nn.parallel.DistributedDataParallel(
        step, process_group=group, gradient_as_bucket_view=True
    )
    ddp.broadcast_buffers = False  # buffers are constants
    return ddp


def _exchange(step: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """A context in which a step exchanges its gradients if it is the last one and uses DDP."""
    if is_last or not isinstance(step, nn.parallel.DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = step.no_sync()
    return context


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
    """The kind of parallelism of a run: none (one process), ddp, fsdp or tensor.

    Raises:
        UserError: settings that do not fit each other or the number of processes.
    """
    if settings.tensor_parallel > 1:
        _check_tensor_parallel(settings, processes, precision)
        return "tensor"
    if processes.count == 1:
        return "none"
    if settings.parallel == "none":
        raise UserError(
            f"training.parallel none is for one process, not for {processes.count}; set it to ddp "
            "(each process has the whole net) or fsdp (each has a shard), or start without torchrun"
        )
    if settings.parallel != "fsdp":
        return "ddp"
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
    for reason, is_unsupported in reasons.items():
        if is_unsupported:
            raise UserError(f"training.parallel fsdp: {reason}, or set training.parallel=ddp")
    return "fsdp"


def _check_tensor_parallel(settings: Training, processes: Processes, precision: str) -> None:
    """Raise UserError for settings that do not fit tensor parallelism.

    Args:
        precision: fp32, bf16 or fp16.
    """
    count = settings.tensor_parallel
    reasons = {
        f"needs a multiple of {count} processes, not {processes.count}; start them with torchrun "
        "--nproc-per-node N, or set it to 1": processes.count % count > 0,
        "divides the net over several processes, which training.parallel none refuses; set that to "
        "ddp": settings.parallel == "none",
        "divides the whole net, not shards of it; set training.parallel to ddp": (
            settings.parallel == "fsdp"
        ),
        "divides matrices, and training.optimizer.name muon needs whole ones; use adamw": (
            settings.optimizer.name == "muon"
        ),
        "needs the overflows of all processes in training.precision fp16; use bf16 or fp32": (
            precision == "fp16"
        ),
        "exchanges tensors inside of the blocks that training.compile would compile; leave that "
        "out": settings.compile,
    }
    for reason, is_unsupported in reasons.items():
        if is_unsupported:
            raise UserError(f"training.tensor_parallel {count} {reason}")


def trained_net(
    step: TrainStep, settings: Training, processes: Processes, precision: str
) -> TrainedNet:
    """The net as the processes of a run train it; raises UserError as `parallelism_of`."""
    parallelism = parallelism_of(settings, processes, precision)
    if parallelism == "tensor":
        return DividedNet(step, processes, settings.tensor_parallel)
    if parallelism == "fsdp":
        return ShardedNet(step, processes, in_bf16=precision == "bf16")
    return TrainedNet(step) if parallelism == "none" else ReplicatedNet(step, processes)
