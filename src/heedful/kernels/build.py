"""C++ sources compiled for this processor by the compiler that Inductor finds.

The symbols of Inductor are private ones, each used in one function. A symbol that another version
of torch lacks is an error of this file alone: nets are then not compiled, and trainings have no
kernels.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from heedful.kernels.cache import use_own_inductor_cache

HEADERS = Path(__file__).parent  # of vectors and products

NO_COMPILER = "there is no C++ compiler: install one, for example by `apt install g++`"


def has_cpp_compiler() -> bool:
    """Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def build_library(sources: Sequence[Path], path: Path) -> None:
    """Compile C++ sources for this processor to a shared library with the file's name as soname."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    use_own_inductor_cache()
    flags = [f"-Wl,-soname,{path.name}", "-ffp-contract=fast", f"-I{HEADERS}"]
    options = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=flags)
    builder = CppBuilder(path.stem, [*map(str, sources)], options, str(path.parent))
    builder.build()
    target = Path(builder.get_target_file_path())
    if target != path:
        shutil.move(target, path)
