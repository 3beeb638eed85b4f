"""The size of a net before it is made, and whether there is memory for it."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError
from heedful.zoo import architecture


class Sizes(NamedTuple):
    """Numbers that a net holds: in its parameters, each shared one once, and in its tables."""

    parameters: int
    tables: int


def meta_net(name: str, config: Any, where: str) -> nn.Module:
    """A net of an architecture on torch's meta device, which allocates nothing.

    Raises UserError, which begins with `where`, for a tensor of more bytes than 64 bits count.
    """
    try:
        with torch.device("meta"), _OnMeta():
            net = architecture(name).build(config)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(f"{where}: no memory holds such sizes: {error}") from None
    return net


def sizes_of(name: str, config: Any, where: str) -> Sizes:
    """The size of a net of an architecture; raises UserError as `meta_net`."""
    net = meta_net(name, config, where)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return Sizes(parameters, sum(buffer.numel() for buffer in net.buffers()))


def check_memory(name: str, config: Any, device: torch.device) -> None:
    """Refuse a net that the machine cannot train on a device; raises UserError with both sizes."""
    parameters, tables = sizes_of(name, config, "model")
    weights, all_states = 4 * (parameters + tables), 4 * (4 * parameters + tables)
    is_cuda = device.type == "cuda"
    bounds = [(weights if is_cuda else all_states, _host_memory(), "machine")]
    if is_cuda:
        bounds.append((all_states, torch.cuda.mem_get_info(device)[1], "GPU"))
    for needed, available, place in bounds:
        if needed > available:
            raise UserError(
                f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB to be trained, "
                f"and this {place} has {available / 2**30:,.0f}; make it smaller"
            )


def _host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory that the process may have: the host's, or fewer in a container.

    Args:
        limit: the file with the limit of the control group; "max" where there is none.
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
    """Only shapes are computed where torch would first import its compiler, which takes a second.

    Any function that is not named here goes to torch, and gives the same.
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
            shapes = [each.shape for each in args if isinstance(each, torch.Tensor)]
            return torch.empty(np.broadcast_shapes(*shapes))
        return func(*args, **kwargs)
