"""Memory that training frees in each step and needs again in the next."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt (malloc.h)
_KEPT = 2**30  # bytes of free memory at the end of the heap that are not given back
_MALLOC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_LARGEST_ON_HEAP = 2**25  # bytes; glibc's limit: larger blocks are always mapped and unmapped


def keep_freed_memory() -> bool:
    """Let malloc keep up to 1 GiB of freed memory instead of giving it back after each use.

    Each step allocates and frees the same tensors. By default glibc unmaps large ones and trims its
    heap, and the next step waits for the kernel to map and clear every page again, which is over a
    tenth of a small model's step on a CPU (docs/log.md). The peak of memory stays the same.

    Without effect, and False, for another C library, or if the user set these limits in the
    environment (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`).
    """
    if any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError, OSError):  # musl and macOS; Windows
        return False
    set_both = [
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP),
        mallopt(_M_TRIM_THRESHOLD, _KEPT),
    ]
    return all(set_both)
