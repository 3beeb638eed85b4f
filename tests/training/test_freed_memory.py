"""Memory that training keeps: pages of freed tensors, and settings of the user."""

import subprocess
import sys

import pytest

SCRIPT = """
import platform, resource
from heedful.training.freed_memory import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(8 * 2**20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = {keep}
new_pages()
pages = new_pages()
print(platform.libc_ver()[0] == "glibc", kept, pages)
"""


def run(keep: str, **environment: str) -> tuple[bool, str, int]:
    """Whether pages can be counted, the printed `keep`, and the pages of 32 MiB allocated again."""
    lines = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{keep}", keep)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), **environment},
    ).stdout
    counts, kept, pages = lines.split()
    return counts == "True", kept, int(pages)


def test_freed_memory_is_allocated_again_without_new_pages() -> None:
    counts, kept, pages = run("keep_freed_memory()")
    assert (kept == "True") == counts
    assert not counts or pages < 100
    assert not counts or run("None")[2] > 2_000  # which the setting prevents


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_limits_in_the_environment_are_not_changed(name: str) -> None:
    value = "glibc.malloc.perturb=0" if name == "GLIBC_TUNABLES" else "131072"
    assert run("keep_freed_memory()", **{name: value})[1] == "False"
