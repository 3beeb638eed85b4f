"""The sample has the rows with the smallest keys that its limits allow, in their order."""

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.data import row_samples
from heedful.data.row_samples import PackedRows, RowSample, SampledRows
from heedful.data.rows import Rows

TEXT = st.text(st.sampled_from("ab\n\ud800é今😀"), max_size=9)


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
    monkeypatch.setattr(row_samples, "SAMPLE_CHARACTERS", limits[1])
    monkeypatch.setattr(row_samples, "_SLACK", slack)
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
        part = SampledRows.choose(rows, keys[lines - 1], sizes, threshold)
        assert (np.diff(part.keys) > 0).all()
        sample.add(part)
    sample._cut()
    num_held = sum(map(len, sample._rows))
    rows, indices = sample.rows(starts)
    assert indices.tolist() == expected(texts, keys.tolist(), *limits)
    assert rows["text"] == [texts[i] for i in indices.tolist()]
    assert [rows.location(i) for i in range(len(rows))] == [f"file, line {i + 1}" for i in indices]
    assert num_held <= 2 * len(indices)  # the others do not stay in memory


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
    monkeypatch.setattr(row_samples, "SAMPLE_CHARACTERS", 3)
    sample = RowSample(None)
    for first in (0, 5):
        rows = Rows({"text": [f"text {first + i}" for i in range(5)]})
        keys = np.random.default_rng(first).random(5)
        sample.add(SampledRows.choose(rows, keys, np.full(5, 6), sample.threshold))
    rows, indices = sample.rows([0, 5])
    assert indices.tolist() == [*range(10)]
    assert rows["text"] == [f"text {i}" for i in range(10)]


def test_rows_that_are_left_out_later_keep_the_indices_of_the_rest() -> None:
    keys = np.array([0.5, 0.1, 0.9, 0.2])
    rows = Rows({"text": ["a", "b", "c", "d"]})
    part = SampledRows.choose(rows, keys, np.ones(4, np.int64), 0.8)
    assert part.rows.unpack(np.arange(3))["text"] == ["b", "d", "a"]
    part = part.select(np.array([1, 2]))
    assert part.rows.unpack(np.arange(2))["text"] == ["d", "a"]
    assert part.indices.tolist() == [3, 0]


@given(
    rows=st.lists(st.tuples(TEXT, TEXT), max_size=20),
    data=st.data(),
)
def test_packed_rows_are_those_that_were_packed(
    rows: list[tuple[str, str]], data: st.DataObject
) -> None:
    columns = {"src": [a for a, _ in rows], "tgt": [b for _, b in rows]}
    lines = [*range(7, 7 + len(rows))]
    locations = np.array([[0] * len(rows), lines], np.int64)
    packed = PackedRows.pack(Rows(columns, None, ("file",), locations))
    for _ in range(4):
        unpacked = pickle.loads(pickle.dumps(packed)).unpack(np.arange(len(rows)))
        assert [*zip(unpacked["src"], unpacked["tgt"], strict=True)] == rows
        assert len(packed) == len(unpacked) == len(rows)
        found = [unpacked.location(index) for index in range(len(rows))]
        assert found == [f"file, line {line}" for line in lines]
        order = data.draw(st.permutations(range(len(rows))))
        chosen = order[: data.draw(st.integers(0, len(rows)))]
        packed, rows = packed.select(np.array(chosen, np.int64)), [rows[i] for i in chosen]
        lines = [lines[i] for i in chosen]
        count = data.draw(st.integers(0, len(rows)))
        packed, rows, lines = packed.first(count), rows[:count], lines[:count]
        assert sum(map(len, packed.texts.values())) == size_of(rows)


def size_of(rows: list[tuple[str, str]]) -> int:
    """The bytes of the texts of rows."""
    return sum(len(text.encode("utf-8", "surrogatepass")) for row in rows for text in row)
