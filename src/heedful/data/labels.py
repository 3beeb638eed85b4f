"""Labels of rows: cells that hold them, names in order, and columns of numbers.

The label of a row is one class; with the problem `multi_label` any number of classes, separated by
commas; with `regression` one number, or several separated by commas.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from math import isfinite, nan
from typing import Literal, TypeAlias
from unicodedata import normalize

import numpy as np
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray

from heedful.data.columns import Column, Columns, Sequences, pack_ids, rows_of
from heedful.data.rows import LABEL, Rows
from heedful.errors import UserError, format_names

# The kind of the labels, as `problem_type` of transformers: one class of each row; any number of
# classes; one number or several.
ProblemType: TypeAlias = Literal["single_label", "multi_label", "regression"]

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
_LARGEST = float(np.finfo(np.float32).max)
LABELS = "labels"  # the column of ids; the outputs of a regression are `labels.0`, `labels.1`, …


class OtherLabel(str):
    """The text of a label that is no single class: a list, or a number that is not an integer."""


def label_text(value: object) -> str | None:
    """A label of JSON or of a table as text; None: it is none. Items of a list have no commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return OtherLabel(value)
    if isinstance(value, list):
        items = [label_text(item) for item in value]
        texts = [item for item in items if item is not None and "," not in item]
        return OtherLabel(",".join(texts)) if len(texts) == len(items) else None
    return value if isinstance(value, str) else None


def checked_labels(
    labels: Sequence[str], file: str, lines: NDArray[np.int64], problem: ProblemType
) -> list[str]:
    """Labels without spaces around them, in NFC; raises UserError for one that is not of the
    problem.

    Texts of one look are one class: some systems and keyboards write an accent as a character.

    Args:
        file, lines: where the labels are, for messages.
    """
    if problem == "single_label":
        for label, line in zip(labels, lines, strict=True):
            if isinstance(label, OtherLabel):
                raise UserError(
                    f"{file}, line {line}: the label {str(label)!r} is not a text; name another "
                    "field, or set objective.problem: multi_label for lists, regression for numbers"
                )
    stripped = [normalize("NFC", label.strip()) for label in labels]
    if problem != "multi_label" and "" in stripped:
        line = lines[stripped.index("")]
        raise UserError(f"{file}, line {line}: no label; add it, or drop the line")
    return stripped


def count_labels(rows: Rows, problem: ProblemType) -> Counter[str]:
    """The rows of each label; of a regression one for each number of an output, from 0.

    Raises:
        UserError: a wrong label (with its line).
    """
    if problem == "multi_label":
        return Counter(chain.from_iterable(_label_sets(rows)))
    if problem == "regression":
        size = max((len(values) for values in _values(rows)), default=0)
        return Counter(map(str, range(size)))
    return Counter(rows[LABEL])


def label_names(labels: Iterable[str], problem: ProblemType = "single_label") -> tuple[str, ...]:
    """The names of the logits, of the `count_labels` of all rows.

    Classes that are numbers come first, by value, then others in alphabetical order. The output of
    a regression is called `value`; several are `value_1`, `value_2` and so on.

    Raises:
        UserError: too few labels.
    """
    names = sorted(set(labels), key=_rank)
    if problem == "regression":
        return ("value",) if len(names) == 1 else tuple(f"value_{int(n) + 1}" for n in names)
    if problem == "multi_label" and not names:
        raise UserError(
            "no text has a label, so there is nothing to learn; set label_field to another column"
        )
    if problem == "single_label" and len(names) < 2:
        raise UserError(
            f"every text has the label {names[0]!r}, so there is nothing to learn;"
            " give texts with at least two labels, or set label_field to another column"
        )
    return tuple(names)


def values_text(values: Iterable[float]) -> str:
    """The outputs of a regression for one text, separated by tabs."""
    return "\t".join(f"{value:.6f}" for value in values)


def label_ids(rows: Rows, names: Sequence[str]) -> Int64[np.ndarray, " N"]:
    """(N,): the index of each row's label in `names`.

    Raises:
        UserError: a label that is not in `names` (with its line).
    """
    ids = _ids_of_sets(rows, ([label] for label in rows[LABEL]), names)
    return np.array([label for (label,) in ids], dtype=np.int64)


