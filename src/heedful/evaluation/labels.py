"""Scores of labels that texts were given: a table of errors, and what it says of each label."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64


def confusion(
    labels: Int64[np.ndarray, " N"], predictions: Int64[np.ndarray, " N"], num_labels: int
) -> Int64[np.ndarray, "C C"]:
    """How many texts of each label (row) were taken for each label (column)."""
    places = labels * num_labels + predictions
    return np.bincount(places, minlength=num_labels**2).reshape(num_labels, num_labels)


def label_scores(table: Int64[np.ndarray, "C C"]) -> dict[str, float]:
    """Of a `confusion`: the share that was named rightly, and the mean of all labels' F1.

    In the mean each label weighs alike, however rare. One that neither a text has nor any was taken
    for has no F1 and is left out.
    """
    f1, met = _of_labels(table)[2], table.sum(axis=0) + table.sum(axis=1) > 0
    return {"accuracy": float(table.trace() / table.sum()), "macro_f1": float(f1[met].mean())}


def per_label(
    table: Int64[np.ndarray, "C C"], labels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Of each label of a `confusion`: precision, recall and F1, and how many texts have it.

    Precision is the share of the texts taken for it that are of it, recall the share of its texts
    that were taken for it, F1 2 · right / (texts of it + texts taken for it); 0 of 0 is 0.
    """
    rows = np.stack(_of_labels(table), axis=1).tolist()
    return {
        name: dict(zip(("precision", "recall", "f1"), row, strict=True)) | {"num_texts": count}
        for name, row, count in zip(labels, rows, table.sum(axis=1).tolist(), strict=True)
    }


def _of_labels(table: Int64[np.ndarray, "C C"]) -> list[Float[np.ndarray, " C"]]:
    right, of_it, taken = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    parts = [(right, taken), (right, of_it), (2 * right, of_it + taken)]
    return [share / np.maximum(whole, 1) for share, whole in parts]
