"""Vectors of each width that the processor has compute what loops over single numbers do."""

import platform
import subprocess
from pathlib import Path

import pytest

from heedful.hardware import cpu_flags
from heedful.kernels.build import HEADERS, has_cpp_compiler

HEADER_FOLDERS = [HEADERS, HEADERS.parent / "backends" / "aot"]
SOURCE = Path(__file__).with_name("widths.cpp")
# Lanes by the processor's flag that they need, and the option that leaves wider ones out.
WIDTHS = {
    4: ("sse2", "-mno-avx"),
    8: ("avx", "-mno-avx512f"),
    16: ("avx512f", "-mavx512f"),
}


@pytest.mark.parametrize("lanes", WIDTHS)
def test_functions_of_vectors_agree_with_loops(lanes: int, tmp_path: Path) -> None:
    flag, option = WIDTHS[lanes]
    if not has_cpp_compiler():
        pytest.skip("there is no C++ compiler")
    if platform.machine() != "x86_64" or flag not in cpu_flags():
        pytest.skip("this processor has no such vectors")
    from torch._inductor.cpp_builder import get_cpp_compiler

    program = tmp_path / "widths"
    options = ["-std=c++20", "-O1", "-march=native", option, "-ffp-contract=fast"]
    options += [f"-I{folder}" for folder in HEADER_FOLDERS]
    subprocess.run([get_cpp_compiler(), *options, str(SOURCE), "-o", str(program)], check=True)
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert found == f"{lanes} agrees\n"
