"""Scores of labels: by hand, and as they are defined."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.evaluation.labels import confusion, label_scores, per_label


def test_the_table_of_errors() -> None:
    labels, predictions = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 2, 2, 2, 2])
    table = confusion(labels, predictions, 4)
    assert table.tolist() == [[2, 0, 1, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    scores = label_scores(table)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    # F1: 4/5, 0 and 4/6; the fourth label is neither there nor said.
    assert scores["macro_f1"] == pytest.approx((4 / 5 + 0 + 4 / 6) / 3)
    found = per_label(table, ["a", "b", "c", "d"])
    assert found["a"] == pytest.approx(
        {"precision": 1, "recall": 2 / 3, "f1": 4 / 5, "num_texts": 3}
    )
    assert found["c"] == pytest.approx({"precision": 0.5, "recall": 1, "f1": 4 / 6, "num_texts": 2})
    assert found["d"] == {"precision": 0, "recall": 0, "f1": 0, "num_texts": 0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_scores_are_as_defined(answers: list[tuple[int, int]]) -> None:
    labels, predictions = (np.array(side) for side in zip(*answers, strict=True))
    table = confusion(labels, predictions, 4)
    found = per_label(table, list("abcd"))
    f1 = []
    for label in {each for answer in answers for each in answer}:
        right = sum(answer == (label, label) for answer in answers)
        said, there = (sum(a[side] == label for a in answers) for side in (1, 0))
        precision, recall = right / said if said else 0.0, right / there if there else 0.0
        f1.append(2 * precision * recall / (precision + recall) if right else 0.0)
        expected = {"precision": precision, "recall": recall, "f1": f1[-1], "num_texts": there}
        assert found["abcd"[label]] == pytest.approx(expected)
    scores = label_scores(table)
    assert scores["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    assert scores["accuracy"] == pytest.approx(np.mean([a == b for a, b in answers]))
