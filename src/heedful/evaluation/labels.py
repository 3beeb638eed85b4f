"""Metrics of classifiers: of one class a text, of several, and of values (regression)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64, Shaped

from heedful.data.labels import ProblemType, values_text

_Counts = tuple[Int64[np.ndarray, " C"], Int64[np.ndarray, " C"], Int64[np.ndarray, " C"]]


def score_answers(
    targets: Shaped[np.ndarray, "N ..."],
    answers: Shaped[np.ndarray, "N ..."],
    names: Sequence[str],
    problem: ProblemType,
) -> tuple[dict[str, float], dict[str, Any]]:
    """The scores of a classifier's answers, and tables of them by name.

    Args:
        targets: (N,) ids; (N, C), the labels that are true; (N, C), values.
        answers: the same of the classifier.
        names: of the labels.
    """
    if problem == "regression":
        return regression_scores(targets, answers), {}
    tables: dict[str, Any] = {"labels": list(names)}
    if problem == "multi_label":
        table = per_label_of_sets(targets, answers, names)
        return multi_label_scores(targets, answers), tables | {"per_label": table}
    matrix = confusion(targets, answers, len(names))
    tables |= {"confusion": matrix.tolist(), "per_label": per_label(matrix, names)}
    return label_scores(matrix), tables


def answer_texts(
    answers: Shaped[np.ndarray, "N ..."],
    names: Sequence[str],
    problem: ProblemType,
) -> list[str]:
    """Answers as text: the name of a label, those of several separated by commas, or values
    separated by tabs."""
    if problem == "regression":
        return [values_text(row) for row in answers.tolist()]
    if problem == "multi_label":
        rows = answers.tolist()
        return [
            ",".join(n for n, is_true in zip(names, row, strict=True) if is_true) for row in rows
        ]
    return [names[label] for label in answers.tolist()]


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
    scores = {"accuracy": float(table.trace() / table.sum())}
    return scores | {"macro_f1": _macro_f1(_counts_of_table(table))}


def per_label(
    table: Int64[np.ndarray, "C C"], labels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and number of texts of each label of a confusion matrix; 0/0 is 0."""
    return _per_label(_counts_of_table(table), labels)


def multi_label_scores(
    labels: Bool[np.ndarray, "N C"], predictions: Bool[np.ndarray, "N C"]
) -> dict[str, float]:
    """Micro- and macro-averaged F1, and the share of texts all of whose labels are right.

    Labels without texts and without predictions are left out of the macro average; a micro F1
    without any is 0.
    """
    counts = _counts_of_sets(labels, predictions)
    correct, labeled, predicted = (int(count.sum()) for count in counts)
    return {
        "micro_f1": 2 * correct / max(labeled + predicted, 1),
        "macro_f1": _macro_f1(counts),
        "exact_match": float((labels == predictions).all(1).mean()),
    }


def per_label_of_sets(
    labels: Bool[np.ndarray, "N C"], predictions: Bool[np.ndarray, "N C"], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """`per_label` of texts with any number of labels."""
    return _per_label(_counts_of_sets(labels, predictions), names)


def regression_scores(
    targets: Float[np.ndarray, "N C"], values: Float[np.ndarray, "N C"]
) -> dict[str, float]:
    """Pearson's and Spearman's correlation, mean squared and mean absolute error.

    All are means over the outputs. A correlation with a constant is taken as 0.
    """
    targets, values = targets.astype(np.float64), values.astype(np.float64)
    errors = values - targets

    def mean(correlation: Callable[..., float]) -> float:
        return float(np.mean([*map(correlation, targets.T, values.T)]))

    return {
        "pearson": mean(_pearson),
        "spearman": mean(lambda x, y: _pearson(_ranks(x), _ranks(y))),
        "mean_squared_error": float(np.mean(errors**2)),
        "mean_absolute_error": float(np.mean(np.abs(errors))),
    }


def _counts_of_table(table: Int64[np.ndarray, "C C"]) -> _Counts:
    """The correct, labeled and predicted texts of each label."""
    return table.diagonal(), table.sum(axis=1), table.sum(axis=0)


def _counts_of_sets(
    labels: Bool[np.ndarray, "N C"], predictions: Bool[np.ndarray, "N C"]
) -> _Counts:
    """The correct, labeled and predicted texts of each label."""
    return (labels & predictions).sum(0), labels.sum(0), predictions.sum(0)


def _macro_f1(counts: _Counts) -> float:
    """The mean F1 of the labels that texts or predictions have; 0 if there are none."""
    occurs = counts[1] + counts[2] > 0
    return float(_label_metrics(counts)[2][occurs].mean()) if occurs.any() else 0.0


def _per_label(counts: _Counts, names: Sequence[str]) -> dict[str, dict[str, float]]:
    rows = np.stack(_label_metrics(counts), axis=1).tolist()
    return {
        name: dict(zip(("precision", "recall", "f1"), row, strict=True)) | {"num_texts": count}
        for name, row, count in zip(names, rows, counts[1].tolist(), strict=True)
    }


def _label_metrics(counts: _Counts) -> list[Float[np.ndarray, " C"]]:
    """Precision, recall and F1 of each label."""
    correct, labeled, predicted = counts
    fractions = [(correct, predicted), (correct, labeled), (2 * correct, labeled + predicted)]
    return [numerator / np.maximum(denominator, 1) for numerator, denominator in fractions]


def _pearson(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """The correlation of two columns; 0 if one is constant."""
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _ranks(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The rank of each value, from 1; equal values have the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]
