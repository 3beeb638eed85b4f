"""What the C++ compiler has made of Inductor's sources, kept from one run of the tests to the next.

The key is that of ccache: the preprocessed text and the command, without the folders of torch and
heedful and the name of the source, a hash of them too: so that clones share what is kept.
Processors and versions of torch are in the key of heedful's own kernels.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import heedful
from heedful.kernels import library


@contextmanager
def kept_objects() -> Iterator[None]:
    """In the block `CppBuilder` takes what it has made of an equal source before."""
    from torch._inductor.cpp_builder import CppBuilder

    compile_anew = CppBuilder.build
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "objects"
    folder.mkdir(parents=True, exist_ok=True)

    def build(self: Any) -> None:
        target = Path(self.get_target_file_path())
        words = [word for word in shlex.split(self.get_command_line()) if word != str(target)]
        sources = [word for word in words if word.endswith(".cpp")]
        if not sources:  # it links or assembles
            compile_anew(self)
            return
        flags = [word for word in words if word not in (*sources, "-c", "-o")]
        done = subprocess.run([*flags, "-E", "-P", *sources], capture_output=True, check=True)
        text = b"\0".join([done.stdout, *map(os.fsencode, [library._key(), *flags])])
        for place in (*sources, *(str(Path(each.__file__).parent) for each in (torch, heedful))):
            text = text.replace(os.fsencode(place), b"")
        kept = folder / hashlib.sha256(text).hexdigest()
        if not kept.exists():
            compile_anew(self)
            shutil.copy(target, part := folder / f"{os.getpid()}.part")
            part.replace(kept)
        shutil.copy(kept, target)

    with patch.object(CppBuilder, "build", build):
        yield
