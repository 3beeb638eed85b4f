"""What a translation must keep: placeholders, tags, addresses, numbers, accelerators."""

from heedful.fidelity.accelerators import with_accelerator
from heedful.fidelity.masking import (
    CHARACTERS,
    Keep,
    Masked,
    count_masks,
    has_mask_tokens,
    mask_id,
    mask_pair,
    mask_text,
    place_masks,
    separate_masks,
    unmask,
)
from heedful.fidelity.pieces import differences

__all__ = [
    "CHARACTERS",
    "Keep",
    "Masked",
    "count_masks",
    "differences",
    "has_mask_tokens",
    "mask_id",
    "mask_pair",
    "mask_text",
    "place_masks",
    "separate_masks",
    "unmask",
    "with_accelerator",
]
