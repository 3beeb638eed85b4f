"""Split rows into training and held-out rows, and remove rows that are in both."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import floor

import numpy as np

from heedful.data.rows import CORPUS, Rows, Unit
from heedful.errors import UserError


def split_random(rows: Rows, size: int | float | None) -> tuple[Rows, Rows]:
    """Training rows and held-out rows, chosen at random by their indices with a fixed seed.

    Args:
        size: number of held-out rows, or below 1 their fraction of all rows, rounded down to at
            least one row; None: 1,000, or a tenth of the rows if that is fewer.

    Raises:
        UserError: there would be fewer training rows than held-out rows.
    """
    if size is None:
        size = min(1_000, max(1, len(rows) // 10))
    count = int(size) if size >= 1 else max(1, floor(len(rows) * Fraction(str(size))))
    if len(rows) < 2 * count:
        raise UserError(
            f"data.valid_size {size} of {len(rows)} {rows.report.noun} would leave too few to train"
            " on; lower it, or give data.valid"
        )
    out = np.zeros(len(rows), dtype=bool)
    out[np.random.default_rng(0).choice(len(rows), count, replace=False)] = True
    return rows.select(np.flatnonzero(~out)), rows.select(np.flatnonzero(out))


def drop_held_out(train: Rows, held_out: Iterable[Rows]) -> Rows:
    """The training rows without those that a held-out set contains too; the report counts these.

    Rows are equal if all of their columns are: both sides of a pair, text and label. Held-out rows
    are kept in memory as digests.

    Raises:
        UserError: no row is left.
    """
    known = {digest for rows in held_out for digest in _digests(rows)}
    is_new = np.fromiter((digest not in known for digest in _digests(train)), bool, len(train))
    num_kept = int(is_new.sum())
    if num_kept == len(train):
        return train
    if not num_kept:
        raise UserError(
            f"each of the {len(train)} {train.report.noun} of data.train is also in data.valid"
            " or data.test, so none is left to train on; give other held-out data"
        )
    remaining = train.select(np.flatnonzero(is_new))
    remaining.report = replace(train.report, num_kept=num_kept, num_held_out=len(train) - num_kept)
    return remaining


def _digests(rows: Rows) -> Iterator[bytes]:
    columns = [texts for name, texts in rows.columns.items() if name != CORPUS]
    for texts in zip(*columns, strict=True):
        yield hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).digest()


def split_tail(rows: Rows, size: int | float, unit: Unit) -> tuple[Rows, Rows]:
    """Training texts and held-out texts, which are the last ones.

    With a fraction f of n characters the first floor(n x (1 - f)) characters are for training, with
    f as a decimal number; tiny Shakespeare is split 90/10 like this by convention. A text across
    the border is cut if `unit` is "file"; otherwise it is assigned whole to the side with the
    larger part of it (training if they are equal).

    Args:
        size: number of held-out texts, or a fraction (float) of all CHARACTERS.

    Raises:
        UserError: one side would be empty.
    """
    texts = rows["text"]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    if isinstance(size, int):
        border = int(ends[max(len(texts) - size, 0)])
    else:
        border = floor(int(ends[-1]) * (1 - Fraction(str(size))))
    index = int(np.searchsorted(ends, border, side="right")) - 1  # the text of the border
    inside = border - int(ends[index])
    cut = inside > 0 and unit == "file"
    split = index + (cut or (inside > 0 and 2 * inside >= len(texts[index])))
    if not split or split - cut == len(texts):
        side = "hold out" if split else "train on"
        raise UserError(
            f"data.valid_size {size} of {len(texts)} texts leaves none to {side};"
            " change it, or give more text"
        )
    train = rows.select(np.arange(split))
    held_out = rows.select(np.arange(split - cut, len(texts)))
    if cut:  # the text is on both sides: the last of `train`, the first of `held_out`
        train["text"][-1] = texts[index][:inside]
        held_out["text"][0] = texts[index][inside:]
    return train, held_out
