"""Packed rows are the rows that were packed, whatever is selected of them."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.packed_rows import PackedRows
from heedful.data.rows import Rows

TEXT = st.text(st.sampled_from("ab\n\ud800é今😀"), max_size=5)


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
        unpacked = pickle.loads(pickle.dumps(packed)).unpack()
        assert [*zip(unpacked["src"], unpacked["tgt"], strict=True)] == rows
        assert len(packed) == len(unpacked) == len(rows)
        found = [unpacked.location(index) for index in range(len(rows))]
        assert found == [f"file, line {line}" for line in lines]
        chosen = [i for i in range(len(rows)) if data.draw(st.booleans())]
        packed, rows = packed.select(np.array(chosen, np.int64)), [rows[i] for i in chosen]
        lines = [lines[i] for i in chosen]


def test_rows_are_packed_anew_when_most_are_left_out() -> None:
    packed = PackedRows.pack(Rows({"text": ["x" * 1_000] * 10}))
    assert packed.select(np.arange(5)).texts["text"] is packed.texts["text"]
    assert len(packed.select(np.arange(4)).texts["text"]) == 4_000
    assert len(packed.select(np.arange(5)).select(np.arange(4)).texts["text"]) == 4_000
