"""The fused kernels that torch may use for an attention on a GPU."""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends import cuda

# Up to this number of keys the kernel of xFormers takes half to two thirds of the time of those of
# cuDNN and FlashAttention, of which torch prefers one (measured on an H200).
_SHORT = 64


def fused_kernels(key: Float[Tensor, "B G K E"]) -> AbstractContextManager[None]:
    """A context for an attention with these keys, which selects a kernel for short sequences.

    Outside of compiled steps the choice of a user (`torch.nn.attention.sdpa_kernel`) stays.
    """
    if key.device.type != "cuda" or key.size(2) > _SHORT:
        return nullcontext()
    if not torch.compiler.is_compiling() and not _are_all_enabled():
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _are_all_enabled() -> bool:
    """Torch may use any of its kernels, as by default."""
    return (
        cuda.cudnn_sdp_enabled()
        and cuda.flash_sdp_enabled()
        and cuda.mem_efficient_sdp_enabled()
        and cuda.math_sdp_enabled()
    )
