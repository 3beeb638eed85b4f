"""Encoding of rows as columns of ids (special tokens, lengths, counts), and their files."""

import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import tree
from heedful.data.columns import (
    Columns,
    ColumnsWriter,
    Sequences,
    open_columns,
    pack_ids,
    write_columns,
)
from heedful.data.encoding import Encoder, TextColumn, encode_rows, truncate_pair
from heedful.data.reports import Counts, DataReport
from heedful.data.row_files import read_rows
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError

# `<s>` is 1, `</s>` is 2, unknown is 3, and a to f are 4 to 9.
BARE = train_tokenizer(["a b c d e f"], kind="word", template="none")
BOTH = train_tokenizer(["a b c d e f"], kind="word", template="both")
BYTE = train_tokenizer([], kind="byte")
PAIR = {"src": TextColumn(BARE, ("src",), "target"), "tgt": TextColumn(BARE, ("tgt",), "target")}
TEXT = {"text": TextColumn(BOTH, ("text",))}
TWO = {"text": TextColumn(BOTH, ("text", "pair"))}


def ids_of(columns: Columns, name: str = "text") -> list[list[int]]:
    sequences = columns.sequences(name)
    return [sequences[i].tolist() for i in range(len(sequences))]


def test_targets_end_in_eos_and_unknown_words_are_counted() -> None:
    columns = encode_rows(Rows({"src": ["a b", "zz a"], "tgt": ["c", "d zz zz"]}), PAIR)
    assert ids_of(columns, "src") == [[4, 5, 2], [3, 4, 2]]
    assert ids_of(columns, "tgt") == [[6, 2], [7, 3, 3, 2]]
    assert columns.report.summary() == (
        "2 lines read, 2 pairs kept; unknown tokens: source 1 (25.00%), target 2 (50.00%)"
    )


def test_special_tokens_and_counts_of_documents() -> None:
    rows = Rows({"text": ["a b", "é zz\na", "c"]})
    ids = [[4, 5], [3, 3, 4], [6]]
    for kind, expected in (("none", ids), ("document", [[1, *text, 2] for text in ids])):
        columns = encode_rows(rows, {"text": TextColumn(BARE, ("text",), kind)})  # type: ignore[arg-type]
        assert ids_of(columns) == expected
        assert columns.report.counts["text"] == Counts(10, 11, tokens=6, unknown=2)
    assert ids_of(encode_rows(rows, TEXT)) == [[1, *text, 2] for text in ids]
    assert ids_of(encode_rows(rows, TEXT, drop_unknown=True)) == ids_of(encode_rows(rows, TEXT))
    unknown = Rows({"text": ["zz", "a zz", "yy zz"]})
    encoded = encode_rows(unknown, TEXT, drop_unknown=True)
    assert ids_of(encoded) == [[1, 4, 3, 2]]
    assert encoded.report.num_empty == 2
    with pytest.raises(UserError, match=r"none of 1 texts is left: 0 are .* and 1 hold only"):
        encode_rows(Rows({"text": ["zz"]}), TEXT, drop_unknown=True)
    with pytest.raises(UserError, match="the text has no tokens"):
        encode_rows(Rows({"text": [""]}), TEXT)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=9),
    kind=st.sampled_from(["none", "document"]),
)
@settings(max_examples=80, deadline=None)
def test_bytes_are_decoded_and_counted(texts: list[str], kind: Any) -> None:
    if not any(texts):
        return
    columns = encode_rows(Rows({"text": texts}), {"text": TextColumn(BYTE, ("text",), kind)})
    assert [BYTE.decode(ids) for ids in ids_of(columns)] == texts
    counts = columns.report.counts["text"]
    assert counts.tokens == counts.bytes == len("".join(texts).encode())
    assert counts.characters == len("".join(texts))


def test_over_long_pairs(tmp_path: Path) -> None:
    for name, text in (("x", "a\n\na b c\na b c d\ne\n"), ("y", "b\nx\na\na\na b c d e\n")):
        (tmp_path / name).write_text(text)
    rows = read_rows({"src": [tmp_path / "x"], "tgt": [tmp_path / "y"]})
    message = r"x and .*y, line 4: 5 src and 2 tgt tokens .with special .*max_length 4; raise"
    with pytest.raises(UserError, match=message):
        encode_rows(rows, PAIR, max_length=4, truncation="error")
    dropped = encode_rows(rows, PAIR, max_length=4)
    assert (len(dropped), dropped.report.num_kept, dropped.report.num_empty) == (2, 2, 1)
    assert "2 dropped as too long" in dropped.report.summary()
    cut = encode_rows(rows, PAIR, max_length=4, truncation="truncate")
    assert ids_of(cut, "src") == [[4, 2], [4, 5, 6, 2], [4, 5, 6, 2], [8, 2]]
    assert ids_of(cut, "tgt") == [[5, 2], [4, 2], [4, 2], [4, 5, 6, 2]]
    assert (cut.report.num_dropped, cut.report.num_truncated) == (0, 2)
    assert "2 truncated to the maximum length" in cut.report.summary()
    with pytest.raises(UserError, match="none of 1 pairs is left: 1 are longer than max_length 2"):
        encode_rows(Rows({"src": ["a b"], "tgt": ["a"]}), PAIR, max_length=2)
    with pytest.raises(UserError, match="max_length 1 leaves no tokens for text beside 1 special"):
        encode_rows(rows, PAIR, max_length=1)


