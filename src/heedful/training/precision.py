"""The precision of training steps: autocast types, and the state of the fp16 loss scaler."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler

from heedful.errors import UserError

AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER = {"scale": "scaler.scale", "_growth_tracker": "scaler.growth_tracker"}


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision of steps on a device: fp32, bf16 or fp16.

    `auto` is bf16 if the device supports it natively, else fp16 on a GPU and fp32 elsewhere.

    Raises:
        UserError: a precision that is unknown or that the device does not support.
    """
    has_bf16 = has_native_bf16(device)
    if precision == "auto":
        without_bf16 = "fp16" if device.type == "cuda" else "fp32"
        return "bf16" if has_bf16 else without_bf16
    if precision == "bf16" and device.type == "cuda" and not has_bf16:
        raise UserError("this GPU does not support bf16; add training.precision=fp16 (or fp32)")
    if precision == "fp16" and device.type not in ("cuda", "cpu"):
        raise UserError(
            f"fp16 is supported on CUDA devices and the CPU, not on {device.type}; add "
            "training.precision=fp32"
        )
    if precision not in AUTOCAST:
        raise UserError(f"unknown precision {precision}; use auto, {', '.join(AUTOCAST)}")
    return precision


@cache
def has_native_bf16(device: torch.device) -> bool:
    """True if the device multiplies matrices in bf16 without emulation, which is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # The supported versions of torch have no public function for the CPU's instruction sets.
    flags = Path("/proc/cpuinfo")
    return device.type == "cpu" and flags.is_file() and "avx512_bf16" in flags.read_text()


def scaler_tensors(scaler: GradScaler) -> dict[str, Tensor]:
    """The loss scale and the steps since it last changed; empty for a disabled scaler."""
    state = scaler.state_dict()
    return {name: torch.tensor(state[key]) for key, name in _SCALER.items() if key in state}


def load_scaler_tensors(scaler: GradScaler, tensors: Mapping[str, Tensor]) -> None:
    """Restore the result of `scaler_tensors`; without such tensors the initial scale stays."""
    saved = {key: tensors[name].item() for key, name in _SCALER.items() if name in tensors}
    if saved:
        scaler.load_state_dict(scaler.state_dict() | saved)
