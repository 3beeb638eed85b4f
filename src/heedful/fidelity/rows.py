"""Masks of training rows."""

from dataclasses import dataclass

from heedful.data.rows import Rows
from heedful.fidelity.masking import Keep, mask_pair


@dataclass(frozen=True)
class MaskedPairs:
    """Rows of pairs with masks (`mask_pair`); it can be sent to another process."""

    keep: Keep

    def __call__(self, rows: Rows) -> Rows:
        """The rows with masks in their columns `src` and `tgt`."""
        pairs = [
            mask_pair(src, tgt, self.keep.patterns)
            for src, tgt in zip(rows["src"], rows["tgt"], strict=True)
        ]
        columns = {"src": [src for src, _ in pairs], "tgt": [tgt for _, tgt in pairs]}
        return Rows({**rows.columns, **columns}, rows.report, rows.file_names, rows.locations)
