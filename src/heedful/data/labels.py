"""Labels of texts: their names in order, and their ids."""

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from jaxtyping import Int64

from heedful.data.report import listed
from heedful.data.rows import LABEL, Rows
from heedful.errors import UserError

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def label_names(rows: Rows) -> tuple[str, ...]:
    """The labels there are: those that are numbers first, by value, then the rest as text.

    Raises:
        UserError: there is one label only.
    """
    names = sorted(set(rows[LABEL]), key=_rank)
    if len(names) < 2:
        raise UserError(
            f"every text has the label {names[0]!r}, so there is nothing to learn;"
            " give texts of two labels at least, or name another field for the label"
        )
    return tuple(names)


def label_ids(rows: Rows, names: Sequence[str]) -> Int64[np.ndarray, " N"]:
    """The index of each row's label among `names`, those that were trained on.

    Raises:
        UserError: a label is none of them (with its line).
    """
    known = {name: number for number, name in enumerate(names)}
    for index, label in enumerate(rows[LABEL]):
        if label not in known:
            raise UserError(
                f"{rows.place(index)}: label {label!r} is not among those of the"
                f" training text ({listed(names)}); correct it, or train on it too"
            )
    return np.array([known[label] for label in rows[LABEL]], dtype=np.int64)


def _rank(label: str) -> tuple[bool, Decimal, str]:
    is_number = _NUMBER.fullmatch(label) is not None
    return not is_number, Decimal(label) if is_number else Decimal(0), label
