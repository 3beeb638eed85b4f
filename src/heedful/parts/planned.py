"""The type of device for which modules choose their kernels: that of a tensor, or a planned one."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_planned: list[str] = []  # the planned type, if there is one


def kernel_device(x: Tensor) -> str:
    """The type of the device of `x`, or in `planned_for` the planned one."""
    return _planned[-1] if _planned else x.device.type


def is_planned() -> bool:
    """True in `planned_for`, where tensors have no values."""
    return bool(_planned)


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """In the block, modules compute tensors without values as on a device (`cost/trace.py`)."""
    _planned.append(device_type)
    try:
        yield
    finally:
        _planned.pop()
