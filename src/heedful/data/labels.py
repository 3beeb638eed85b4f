"""Labels of rows: their names in order, and their numbers."""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

import numpy as np
from jaxtyping import Int64

from heedful.data.headers import LABEL
from heedful.data.rows import Rows
from heedful.errors import UserError, format_names

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def label_names(labels: Iterable[str]) -> tuple[str, ...]:
    """The distinct labels: numbers first, by value, then others in alphabetical order.

    Raises:
        UserError: fewer than two labels.
    """
    names = sorted(set(labels), key=_rank)
    if len(names) < 2:
        raise UserError(
            f"every text has the label {names[0]!r}, so there is nothing to learn;"
            " give texts with at least two labels, or set label_field to another column"
        )
    return tuple(names)


def label_ids(rows: Rows, names: Sequence[str]) -> Int64[np.ndarray, " N"]:
    """(N,): the index of each row's label in `names`.

    Raises:
        UserError: a label that is not in `names` (with its line).
    """
    index_of = {name: index for index, name in enumerate(names)}
    for index, label in enumerate(rows[LABEL]):
        if label not in index_of:
            raise UserError(
                f"{rows.location(index)}: label {label!r} is not among those of the"
                f" training text ({format_names(names)}); correct it, or train on it too"
            )
    return np.array([index_of[label] for label in rows[LABEL]], dtype=np.int64)


def _rank(label: str) -> tuple[bool, Decimal, str]:
    is_number = _NUMBER.fullmatch(label) is not None
    return not is_number, Decimal(label) if is_number else Decimal(0), label
