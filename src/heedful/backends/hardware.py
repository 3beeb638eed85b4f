"""The processor of this machine: its instruction set and the cores that a process may use."""

import os
import platform
from pathlib import Path

# CPU flags that change which kernel is fastest, the best first.
_INSTRUCTIONS = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp")


def instruction_set() -> str:
    """The architecture and its best instructions for matrix products, as `x86_64 avx512f`."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    lines = (line for line in info.splitlines() if line.lower().startswith(("flags", "features")))
    flags = set(next(lines, "").split())
    best = next((flag for flag in _INSTRUCTIONS if flag in flags), None)
    return platform.machine() if best is None else f"{platform.machine()} {best}"


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
