"""The loss of token logits on a GPU, by one kernel in Triton.

Torch needs about fifteen operations for a chunk of logits, most of which read and write all of it
in fp32. This kernel reads the logits twice and writes their gradient once, in their own type (as in
Hsu et al. 2024, Liger kernel). Triton is a part of torch's builds for CUDA.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.kernels.library import PLAIN, are_used

ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK, _WARPS = 1024, 8  # logits that a program reads at once, and its warps


@cache
def _is_usable() -> bool:
    """True if Triton is installed and compiles the kernel; the reason is logged if it does not.

    Triton needs a C compiler and Python's header files, which images for deployment may lack.
    """
    if find_spec("triton") is None:
        return False
    try:
        logits = torch.zeros(1, 2, device="cuda")
        targets = torch.zeros(1, device="cuda", dtype=torch.int64)
        _run(logits, targets, 0.0, None, torch.empty(3, 1, device="cuda"), 2, None)
    except Exception as error:  # of compilers and drivers, of many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logging.getLogger("heedful").warning(
            f"note: the loss runs without its kernel for GPUs, which is slower: {reason}; install "
            "a C compiler and Python's header files (gcc, python3-dev)"
        )
        return False
    return True


def are_supported(dtype: torch.dtype) -> bool:
    """The kernel is used, for logits of this type on a GPU."""
    return are_used() and dtype in ELEMENT_TYPES and _is_usable()


def can_run(logits: Float[Tensor, "N V"]) -> bool:
    """The kernel takes these logits."""
    is_plain = type(logits) in PLAIN and logits.device.type == "cuda"
    return is_plain and are_supported(logits.dtype)


def cross_entropy(
    logits: Float[Tensor, "N W"],
    targets: Int[Tensor, "N"],
    label_smoothing: float,
    grad: bool,
    vocab: int,
    factor: Float[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, "3"], Float[Tensor, "N W"] | None]:
    """Sums in float64, and d loss / d logits in the type of the logits; does not synchronize.

    The sums are the loss, the negative log-likelihood and the number of targets with the highest
    logit. The loss is NaN for a target outside of 0 to V - 1.

    Args:
        logits: (N, W); those after the first V of a row are left out, and have the
            gradient 0. Logits that are not on a GPU have results without values, with which memory
            is planned.
        vocab: V.
        factor: of the gradient, in fp32; None: 1.
    """
    logits, num_rows = logits.contiguous(), len(logits)
    logits_grad = torch.empty_like(logits) if grad else None
    rows = torch.empty(3, num_rows, device=logits.device, dtype=torch.float32)
    if logits.device.type == "cuda" and num_rows:
        _run(logits, targets.contiguous(), label_smoothing, logits_grad, rows, vocab, factor)
    return rows.sum(1, dtype=torch.float64), logits_grad


def _run(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    logits_grad: Tensor | None,
    rows: Tensor,
    vocab: int,
    factor: Tensor | None,
) -> None:
    from heedful.kernels.loss_triton import cross_entropy_kernel

    kernel: Any = cross_entropy_kernel
    with torch.cuda.device(logits.device):
        kernel[(len(logits),)](
            *(logits, targets, logits if logits_grad is None else logits_grad, rows),
            rows if factor is None else factor,
            *(len(logits), vocab, logits.size(1), label_smoothing),
            needs_grad=logits_grad is not None,
            has_factor=factor is not None,
            block=_BLOCK,
            num_warps=_WARPS,
        )
