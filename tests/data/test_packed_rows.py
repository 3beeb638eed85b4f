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
