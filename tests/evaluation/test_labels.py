"""Metrics of classification, against their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.evaluation.labels import confusion, label_scores, per_label


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_scores_are_as_defined(answers: list[tuple[int, int]]) -> None:
    labels, predictions = (np.array(side) for side in zip(*answers, strict=True))
    table = confusion(labels, predictions, 4)
    actual = per_label(table, list("abcd"))
    f1 = []
    for label in range(4):
        right = sum(answer == (label, label) for answer in answers)
        predicted, labeled = (sum(a[side] == label for a in answers) for side in (1, 0))
        precision, recall = (
            right / predicted if predicted else 0.0,
            right / labeled if labeled else 0.0,
        )
        both = 2 * precision * recall / (precision + recall) if right else 0.0
        if predicted or labeled:
            f1.append(both)
        expected = {"precision": precision, "recall": recall, "f1": both, "num_texts": labeled}
        assert actual["abcd"[label]] == pytest.approx(expected)
    scores = label_scores(table)
    assert scores["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    assert scores["accuracy"] == pytest.approx(np.mean([a == b for a, b in answers]))
