"""The processor of this machine: its instruction set and the cores that a process may use."""

import os
import platform
from pathlib import Path

# Instructions that change which kernel is fastest, the best first.
_INSTRUCTIONS = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimddp")


def instruction_set() -> str:
    """The processor's architecture and its best instructions for products: `x86_64 avx512f`."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    lines = (line for line in info.splitlines() if line.lower().startswith(("flags", "features")))
    flags = set(next(lines, "").split())
    best = next((each for each in _INSTRUCTIONS if each in flags), None)
    return platform.machine() if best is None else f"{platform.machine()} {best}"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
