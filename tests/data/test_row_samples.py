"""The sample has the rows with the smallest keys that its limits allow, in their order."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.data import scan
from heedful.data.rows import Rows
from heedful.data.scan import RowSample, SampledRows

TEXT = st.text(st.sampled_from("ab\n\ud800é今😀"), max_size=9)


def sampled(rows: Rows, keys: np.ndarray, sizes: np.ndarray, threshold: float) -> SampledRows:
    """The rows of a chunk with keys below a threshold."""
    return SampledRows(keys, sizes, np.arange(len(rows)), rows).select(keys < threshold)


@given(
    chunks=st.lists(st.lists(TEXT, max_size=9), min_size=1, max_size=9),
    limits=st.tuples(st.integers(0, 30), st.integers(0, 90)),
    slack=st.sampled_from([1.0, 1.25, 9.0]),
    lag=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_sample_has_the_rows_with_the_smallest_keys(
    chunks: list[list[str]],
    limits: tuple[int, int],
    slack: float,
    lag: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "SAMPLE_CHARACTERS", limits[1])
    monkeypatch.setattr(scan, "_SLACK", slack)
    texts = [text for chunk in chunks for text in chunk]
    keys = np.random.default_rng(seed).random(len(texts))
    starts = np.cumsum([0, *map(len, chunks)]).tolist()
    sample, thresholds = RowSample(limits[0]), list[float]()
    for start, chunk in zip(starts, chunks, strict=False):
        thresholds.append(sample.threshold)
        lines = np.arange(start, start + len(chunk)) + 1
        rows = Rows({"text": chunk}, None, ("file",), np.stack([np.zeros_like(lines), lines]))
        sizes = np.array([*map(len, chunk)], np.int64)
        threshold = thresholds[max(0, len(thresholds) - 1 - lag)]  # as of chunks sent earlier
        sample.add(sampled(rows, keys[lines - 1], sizes, threshold))
    rows, indices = sample.rows(starts)
    assert indices.tolist() == expected(texts, keys.tolist(), *limits)
    assert rows["text"] == [texts[i] for i in indices.tolist()]
    assert [rows.location(i) for i in range(len(rows))] == [f"file, line {i + 1}" for i in indices]


def expected(texts: list[str], keys: list[float], most: int, characters: int) -> list[int]:
    """The sampled rows, one by one; at least one row, unless `most` is 0."""
    chosen, size = list[int](), 0
    for index in sorted(range(len(texts)), key=keys.__getitem__)[:most]:
        size += len(texts[index])
        if size > characters and chosen:
            break
        chosen.append(index)
    return sorted(chosen)


def test_a_sample_without_limits_has_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows are read like training rows, however many they are."""
    monkeypatch.setattr(scan, "SAMPLE_CHARACTERS", 3)
    sample = RowSample(None)
    for first in (0, 5):
        rows = Rows({"text": [f"text {first + i}" for i in range(5)]})
        keys = np.random.default_rng(first).random(5)
        sample.add(sampled(rows, keys, np.full(5, 6), sample.threshold))
    rows, indices = sample.rows([0, 5])
    assert indices.tolist() == [*range(10)]
    assert rows["text"] == [f"text {i}" for i in range(10)]


def test_rows_that_are_left_out_later_keep_the_indices_of_the_rest() -> None:
    keys = np.array([0.5, 0.1, 0.9, 0.2])
    rows = Rows({"text": ["a", "b", "c", "d"]})
    part = sampled(rows, keys, np.ones(4, np.int64), 0.8)
    assert part.rows["text"] == ["a", "b", "d"]
    part = part.filtered(np.array([False, True, True, True]))
    assert part.rows["text"] == ["b", "d"]
    assert part.indices.tolist() == [0, 2]
