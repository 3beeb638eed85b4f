"""What a translation must keep: placeholders, tags, addresses, numbers, accelerators, terms."""

from heedful.fidelity.accelerators import with_accelerator
from heedful.fidelity.glossary_files import GlossaryFile, NoTermsError, as_glossary
from heedful.fidelity.masking import (
    CHARACTERS,
    Keep,
    Masked,
    count_masks,
    has_mask_tokens,
    mask_id,
    mask_pair,
    place_masks,
    separate_masks,
    unmask,
)
from heedful.fidelity.pieces import differences
from heedful.fidelity.reasons import Reason
from heedful.fidelity.terms import Glossary, Term

__all__ = [
    "CHARACTERS",
    "Glossary",
    "GlossaryFile",
    "Keep",
    "Masked",
    "NoTermsError",
    "Reason",
    "Term",
    "as_glossary",
    "count_masks",
    "differences",
    "has_mask_tokens",
    "mask_id",
    "mask_pair",
    "place_masks",
    "separate_masks",
    "unmask",
    "with_accelerator",
]