def test_texts_with_labels(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a b c\t10\n\na\t9\na b c d e\t9\nb\t10\n")
    rows = read_rows([tmp_path / "t.tsv"], {"text": None, "label": None})
    columns = encode_rows(rows, TEXT, max_length=4, labels=["9", "10"])
    assert ids_of(columns) == [[1, 4, 2], [1, 5, 2]]
    assert columns.numbers("labels").tolist() == [0, 1]
    assert "text.second" not in columns
    cut = encode_rows(rows, TEXT, max_length=4, labels=["9", "10"], truncation="truncate")
    assert ids_of(cut) == [[1, 4, 5, 2], [1, 4, 2], [1, 4, 5, 2], [1, 5, 2]]
    assert cut.numbers("labels").tolist() == [1, 0, 0, 1]
    assert (cut.report.num_truncated, cut.report.counts["text"].tokens) == (2, 6)


def test_pairs_of_texts_are_truncated_before_special_tokens_are_added() -> None:
    rows = Rows({"text": ["a b c d", "a", "a b c"], "pair": ["e", "b c d e", "d e f"]})
    columns = encode_rows(rows, TWO, max_length=6, truncation="truncate")
    assert ids_of(columns) == [[1, 4, 5, 2, 8, 2], [1, 4, 2, 5, 6, 2], [1, 4, 5, 2, 7, 2]]
    assert columns.numbers("text.second").tolist() == [4, 3, 4]
    assert columns.report.num_truncated == 3
    with pytest.raises(UserError, match="no tokens for text beside 3 special tokens"):
        encode_rows(rows, TWO, max_length=4)


@given(first=st.integers(0, 20), second=st.integers(0, 20), room=st.integers(2, 39))
@settings(max_examples=300, deadline=None)
def test_the_longer_text_of_a_pair_is_truncated_token_by_token(
    first: int, second: int, room: int
) -> None:
    a, b = list(range(first)), list(range(second))
    if first + second <= room:
        return
    cut = truncate_pair(a.copy(), b.copy(), room)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    assert cut == (a, b)


@pytest.mark.parametrize("options", [{}, {"truncation": "truncate"}, {"drop_unknown": True}])
@pytest.mark.parametrize("size", [1, 3, 49])
def test_rows_encoded_in_parts_are_stored_as_rows_encoded_at_once(
    size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    texts = ["a " * (i % 7 + 1) if i % 5 else "zz" for i in range(50)]
    seconds = ["b " * (i % 2) + "c" * (i % 11 == 0) for i in range(50)]
    columns = {"text": texts, "pair": seconds, "label": [str(i % 3) for i in range(50)]}
    encoder = Encoder(TWO, max_length=9, labels=["0", "1", "2"], **options)
    whole = encoder(Rows(columns))
    assert 30 < len(whole) < 50 or options.get("truncation")
    write_columns(tmp_path / "whole", whole)
    writer = ColumnsWriter(tmp_path / "parts")
    writer.append(encoder(Rows({name: [] for name in columns})))  # all rows of a chunk held out
    for start in range(0, 50, size):
        part = {name: cells[start : start + size] for name, cells in columns.items()}
        writer.append(encoder(Rows(part)))
        if start % 2:
            writer.commit(start)
    assert writer.report is not None
    writer.complete(writer.report, whole.info)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


@given(
    sequences=st.lists(st.lists(st.integers(0, 69_999), max_size=9), min_size=1, max_size=9),
    wide=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_stored_columns_have_the_dtype_of_the_vocabulary(
    sequences: list[list[int]], wide: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    vocab_size = 70_000 if wide else 2**16
    sequences = [[i % vocab_size for i in ids] for ids in sequences]
    path, count = tmp_path_factory.mktemp("columns") / "train", len(sequences)
    report = DataReport(
        count + 2, count, 1, noun="pairs", empty={"src": 1}, counts={"x": Counts(1, 2)}
    )
    columns = {"x": pack_ids(sequences, vocab_size), "n": np.arange(count)}
    write_columns(path, Columns(columns, report, {"labels": ["今"]}))
    actual = open_columns(path)
    assert actual.sequences("x").ids.dtype == (np.uint32 if wide else np.uint16)
    assert ids_of(actual, "x") == sequences
    assert actual.sequences("x").lengths.tolist() == [len(ids) for ids in sequences]
    assert actual.sequences("x").lengths.dtype == np.int64
    assert actual.numbers("n").tolist() == list(range(count))
    assert (actual.report, actual.info, len(actual)) == (report, {"labels": ["今"]}, count)


def test_the_largest_id_of_each_dtype() -> None:
    for vocab_size in (2**16, 2**16 + 1, 2**32):
        assert pack_ids([[0, vocab_size - 1]], vocab_size)[0].tolist() == [0, vocab_size - 1]
    with pytest.raises(AssertionError):
        pack_ids([[10]], 10)
    whole = pack_ids([[1, 2], [], [3]], 10)
    assert (whole.ids.tolist(), whole.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    assert isinstance(whole, Sequences)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_a_joint_tokenizer_restores_pairs_of_two_scripts(kind: Any) -> None:
    words = {
        "src": ["the", "dog", "isn't", "naïve", "runs", "3.5"],
        "tgt": ["狗", "跑向", "房子"],
    }
    draw = random.Random(0)
    texts = {
        side: [" ".join(draw.choices(actual, k=draw.randint(1, 9))) for _ in range(60)]
        for side, actual in words.items()
    }
    joint = train_tokenizer(texts["src"] + texts["tgt"], kind=kind, vocab_size=60, or_fewer=True)
    columns = encode_rows(
        Rows(texts),
        {side: TextColumn(joint, (side,), "target") for side in texts},
        max_length=256,
        truncation="error",
    )
    assert len(columns) == 60
    for side, lines in texts.items():
        assert columns.report.counts[side].unknown == 0
        assert joint.decode_batch(ids_of(columns, side)) == list(map(joint.normalize, lines))


@settings(deadline=None)
@given(
    parts=st.lists(st.lists(st.lists(st.integers(0, 9))), min_size=1, max_size=5),
    vocab_size=st.sampled_from([10, 1 << 17]),
    data=st.data(),
)
def test_a_writer_that_is_killed_continues_at_its_last_commit(
    parts: list[list[list[int]]],
    vocab_size: int,
    data: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("columns")

    def columns_of(ids: list[list[int]]) -> Columns:
        numbers = np.array([sum(row) for row in ids], np.int64)
        columns = {"src": pack_ids(ids, vocab_size), "tgt": pack_ids(ids[::-1], vocab_size)}
        return Columns({**columns, "sum": numbers}, DataReport(len(ids), len(ids)))

    rows = [row for part in parts for row in part]
    backwards = [row for part in parts for row in part[::-1]]
    writer = ColumnsWriter(folder / "parts")
    while writer.position < len(parts):
        number = writer.position
        for part in parts[number : data.draw(st.integers(number, len(parts)), "killed at")]:
            writer.append(columns_of(part))
            number += 1
            if data.draw(st.booleans(), "commit"):
                writer.commit(number)
        if number == len(parts) and data.draw(st.booleans(), "end"):
            break
        writer.close()  # what is buffered reaches the files, without a commit
        writer = ColumnsWriter(folder / "parts")
        if not data.draw(st.booleans(), "again"):
            for part in parts[writer.position :]:
                writer.append(columns_of(part))
            break
    report = writer.report
    assert report is not None
    assert report == DataReport(len(rows), len(rows))
    writer.complete(report, {})
    stored = open_columns(folder / "parts")
    assert [ids.tolist() for ids in stored.sequences("src")] == rows
    assert [ids.tolist() for ids in stored.sequences("tgt")] == backwards
    assert stored.numbers("sum").tolist() == [sum(row) for row in rows]
    assert stored.sequences("src").offsets.dtype == np.int64
    assert {path.suffix for path in (folder / "parts").iterdir()} == {".bin", ".json"}
    for name, sequences in (("src", pack_ids(rows, vocab_size)), ("tgt", pack_ids(backwards, 10))):
        np.testing.assert_array_equal(stored.sequences(name).offsets, sequences.offsets)
    ids = (folder / "parts" / "src.ids.bin").read_bytes()
    assert ids == pack_ids(rows, vocab_size).ids.tobytes()


@pytest.mark.parametrize("truncation", ["drop", "truncate"])
@pytest.mark.parametrize("special_tokens", ["text", "target", "document", "none"])
def test_arrays_of_ids_give_the_columns_of_lists(
    special_tokens: Any, truncation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a b c", "", "xyz q", "b " * 9, "a", "</s>"]
    tokenizer = train_tokenizer(texts, kind="bpe", vocab_size=30, or_fewer=True)
    rows = Rows({"text": texts})
    columns = {"x": TextColumn(tokenizer, ("text",), special_tokens)}
    options: dict[str, Any] = {"max_length": 7, "truncation": truncation, "drop_unknown": True}
    assert {type(ids) for ids in columns["x"].encode_batch([texts])[0]} == {array}
    actual = encode_rows(rows, columns, **options)
    monkeypatch.setattr(Tokenizer, "encode_rows", Tokenizer.encode_batch)
    assert {type(ids) for ids in columns["x"].encode_batch([texts])[0]} == {list}
    expected = encode_rows(rows, columns, **options)
    assert actual.report == expected.report
    assert [ids.tolist() for ids in actual.sequences("x")] == [
        ids.tolist() for ids in expected.sequences("x")
    ]
    assert actual.sequences("x").ids.dtype == expected.sequences("x").ids.dtype
