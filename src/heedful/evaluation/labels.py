"""Metrics of classification: confusion matrix, accuracy, and scores of each label."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64


def confusion(
    labels: Int64[np.ndarray, " N"], predictions: Int64[np.ndarray, " N"], num_labels: int
) -> Int64[np.ndarray, "C C"]:
    """Confusion matrix: the number of texts by label (row) and prediction (column)."""
    cells = labels * num_labels + predictions
    return np.bincount(cells, minlength=num_labels**2).reshape(num_labels, num_labels)


def label_scores(table: Int64[np.ndarray, "C C"]) -> dict[str, float]:
    """Accuracy and macro-averaged F1 of a confusion matrix.

    Labels without texts and without predictions are left out of the average.
    """
    f1, occurs = _label_metrics(table)[2], table.sum(axis=0) + table.sum(axis=1) > 0
    return {"accuracy": float(table.trace() / table.sum()), "macro_f1": float(f1[occurs].mean())}


def per_label(
    table: Int64[np.ndarray, "C C"], labels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and number of texts of each label of a confusion matrix; 0/0 is 0."""
    rows = np.stack(_label_metrics(table), axis=1).tolist()
    return {
        name: dict(zip(("precision", "recall", "f1"), row, strict=True)) | {"num_texts": count}
        for name, row, count in zip(labels, rows, table.sum(axis=1).tolist(), strict=True)
    }


def _label_metrics(table: Int64[np.ndarray, "C C"]) -> list[Float[np.ndarray, " C"]]:
    """Precision, recall and F1 of each label."""
    correct, labeled, predicted = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    fractions = [(correct, predicted), (correct, labeled), (2 * correct, labeled + predicted)]
    return [numerator / np.maximum(denominator, 1) for numerator, denominator in fractions]
