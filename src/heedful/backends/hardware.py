"""The processor of this machine: its instruction set and the cores that a process may use."""

import os
import platform
from pathlib import Path

# CPU flags that change which kernel is fastest, the best first.
_INSTRUCTIONS = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp")


def instruction_set() -> str:
    """The architecture and its best instructions for matrix products, as `x86_64 avx512f`."""
    flags = cpu_flags()
    best = next((flag for flag in _INSTRUCTIONS if flag in flags), None)
    return platform.machine() if best is None else f"{platform.machine()} {best}"


def cpu_flags() -> frozenset[str]:
    """The processor's features as Linux names them; empty on other systems."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in info.splitlines() if line.lower().startswith(("flags", "features")))
    return frozenset(next(lines, "").split())


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
