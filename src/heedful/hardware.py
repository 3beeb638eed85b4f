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


def has_fast_bf16_products() -> bool:
    """True if the processor multiplies matrices faster in bf16 than in fp32.

    AMX does, and so does AVX512_BF16 on AMD's processors. On Intel's it has half the rate of fp32
    products, which matters where a virtual machine hides AMX.
    """
    # The supported versions of torch have no public function for the CPU's instruction sets.
    flags = cpu_flags()
    return "amx_bf16" in flags or (
        "avx512_bf16" in flags and "AuthenticAMD" in cpu_information("vendor_id")
    )


def cpu_flags() -> frozenset[str]:
    """The processor's features as Linux names them; empty on other systems."""
    return frozenset(cpu_information("flags", "features"))


def cpu_information(*names: str) -> list[str]:
    """Words of the first line of /proc/cpuinfo with one of these names; none on other systems."""
    try:
        information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    lines = (line.partition(":") for line in information.splitlines())
    return next((text.split() for name, _, text in lines if name.strip().lower() in names), [])


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
