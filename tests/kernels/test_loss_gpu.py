"""A kernel for GPUs that cannot be compiled is left out, with one line."""

import logging
from collections.abc import Iterator

import pytest
import torch

from heedful.kernels import library, loss_gpu


@pytest.fixture(autouse=True)
def _no_cached_answer() -> Iterator[None]:
    is_usable = loss_gpu._is_usable
    is_usable.cache_clear()
    yield
    is_usable.cache_clear()


def test_a_kernel_that_cannot_be_compiled_is_left_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    def made(*size: int, **keys: object) -> torch.Tensor:
        return torch.ones(size)  # on no device

    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, made)
    monkeypatch.setattr(loss_gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(loss_gpu, "_run", fails)
    with caplog.at_level(logging.WARNING, "heedful"):
        assert not loss_gpu.are_supported(torch.bfloat16)
        assert not loss_gpu.are_supported(torch.float32)  # and is not tried again
    [record] = caplog.records
    message = record.getMessage()
    assert "Failed to find C compiler.; install a C compiler" in message
    assert "\n" not in message


def test_the_kernel_is_used_for_types_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_gpu, "_is_usable", lambda: True)
    assert loss_gpu.are_supported(torch.float16)
    assert not loss_gpu.are_supported(torch.float64)
    with library.unused():
        assert not loss_gpu.are_supported(torch.float16)