def label_columns(rows: Rows, names: Sequence[str], problem: ProblemType) -> dict[str, Column]:
    """The labels as columns: the ids of one class or of several a row, or the values of a
    regression in one column an output.

    Raises:
        UserError: a wrong label, or one that is not in `names` (with its line).
    """
    if problem == "single_label":
        return {LABELS: label_ids(rows, names)}
    if problem == "multi_label":
        return {LABELS: pack_ids(_ids_of_sets(rows, _label_sets(rows), names), len(names))}
    table = np.zeros((len(rows), len(names)))
    for index, values in enumerate(_values(rows)):
        if len(values) != len(names):
            raise UserError(
                f"{rows.location(index)}: {len(values)} numbers, where there must be "
                f"{len(names)}; give each text the same number of values"
            )
        table[index] = values
    return {f"{LABELS}.{output}": table[:, output] for output in range(len(names))}


def label_targets(
    columns: Columns, indices: NDArray[np.int64], names: Sequence[str], problem: ProblemType
) -> Int64[np.ndarray, " B"] | Bool[np.ndarray, "B C"] | Float32[np.ndarray, "B C"]:
    """The labels of some rows: (B,) classes; (B, C), the classes that are true; (B, C), values."""
    if problem == "single_label":
        return columns.numbers_of(LABELS, indices)
    if problem == "multi_label":
        sets = columns.sequences(LABELS).take(indices)
        targets = np.zeros((len(indices), len(names)), bool)
        targets[np.repeat(np.arange(len(indices)), sets.lengths), sets.ids] = True
        return targets
    rows = rows_of(indices)
    values = [columns.values(f"{LABELS}.{output}")[rows] for output in range(len(names))]
    return np.stack(values, 1).astype(np.float32)


def label_counts(columns: Columns, names: Sequence[str], problem: ProblemType) -> dict[str, int]:
    """The number of rows with each label; empty for a regression and for rows without labels."""
    if problem == "regression" or not names:
        return {}
    column = columns.columns[LABELS]
    ids = column.ids if isinstance(column, Sequences) else column
    return dict(zip(names, np.bincount(ids, minlength=len(names)).tolist(), strict=True))


def _label_sets(rows: Rows) -> Iterator[list[str]]:
    """The labels of each row."""
    for index, cell in enumerate(rows[LABEL]):
        labels = [label.strip() for label in cell.split(",")] if cell else []
        wrong = "a blank label" if "" in labels else "a label twice"
        if "" in labels or len({*labels}) < len(labels):
            raise UserError(
                f"{rows.location(index)}: {wrong} in {cell!r}; write the labels of a text once "
                "each, separated by commas, and nothing for none"
            )
        yield labels


def _values(rows: Rows) -> Iterator[list[float]]:
    """The numbers of each row."""
    for index, cell in enumerate(rows[LABEL]):
        values = [*map(_value, cell.split(","))]
        if not all(map(isfinite, values)):
            raise UserError(
                f"{rows.location(index)}: the label {cell!r} is no finite number; correct it, or "
                "set objective.problem to that of labels that are classes"
            )
        yield values


def _value(text: str) -> float:
    """A number; NaN for other text, and for one that is not finite in single precision."""
    try:
        value = nan if "_" in text else float(text)
    except ValueError:
        return nan
    return value if abs(value) <= _LARGEST else nan


def _ids_of_sets(
    rows: Rows, sets: Iterable[Sequence[str]], names: Sequence[str]
) -> list[list[int]]:
    """The indices in `names` of the labels of each row."""
    index_of = {normalize("NFC", name): index for index, name in enumerate(names)}
    index_of |= {name: index for index, name in enumerate(names)}
    ids = []
    for index, labels in enumerate(sets):
        for label in labels:
            if label not in index_of:
                raise UserError(
                    f"{rows.location(index)}: label {label!r} is not among those of the"
                    f" training text ({format_names(names)}); correct it, or train on it too"
                )
        ids.append([index_of[label] for label in labels])
    return ids


def _rank(label: str) -> tuple[bool, Decimal, str]:
    is_number = _NUMBER.fullmatch(label) is not None
    return not is_number, Decimal(label) if is_number else Decimal(0), label
