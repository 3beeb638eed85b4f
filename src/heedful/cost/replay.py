"""The time of the operations of a step on this machine, measured one by one.

Each distinct operation (operator, shapes, types) is run on random data and its time multiplied by
its number of calls. A step of a model that does not fit in memory can so be timed: no more than the
tensors of one operation exist at a time.
"""

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from heedful.cost.trace import Operation, TensorSpec
from heedful.progress import track

_LEAST_SECONDS = 0.02  # of an operation's measurement, or one call if it is slower
_MAX_CALLS = 50


@dataclass(frozen=True)
class ReplayedStep:
    """Measured time of a step.

    Attributes:
        seconds: sum over all operations.
        product_seconds: sum over the matrix products.
        product_flops: FLOPs of these products, as they ran.
    """

    seconds: float
    product_seconds: float
    product_flops: float

    @property
    def product_rate(self) -> float:
        """FLOP/s of the matrix products at the shapes of the step."""
        return self.product_flops / self.product_seconds


def replay(operations: Counter[Operation]) -> ReplayedStep:
    """Measure each distinct operation on the CPU with torch's current number of threads."""
    total = product = flops = 0.0
    with torch.no_grad(), track("measure operations", len(operations)) as advance:
        for operation, count in operations.items():
            seconds = count * _measure(operation)
            total += seconds
            if (size := product_flops(operation)) > 0:
                product += seconds
                flops += count * size
            advance(1)
    return ReplayedStep(total, product, flops)


def product_flops(operation: Operation) -> int:
    """FLOPs of a matrix product by torch's own formulas; 0 for any other operation."""
    formula = flop_registry.get(operation.function._overloadpacket)
    if formula is None:
        return 0
    args = [_on_meta(value) for value in operation.args]
    kwargs = {name: _on_meta(value) for name, value in operation.kwargs}
    out = operation.function(*args, **kwargs)
    return int(formula(*args, **kwargs, out_val=out))


def _measure(operation: Operation) -> float:
    """Median seconds of a call; the first call is not counted."""
    args = [_filled(value) for value in operation.args]
    kwargs = {name: _filled(value) for name, value in operation.kwargs}
    operation.function(*args, **kwargs)
    times: list[float] = []
    while sum(times) < _LEAST_SECONDS and len(times) < _MAX_CALLS:
        began = time.perf_counter()
        operation.function(*args, **kwargs)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _filled(value: Any) -> Any:
    """An argument with random floats; integers are zeros, which are valid indices."""
    if isinstance(value, tuple):
        return [_filled(part) for part in value]
    if not isinstance(value, TensorSpec):
        return value
    size = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
    storage = torch.zeros(max(0, size) if 0 not in value.shape else 0, dtype=value.dtype)
    if value.dtype.is_floating_point:
        storage.normal_()
    return storage.as_strided(value.shape, value.stride)  # elements may share memory


def _on_meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_on_meta(part) for part in value]
    if not isinstance(value, TensorSpec):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
