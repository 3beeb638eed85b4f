"""Kernels of training steps on a CPU, which compute what torch needs many operations for.

They are compiled once for each processor, when a training begins, and are kept in the cache folder.
Without a C++ compiler, and for tensors of other types and devices, the callers of these functions
compute the same with torch.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.hardware import cpu_flags, cpu_information
from heedful.kernels.build import (
    HEADERS,
    NO_COMPILER,
    build_library,
    code_folder,
    has_cpp_compiler,
)
from heedful.progress import track

ELEMENT_TYPES = (torch.float32, torch.bfloat16)  # as `ElementType` of elements.h
_SOURCES = [HEADERS / f"{name}.cpp" for name in ("attention", "dropout", "loss", "random")]
PLAIN = (Tensor, torch.nn.Parameter)  # of no subclass, whose values may be elsewhere
_CTYPES = {"i": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
# The types of the parameters of each function.
_PARAMETERS = {
    "cross_entropy": "ippiidppi",
    "keep_mask": "iipii",
    "dropout": "ippdpii",
    "relu_dropped": "ippdpii",
    "relu_dropped_backward": "ippdpii",
    "add_dropped": "ipppdpii",
    "add_norm": "ipppdppdpppiii",
    "add_norm_backward": "ipppppdpppiii",
    "attention_forward": "p",
    "attention_backward": "p",
}
loaded: ctypes.CDLL | None = None  # by `load`
_failure = ""  # the reason why there is no library
_is_unused = False  # in the block of `unused`


def load() -> str:
    """Compile and load the kernels, once in a process.

    Returns the reason why that is not possible; "" if they are loaded.
    """
    global loaded, _failure  # noqa: PLW0603
    if loaded is None and not _failure:
        try:
            loaded = _open()
        except Exception as error:  # of compilers and linkers, of many types
            _failure = (str(error).strip() or type(error).__name__).splitlines()[0]
    return _failure


@contextmanager
def unused() -> Iterator[None]:
    """In the block torch computes everything."""
    global _is_unused  # noqa: PLW0603
    before, _is_unused = _is_unused, True
    try:
        yield
    finally:
        _is_unused = before


def are_used() -> bool:
    """Outside of `unused`, and no step is being compiled by torch."""
    return not _is_unused and not torch.compiler.is_compiling()


def can_run(*tensors: Tensor | None) -> bool:
    """The kernels are loaded and used, and take these tensors, which must be contiguous."""
    if loaded is None or not are_used():
        return False
    return all(
        x is None
        or (
            type(x) in PLAIN
            and x.device.type == "cpu"
            and x.dtype in ELEMENT_TYPES
            and x.is_contiguous()
        )
        for x in tensors
    )


def cross_entropy(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    label_smoothing: float,
    grad: Float[Tensor, "N V"] | None = None,
) -> Float[Tensor, "3"]:
    """The loss, the negative log-likelihood, and the number of targets with the highest logit.

    These sums are in float64. Raises IndexError for a target outside of 0 to V - 1.

    Args:
        grad: becomes d loss / d logits; it may be `logits`.
    """
    targets = targets.to("cpu", torch.int64).contiguous()
    sums = torch.empty(3, dtype=torch.float64)
    is_computed = call(
        "cross_entropy",
        *(element_type(logits), logits, targets, *logits.shape, label_smoothing),
        *(grad, sums),
    )
    if not is_computed:
        raise IndexError(f"a target is not one of the {logits.size(1)} classes of the logits")
    return sums


def opened() -> ctypes.CDLL:
    """The loaded kernels."""
    assert loaded is not None
    return loaded


def element_type(x: Tensor) -> int:
    """The number of a tensor's type for the kernels."""
    return ELEMENT_TYPES.index(x.dtype)


def call(name: str, *arguments: Any) -> Any:
    """Call a kernel with numbers, tensors by their addresses, and last the number of threads."""
    return getattr(opened(), f"heedful_{name}")(
        *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments), torch.get_num_threads()
    )


def _open() -> ctypes.CDLL:
    """The library in the cache folder, which is compiled if it is not there, or damaged."""
    path = code_folder("kernels") / f"training-{_key()}.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        _build(path)
        library = ctypes.CDLL(str(path))
    for name, types in _PARAMETERS.items():
        function = getattr(library, f"heedful_{name}")
        function.argtypes = [_CTYPES[letter] for letter in types]
        function.restype = ctypes.c_bool if name == "cross_entropy" else None
    return library


def _build(path: Path) -> None:
    """Compile the library under a temporary name, since several processes may do so at once."""
    if not has_cpp_compiler():
        raise RuntimeError(NO_COMPILER)
    with (
        track("compiling kernels for this processor", 1) as advance,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary,
    ):
        built = Path(temporary) / path.name
        build_library(_SOURCES, built)
        built.replace(path)
        advance(1)


def _key() -> str:
    """A hash of everything that the library depends on: sources, torch and the processor."""
    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=10)
    for file in (*_SOURCES, *sorted(HEADERS.glob("*.h")), HEADERS / "build.py"):
        digest.update(file.read_bytes())
    processor = [*sorted(cpu_flags()), *cpu_information("model name"), os.uname().machine]
    digest.update(" ".join(processor).encode())
    return digest.hexdigest()
