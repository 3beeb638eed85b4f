"""The size of a net before it is built, and a check that the memory is large enough."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError
from heedful.zoo import architecture


class Sizes(NamedTuple):
    """Numbers of elements of a net: parameters (shared ones once) and tables (buffers)."""

    parameters: int
    tables: int


def meta_net(name: str, config: Any, where: str) -> nn.Module:
    """A net of an architecture on torch's meta device, which allocates no memory.

    Raises UserError, starting with `where`, for a tensor whose size in bytes exceeds 64 bits.
    """
    try:
        with torch.device("meta"), _OnMeta():
            net = architecture(name).build(config)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(f"{where}: the sizes exceed any memory: {error}") from None
    return net


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In the block modules get parameters on the meta device, and buffers with their values.

    A parameter that several modules share remains one if they share it by the attribute of a
    module. One parameter at a time has memory, until it is registered.
    """

    def on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        empty = torch.empty_like(parameter, device="meta")
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    hook: Any = on_meta  # torch's annotation has no result
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def sizes_of(name: str, config: Any, where: str) -> Sizes:
    """The numbers of elements of a net of an architecture; raises UserError as `meta_net`."""
    net = meta_net(name, config, where)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return Sizes(parameters, sum(buffer.numel() for buffer in net.buffers()))


def check_memory(name: str, config: Any, device: torch.device) -> None:
    """Raise UserError, with both sizes, if the memory is too small to train a net on a device."""
    parameters, tables = sizes_of(name, config, "model")
    weights, all_states = 4 * (parameters + tables), 4 * (4 * parameters + tables)
    is_cuda = device.type == "cuda"
    bounds = [(weights if is_cuda else all_states, host_memory(), "machine")]
    if is_cuda:
        bounds.append((all_states, torch.cuda.mem_get_info(device)[1], "GPU"))
    for needed, available, owner in bounds:
        if needed > available:
            raise UserError(
                f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB to be trained, "
                f"and this {owner} has {available / 2**30:,.0f}; make it smaller"
            )


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory available to the process: of the host, or the limit of its container.

    Args:
        limit: file with the limit of the control group ("max": no limit).
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):
        return memory


# Functions whose result has the shape that their arguments broadcast to.
_ELEMENTWISE = frozenset(
    ["add", "sub", "__rsub__", "mul", "div", "neg", "__rpow__", "exp", "sin", "cos", "clamp"]
)


class _OnMeta(TorchFunctionMode):
    """Compute shapes without meta functions of torch, whose import takes a second.

    Functions that are not handled here are called as usual.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):  # in place: the shape stays
            return args[0] if args else kwargs["tensor"]
        if name == "__setitem__":
            return None
        if func is torch.arange:
            return torch.empty(len(range(*args)))
        if name in _ELEMENTWISE or func is torch.empty_like:
            shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
            return torch.empty(np.broadcast_shapes(*shapes))
        return func(*args, **kwargs)
