"""The kernels that torch may use for an attention on a GPU, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from heedful.parts.attend_fused import fused_kernels


def enabled() -> tuple[bool, ...]:
    return (
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


@pytest.mark.parametrize(("device", "keys"), [("cuda", 64), ("cuda", 65), ("cpu", 8)])
def test_short_sequences_on_a_gpu_use_one_kernel(device: str, keys: int) -> None:
    before = enabled()
    with FakeTensorMode():
        key = torch.empty(1, 2, keys, 4, device=device)
    is_short = (device, keys) == ("cuda", 64)
    with fused_kernels(key):
        assert enabled() == ((False, False, True, True) if is_short else before)
    assert enabled() == before


def test_the_choice_of_a_user_stays() -> None:
    with FakeTensorMode():
        key = torch.empty(1, 2, 3, 4, device="cuda")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        before = enabled()
        with fused_kernels(key):
            assert enabled() == before
