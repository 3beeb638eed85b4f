"""Helpers of all parts: checked arguments, hooks, the device of kernels, the layout of weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from numbers import Real
from typing import Any, TypeVar, cast, dataclass_transform

import torch
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from heedful.errors import UserError, describe
from heedful.plugins import nearest

T = TypeVar("T")
# The type of the device in `simulated_device`, where tensors have no values; else empty.
simulated: list[str] = []


@dataclass_transform(frozen_default=True)
def checked_dataclass(cls: type[T]) -> type[T]:
    """A frozen dataclass whose constructor raises UserError, naming the class and the key."""
    result: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    initialize = result.__init__
    names = [field.name for field in fields(result)]

    @wraps(initialize)
    def __init__(self: Any, *args: Any, **keys: Any) -> None:
        try:
            initialize(self, *args, **keys)
        except ValidationError as error:
            key, message = first_problem(error, names)
            where = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
            if key in keys and key not in names:
                raise UserError(f"{where}: unknown key {key}; {nearest(key, names)}") from None
            raise UserError(f"{where}: {f'{key}: ' if key else ''}{message}") from None

    result.__init__ = __init__
    return cast(type[T], result)


def check_positive(**values: Any) -> None:
    """Raises UserError for an argument that is no number above 0; None is not checked."""
    for name, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            raise UserError(f"{name} must be a number above 0, not {describe(value)}")


def first_problem(error: ValidationError, names: list[str]) -> tuple[str, str]:
    """The dotted key and the message of the first problem.

    Args:
        names: the fields, by which arguments without a keyword are named.
    """
    first = error.errors()[0]
    place = list(map(str, first["loc"]))
    if place and place[0].isdecimal() and int(place[0]) < len(names):
        place[0] = names[int(place[0])]
    return ".".join(place), first["msg"].removeprefix("Value error, ")


def has_hooks(module: nn.Module) -> bool:
    """True if a module has forward hooks or forward pre-hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_any_hooks(module: nn.Module) -> bool:
    """True if a module has hooks of its forward or its backward pass."""
    return has_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def kernel_device(x: Tensor) -> str:
    """The type of the device of `x`, or in `simulated_device` of that one."""
    return simulated[-1] if simulated else x.device.type


@contextmanager
def simulated_device(device_type: str) -> Iterator[None]:
    """In the block, modules compute tensors without values as on a device (`cost/trace.py`)."""
    simulated.append(device_type)
    try:
        yield
    finally:
        simulated.pop()


def move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; the host does not wait until a GPU has it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@torch.no_grad()
def make_weights_column_major(net: nn.Module) -> nn.Module:
    """Store the weight (out, in) of each linear layer column by column; values do not change.

    On a CPU the product of 2 to 64 rows in fp32, the size of a decoding step, then takes down to
    0.6 of the time (docs/log.md); other sizes take the same time. Tied weights stay tied. Weights
    on other devices or of other types do not change. Returns the net.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                weight.data = weight.t().contiguous().t()
    return net
