"""Memory bandwidth and arithmetic throughput of this machine, measured with torch's kernels."""

import time
from collections.abc import Callable

import torch

from heedful.backends.torch.threads import run_with
from heedful.hardware import cores

REPEATS = 8


def measured_limits(quick: bool = False) -> dict[str, float]:
    """Bytes read per second, and multiply-adds per second in float32 and in int8."""
    side, megabytes = (64, 1) if quick else (2048, 512)
    numbers = torch.ones(megabytes << 18)
    floats, integers = torch.randn(side, side), torch.ones(side, side, dtype=torch.int8)
    with run_with(cores()):
        return {
            "bytes/s": 4 * numbers.numel() / fastest(numbers.sum),
            "float32 products/s": side**3 / fastest(lambda: floats @ floats),
            "int8 products/s": side**3 / fastest(lambda: torch._int_mm(integers, integers)),
        }


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of `REPEATS` calls."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
