"""The instruction set that CTranslate2 uses on x86 processors."""

import os

from heedful.backends.hardware import cpu_flags


def select_instructions() -> None:
    """Let CTranslate2 use AVX-512 on processors with VNNI, unless the environment names others.

    Its default is AVX2, since early processors with AVX-512 lower their frequency for it; those
    with VNNI are later. It reads the variable when the first model is opened.
    """
    if "avx512_vnni" in cpu_flags():
        os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
