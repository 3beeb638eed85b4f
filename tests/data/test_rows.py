"""Rows: all formats yield the same rows, and errors in files name the line."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import zipfile
from fractions import Fraction
from itertools import accumulate
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heedful.cli import lines as cli_lines
from heedful.config import parse_recipe
from heedful.data import text_files
from heedful.data.labels import label_ids, label_names
from heedful.data.row_files import JoinedRows, format_of, open_rows, read_rows
from heedful.data.rows import Rows, collect, hash_cells
from heedful.data.splits import (
    KnownRows,
    Split,
    normalized,
    source_columns,
    split_by_source,
    split_tail,
)
from heedful.data.text_files import BlockPlace, read_lines
from heedful.errors import UserError
from heedful.tasks.corpora import split_files
from heedful.tasks.translation import open_pairs

PAIR: dict[str, Any] = {"src": None, "tgt": None}
LABELED: dict[str, Any] = {"text": None, "label": None}


def file_of(directory: Path, name: str, content: str | bytes) -> Path:
    path = directory / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, 1) if name.lower().endswith(".gz") else data)
    return path


def locations(rows: Rows) -> list[str]:
    return [rows.location(index) for index in range(len(rows))]


@given(lines=st.lists(st.text().filter(lambda t: "\n" not in t and not t.endswith("\r"))))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_read_unchanged(
    packed: bool, end: str, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = "lines.gz" if packed else "lines.txt"
    path = file_of(tmp_path_factory.getbasetemp(), name, "".join(line + end for line in lines))
    if lines and lines[0].startswith("\ufeff"):
        lines[0] = lines[0][1:]
    assert list(read_lines(path)) == lines
    assert list(read_lines(path, keep_ends=True)) == [line + "\n" for line in lines]


def test_a_byte_order_mark_is_dropped_only_at_the_start_and_gzip_is_detected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    path.write_bytes(gzip.compress("\ufeffa\u2028b\x0bc\x85d\re\r\n\ufefff\n\nlast".encode()))
    assert list(read_lines(path)) == ["a\u2028b\x0bc\x85d\re", "\ufefff", "", "last"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_every_format_reads_the_same_rows(mark: str, end: str, packed: str, tmp_path: Path) -> None:
    """A byte order mark or CR that only some formats keep would spoil comparisons."""
    pairs = [("a b", "c"), ("", "d"), ("今天", " e ")]

    def written(name: str, lines: list[str]) -> Path:
        return file_of(tmp_path, name + packed, mark + end.join(lines) + end)

    tsv = written("t.tsv", ["\t".join(pair) for pair in pairs])
    header = written("h.tsv", ["n\tone\ttwo", *(f"1\t{a}\t{b}" for a, b in pairs)])
    jsonl = written("t.jsonl", [json.dumps({"src": a, "tgt": b, "n": 1}) for a, b in pairs])
    src, tgt = (written(f"t.{side}", [pair[side] for pair in pairs]) for side in (0, 1))
    for rows, first in (
        (read_rows([tsv], PAIR), 1),
        (read_rows([tsv], {"src": 1, "tgt": 2}), 1),
        (read_rows([header], {"src": "one", "tgt": "two"}), 2),
        (read_rows([jsonl], PAIR), 1),
        (read_rows({"src": [src], "tgt": [tgt]}), 1),
    ):
        assert (rows["src"], rows["tgt"]) == (["a b", "今天"], ["c", " e "])
        assert [place.split(", ")[-1] for place in locations(rows)] == [
            f"line {first}", f"line {first + 2}"
        ]  # fmt: skip
        assert rows.report.summary() == (
            "3 lines read, 2 pairs kept; 1 dropped as empty (source 1, target 0)"
        )
    assert read_rows({"src": [src], "tgt": [tgt]}, keep_empty=True)["src"] == ["a b", "", "今天"]
    assert cli_lines.read_parallel(src, tgt)[0] == list(*cli_lines.input_chunks(src))
    assert list(*cli_lines.input_chunks(src)) == ["a b", "", "今天"]
    assert cli_lines.read_whole(src) == "a b\n\n今天\n"
    assert read_rows([header], {"text": "one"})["text"] == ["a b", "今天"]
    with pytest.raises(UserError, match="has several columns, not lines of text"):
        read_rows([tsv])
    assert read_rows([src])["text"] == ["a b", "今天"]
    assert read_rows([src], unit="file")["text"] == ["a b\n\n今天\n"]


# No clock and no chance in it: workers that collect in parallel must see the same names.
PACKED = gzip.compress(random.Random(0).randbytes(200).hex().encode() + b"\n" * 50, mtime=0)
NAMED: dict[str, Any] = {"text": "a", "label": "b"}


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("t.txt", b"fine\nfine\nbad \xff\xfe\n", None, r"t\.txt, line 3: not UTF-8 at byte 5"),
        ("t.txt", b"\xed\xa0\x80\n", None, r"t\.txt, line 1: not UTF-8"),
        ("t.gz", gzip.compress(b"a\nb\xc3\n", mtime=0), None, r"t\.gz, line 2: not UTF-8"),
        ("t.gz", b"plain\n", None, r"t\.gz is named \.gz but is not gzip"),
        ("t.gz", b"", None, r"t\.gz is named \.gz but is not gzip"),
        ("t.gz", PACKED[: len(PACKED) // 2], None, r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:5], None, r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:-8] + b"\0" * 8, None, r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:40] + b"\xff" * 9 + PACKED[49:], None, r"t\.gz is damaged gzip"),
        ("t.txt", b"", None, r"t\.txt is empty: it holds no text in 0 lines; leave it out"),
        ("t.txt", b"\n \t\r\n\n", None, r"t\.txt is empty: it holds no text in 3 lines"),
        ("t.txt", b"\xef\xbb\xbf", None, r"t\.txt is empty"),
        ("t.jsonl", b'{"text": " "}\n', None, r"t\.jsonl is empty"),
        ("t.jsonl", b'{"text": "a"}\n{"text": ', None, r"t\.jsonl, line 2 is not JSON"),
        ("t.jsonl", b"[" * 100_000, None, r"t\.jsonl, line 1 is not JSON"),
        ("t.jsonl", b'"text"', None, r"t\.jsonl, line 1: not a JSON object"),
        (
            "t.jsonl",
            b'{"text": "a", "text": "b"}',
            None,
            r"t\.jsonl, line 1: the key 'text' stands twice in an object; remove one",
        ),
        ("t.jsonl", b'{"body": "a"}', None, r"line 1: no key 'text' .found: 'body'.; set"),
        ("t.jsonl", b'{"text": 3}', None, r"t\.jsonl, line 1: 'text' is not a text"),
        ("t.jsonl", b'{"text": "\\ud83d"}', None, r"t\.jsonl, line 1 holds half"),
        ("t.tsv", b"a\tb\na", PAIR, "line 2: 1 columns where there must be 2; keep tabs"),
        ("t.tsv", b"a\tb\na\tb\tc", PAIR, "line 2: 3 columns where there must be 2"),
        ("t.tsv", b"\t\n \t1\n", PAIR, "is empty: it holds no pair with text on both sides in 2"),
        ("t.tsv", b"a\tb\t1\n", LABELED, r"line 1: 3 columns where there must be 2"),
        ("t.tsv", b"a\tb\t1\nb\t1", {"text": 1, "label": 3}, "line 2: 2 columns .* must be 3"),
        ("t.tsv", b"a\t1\n", {"text": None, "label": 3}, "line 1: 2 columns .* must be 3"),
        ("t.tsv", b"a\t1\nb\t \n", LABELED, r"t\.tsv, line 2: no label; add it"),
        ("t.tsv", b"a\t1\n", {"text": 0, "label": 2}, "counted from 1, so there is no column 0"),
        ("t.tsv", b"a\t1\n", {"text": "a", "label": 2}, "all columns by name or all by number"),
        ("t.tsv", b"a\t1\n", {"text": "a", "label": None}, "the header has no column 'label'"),
        (
            "t.tsv",
            b"a\tc\nb\t1\n",
            NAMED,
            "line 1: the header has no column 'b' .its columns: 'a', 'c'.",
        ),
        ("t.tsv", b"a\tb\tb\nb\t1\t2\n", NAMED, "the header has two columns 'b'"),
        ("t.tsv", b"a\tb\nb\t1\t2\n", NAMED, "line 2: 3 columns where there must be 2"),
        ("t.tsv", b"a\tb\n", NAMED, r"t\.tsv is empty: it holds no labeled text"),
        ("t.tsv", b"", NAMED, "line 1: the header has no column 'a'"),
        (
            "t.txt",
            b"a,1\n",
            PAIR,
            r"t\.txt must be a \.tsv, \.csv, \.jsonl or \.parquet file to hold 2 columns "
            r"\(src, tgt\), or of pairs a \.tmx, \.xliff or \.po file",
        ),
        ("t.jsonl", b'{"text": "a"}', LABELED, "line 1: no key 'label' .found: 'text'"),
        (
            "t.jsonl",
            b'{"text": "a", "label": 0.5}',
            LABELED,
            "line 1: the label '0.5' is not a text",
        ),
        ("t.jsonl", b'{"text": "a", "label": ["b"]}', LABELED, "line 1: the label 'b' is not a"),
        ("t.jsonl", b'{"text": "a", "label": ["b,c"]}', LABELED, "line 1: 'label' is not a text"),
        ("t.jsonl", b'{"text": "a", "label": null}', LABELED, "'label' is null; write a text"),
        ("t.jsonl", b'{"text": "a", "label": ""}', LABELED, "line 1: no label"),
        ("t.jsonl", b'{"text": "a"}', {"text": 0}, "name them instead of numbers"),
    ],
)
def test_broken_files(
    tmp_path: Path, name: str, content: bytes, fields: dict[str, Any] | None, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    good = {"src": "a", "tgt": "a", "text": "a", "a": "a", "b": "1", "label": 1}
    first = file_of(tmp_path, "good.jsonl", json.dumps(good))
    by_name = fields is None or not any(isinstance(field, int) for field in fields.values())
    for files in ([tmp_path / name], [first, tmp_path / name] if by_name else []):
        for unit in ("line", "paragraph", "file") if files else ():
            with pytest.raises(UserError, match=message):
                read_rows(files, fields, unit=unit)  # type: ignore[arg-type]


def test_missing_files(tmp_path: Path) -> None:
    for unit in ("line", "paragraph", "file"):
        with pytest.raises(UserError, match=r"cannot read .*none\.txt: No such file"):
            read_rows([tmp_path / "none.txt"], unit=unit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
            read_rows([tmp_path], unit=unit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="/dev/zero is a device"):
            read_rows([Path("/dev/zero")], unit=unit)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no files are given"):
        read_rows([])
    with pytest.raises(UserError, match="1 src files but 0 tgt files"):
        read_rows({"src": [tmp_path], "tgt": []})
    locked = tmp_path / "locked"
    locked.touch(mode=0)
    if not os.access(locked, os.R_OK):  # root may read everything
        with pytest.raises(UserError, match="Permission denied"):
            read_rows([locked])


@pytest.mark.parametrize(("src", "tgt"), [("a\nb\nc\n", "a\n"), ("a\n", "a\nb\nc\n")])
def test_parallel_files_of_different_length(tmp_path: Path, src: str, tgt: str) -> None:
    files = {"src": [file_of(tmp_path, "x", src)], "tgt": [file_of(tmp_path, "y", tgt)]}
    numbers = rf"x has {src.count(chr(10))} lines but .*y has {tgt.count(chr(10))}; line n"
    with pytest.raises(UserError, match=numbers):
        read_rows(files)


TEXT = "\ufeffone\n two \r\n\n \t\nthree\n\n\nfour\r\nfive"


@pytest.mark.parametrize(
    ("unit", "expected", "lines", "num_empty"),
    [
        ("line", ["one", " two ", "three", "four", "five"], [1, 2, 5, 8, 9], 4),
        ("paragraph", ["one\n two ", "three", "four\nfive"], [1, 5, 8], 0),
        ("file", [TEXT[1:].replace("\r\n", "\n")], [1], 0),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_units(
    tmp_path: Path, name: str, unit: Any, expected: list[str], lines: list[int], num_empty: int
) -> None:
    path, other = file_of(tmp_path, name, TEXT), file_of(tmp_path, "other", "last\n")
    rows = read_rows([path, other], unit=unit)
    assert rows["text"] == [*expected, "last\n" if unit == "file" else "last"]
    report = rows.report
    assert (report.num_lines, report.num_kept, report.num_empty) == (10, len(rows), num_empty)
    assert locations(rows) == [*(f"{path}, line {line}" for line in lines), f"{other}, line 1"]


def test_lines_of_invisible_characters_are_blank(tmp_path: Path) -> None:
    """As they are where a model translates them."""
    lines = ["a b", "\u200b", "c", "\ufeff\u00ad \x01", "d\u200be"]
    path = file_of(tmp_path, "t.txt", "\n".join(lines))
    kept = [lines[0], lines[2], lines[4]]
    for unit in ("line", "paragraph"):
        assert read_rows([path], unit=unit)["text"] == kept  # type: ignore[arg-type]
    other = file_of(tmp_path, "o.txt", "\u2060\nb\nc\nd\ne\n")
    pairs = read_rows({"src": [path], "tgt": [other]})
    assert (pairs["src"], pairs["tgt"]) == (kept[1:], ["c", "e"])
    assert (pairs.report.num_empty, pairs.report.empty) == (3, {"src": 2, "tgt": 1})
    with pytest.raises(UserError, match="is empty"):
        read_rows([file_of(tmp_path, "none", "\ufeff\u200b\n\u00ad")], unit="file")


@given(text=st.text(alphabet=st.sampled_from("ab \t\r\n\x0b\u2028é今"), min_size=1))
@settings(max_examples=200, deadline=None)
def test_units_drop_only_blank_lines_of_a_file(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = file_of(tmp_path_factory.getbasetemp(), "whole.txt", text)
    if not text.strip():
        for unit in ("line", "paragraph", "file"):
            with pytest.raises(UserError, match=r"whole\.txt is empty"):
                read_rows([path], unit=unit)  # type: ignore[arg-type]
        return
    assert read_rows([path], unit="file")["text"] == [re.sub(r"\r(\n|\Z)", r"\1", text)]
    lines, paragraphs = read_rows([path]), read_rows([path], unit="paragraph")
    assert "\n".join(paragraphs["text"]).split("\n") == lines["text"]
    num_lines = text.count("\n") + (text[-1] != "\n")
    assert lines.report.num_lines == paragraphs.report.num_lines == num_lines
    assert lines.report.num_kept + lines.report.num_empty == num_lines


def test_a_line_of_jsonl_is_one_text_for_every_unit(tmp_path: Path) -> None:
    texts = ["a\n\nb\r\n", "", "今 天"]
    content = "\n".join(json.dumps({"body": text, "n": 1}) for text in texts) + "\n\n"
    for name in ("t.jsonl", "t.jsonl.gz"):
        path = file_of(tmp_path, name, content)
        for unit in ("line", "paragraph", "file"):
            rows = read_rows([path], {"text": "body"}, unit=unit)  # type: ignore[arg-type]
            assert rows["text"] == [texts[0], texts[2]]
            assert rows.location(1) == f"{path}, line 3"
            assert rows.report.summary() == "4 lines read, 2 texts kept; 2 dropped as empty"


@pytest.mark.parametrize(
    ("name", "content", "fields"),
    [
        ("t.tsv", "a b\t1\n\n \t0\n今 天\t 0 \n", LABELED),
        ("t.tsv", "x\ta b\t1\n\nx\t\t0\nx\t今 天\t0", {"text": 2, "label": 3}),
        ("t.tsv", "no\tlabel\ttext\n1\t1\ta b\n\n2\t0\t今 天", {"text": "text", "label": "label"}),
        ("t.jsonl", '{"text": "a b", "label": 1}\n\n{"text": "今 天", "label": "0 "}', LABELED),
    ],
)
def test_labels(tmp_path: Path, name: str, content: str, fields: dict[str, Any]) -> None:
    rows = read_rows([file_of(tmp_path, name, content)], fields)
    assert (rows["text"], rows["label"]) == (["a b", "今 天"], ["1", "0"])


def test_labels_of_one_look_are_one_class(tmp_path: Path) -> None:
    content = "a\tcafe\u0301\nb\tcaf\u00e9\nc\tx\n"
    rows = read_rows([file_of(tmp_path, "t.tsv", content)], LABELED)
    assert rows["label"] == ["caf\u00e9", "caf\u00e9", "x"]
    assert label_ids(rows, ["x", "cafe\u0301"]).tolist() == [1, 1, 0], "names of an older model"


def test_columns_in_any_order_several_files_and_some_of_the_rows(tmp_path: Path) -> None:
    tsv = file_of(tmp_path, "t.tsv", "yes\ta\tb\nno\t\tb\nno\ta\t \nno\tc\td e\n")
    jsonl = file_of(tmp_path, "t.jsonl", '{"q": "f", "p": "a", "y": true}\n')
    rows = read_rows([tsv, tsv], {"text": 2, "pair": 3, "label": 1})
    assert (rows["text"], rows["pair"]) == (["a", "c"] * 2, ["b", "d e"] * 2)
    assert rows["label"] == ["yes", "no"] * 2
    assert (rows.report.num_lines, rows.report.num_empty) == (8, 4)
    from_jsonl = read_rows([jsonl], {"text": "q", "pair": "p", "label": "y"})
    assert from_jsonl.columns == {"text": ["f"], "pair": ["a"], "label": ["true"]}
    some = rows.select(np.array([3, 0]))
    assert (some["text"], some["label"]) == (["c", "a"], ["no", "yes"])
    assert locations(some) == [f"{tsv}, line 4", f"{tsv}, line 1"]
    train, valid = sides_of(rows, 2)
    assert sorted(locations(train) + locations(valid)) == sorted(locations(rows))
    assert locations(sides_of(rows, 2)[1]) == locations(valid)
    with pytest.raises(UserError, match=r"data\.valid_size 3 of 4 texts would leave too few"):
        split_by_source(np.arange(4, dtype=np.uint64), 3, "texts")
    with pytest.raises(UserError, match="5 texts have 1 different sources, too few to hold out"):
        split_by_source(np.zeros(5, np.uint64), 1, "texts")
    assert [len(side) for side in sides_of(rows, 0.5)] == [2, 2]
    assert [len(side) for side in sides_of(rows, 0.01)] == [2, 2]  # both rows of a source


def tail(texts: list[str], size: float, unit: Any) -> tuple[list[str], list[str]]:
    """The texts of both sides, in chunks of three texts."""
    chunks = [Rows({"text": texts[i : i + 3]}) for i in range(0, len(texts), 3)]
    lengths = [[*map(len, chunk["text"])] for chunk in chunks]
    counts = [*map(len, chunks)], [*map(sum, lengths)]
    split = Split(tails=(split_tail(*counts, lengths.__getitem__, size, unit),))
    sides: tuple[list[str], list[str]] = ([], [])
    for number, chunk in enumerate(chunks):
        indices = np.arange(3 * number, 3 * number + len(chunk))
        for side, held_out in zip(sides, (False, True), strict=True):
            side.extend(split.take(chunk, indices, held_out=held_out)["text"])
    return sides


def sides_of(rows: Rows, size: float) -> tuple[Rows, Rows]:
    split = split_by_source(hash_cells(source_columns(rows)), size, "texts")
    indices = np.arange(len(rows))
    return split.take(rows, indices, held_out=False), split.take(rows, indices, held_out=True)


def names_of(labels: list[str]) -> list[str]:
    return list(label_names(labels))


def test_known_places_give_the_same_chunks_without_reading_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_LINES", 3)
    table = "b\ta\n" + "\t\n" * 3 + "".join(f"{n}\tx {n}\n" for n in range(20))
    named = open_rows([file_of(tmp_path, "a.tsv", table)], {"src": "a", "tgt": "b"})
    plain = [file_of(tmp_path, f"b{n}.tsv", "\n\n\n\nA\tB\nC\tD") for n in (1, 2)]
    packed = file_of(tmp_path, "c.tsv.gz", table)
    objects = [json.dumps({"src": f"s {n}", "tgt": f"t {n}"}) + "\n" for n in range(7)]
    numbered = open_rows([*plain, packed, plain[0]], {"src": 1, "tgt": 2})
    jsonl = open_rows([file_of(tmp_path, "d.jsonl", "".join(objects))], PAIR)
    sides = {side: [file_of(tmp_path, side, "1\n2\n3\n4\n")] for side in PAIR}
    source = JoinedRows((named, numbered, jsonl, open_rows(sides), open_rows(sides)))
    chunks = [*source.chunks()]
    places: dict[int, list[BlockPlace | None]] = {}
    for chunk in chunks:
        places.setdefault(chunk.file_index, []).append(chunk.place)
    known = {
        index: [place for place in found if place is not None]
        for index, found in places.items()
        if None not in found
    }
    assert [*known] == [0, 1, 2, 4, 5, 6, 7], "all but the packed one"
    opened, found = text_files._opened, list[Path]()
    monkeypatch.setattr(text_files, "_opened", lambda path: found.append(path) or opened(path))
    again = [*source.chunks(known)]
    assert found == [packed]
    assert len(again) == len(chunks) > 25
    for one, other in zip(again, chunks, strict=True):
        rows, expected = one.parse(), other.parse()
        assert (one.file_index, one.place) == (other.file_index, other.place)
        assert (rows.columns, rows.report) == (expected.columns, expected.report)
        assert locations(rows) == locations(expected)


def test_label_names_are_in_the_order_of_numbers() -> None:
    assert names_of(["10", "9", "-1", "2.5", "9"]) == ["-1", "2.5", "9", "10"]
    assert names_of(["b", "10", "a", "9", "nan", "1e3", "٣"]) == [
        "9", "10", "1e3", "a", "b", "nan", "٣"
    ]  # fmt: skip
    assert names_of(["1", "01", "1.0"]) == ["01", "1", "1.0"]
    big = ["9007199254740993", "9007199254740992"]
    assert names_of(big) == big[::-1]
    with pytest.raises(UserError, match="every text has the label 'x', so there is nothing"):
        names_of(["x", "x"])


@given(labels=st.lists(st.one_of(st.integers().map(str), st.text(min_size=1)), min_size=2))
@settings(max_examples=100, deadline=None)
def test_label_ids_are_indices_of_the_sorted_names(labels: list[str]) -> None:
    if len(set(labels)) < 2:
        return
    names = names_of(labels)
    assert names == names_of(labels[::-1])
    assert sorted(names) == sorted(set(labels))
    assert [names[i] for i in label_ids(Rows({"label": labels}), names)] == labels


def test_a_label_that_training_lacks_is_refused(tmp_path: Path) -> None:
    rows = read_rows([file_of(tmp_path, "valid.tsv", "a\tgood\n\nb\tfair\n")], LABELED)
    with pytest.raises(
        UserError, match=r"valid\.tsv, line 3: label 'fair' is not among .*'bad', 'good'.; correct"
    ):
        label_ids(rows, ["bad", "good"])
    with pytest.raises(UserError, match=r"'0', .*'9' and 20 more"):
        label_ids(rows, [str(i) for i in range(30)])


@given(
    texts=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=9),
    fraction=st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.1, 0.3, 0.5, 0.9])),
    unit=st.sampled_from(["line", "paragraph", "file"]),
)
@settings(max_examples=300, deadline=None)
def test_a_tail_is_the_last_part_of_the_characters(
    texts: list[str], fraction: float, unit: Any
) -> None:
    total = sum(map(len, texts))
    border = int(total * (1 - fraction) + 1e-9)
    # Indices where a text ends, the nearest first, of equally near ones the later.
    ends = sorted(accumulate(map(len, texts), initial=0), key=lambda e: (abs(e - border), -e))
    expected = border if unit == "file" else ends[0]
    if expected in (0, total):
        with pytest.raises(UserError, match="leaves none to"):
            tail(texts, fraction, unit)
        return
    train, held_out = tail(texts, fraction, unit)
    assert "".join(train + held_out) == "".join(texts)
    assert len("".join(train)) == expected
    assert unit == "file" or train + held_out == texts
    assert all(train)
    assert all(held_out)


def test_tails_of_small_texts() -> None:
    assert tail(["0123456789"], 0.9, "file") == (["0"], ["123456789"])  # not 0.99 of one
    assert tail(["0123", "45", "6789"], 0.5, "line") == (["0123", "45"], ["6789"])  # a tie
    for unit in ("line", "file"):  # a number of texts
        assert tail(["0", "12", "3456789"], 2, unit) == (["0"], ["12", "3456789"])
        with pytest.raises(UserError, match="valid_size 4 of 3 texts leaves none to train on"):
            tail(["0", "12", "3456789"], 4, unit)
    for fraction, side in ((0.1, "hold out"), (0.9, "train on")):
        with pytest.raises(UserError, match=f"leaves none to {side}"):
            tail(["0123456789"], fraction, "line")


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    size=st.one_of(st.integers(1, 40), st.floats(0.01, 0.5)),
    seed=st.integers(0, 99),
)
@example(counts=[1, 2, 6], size=1 / 3, seed=0)  # 0.3333333333333333 of 9 rows are 2
def test_a_random_split_has_all_rows_of_a_source_or_none(
    counts: list[int], size: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(2**63, size=len(counts)).astype(np.uint64)
    sources = rng.permutation(np.repeat(hashes, counts))
    wanted = size if isinstance(size, int) else max(1, floor(len(sources) * Fraction(str(size))))
    try:
        held_out = split_by_source(sources, size, "texts").held_out
    except UserError:
        assert len(sources) < 2 * wanted or 2 * min(counts) > len(sources)
        return
    assert (np.diff(held_out) > 0).all()
    assert not set(sources[held_out]) & set(np.delete(sources, held_out))
    assert 0 < len(held_out) <= max(wanted, min(counts))
    left = [n for h, n in zip(hashes, counts, strict=True) if h not in set(sources[held_out])]
    assert min(left) > wanted - len(held_out), "no other source fits"


TEXTS = st.lists(st.tuples(st.sampled_from(["a", "b", " b ", "c\0"]), st.sampled_from("ab ")))


@given(train=TEXTS, valid=TEXTS, test=TEXTS, both_directions=st.booleans())
def test_held_out_rows_are_dropped_from_training_and_counted(
    train: list[tuple[str, str]],
    valid: list[tuple[str, str]],
    test: list[tuple[str, str]],
    both_directions: bool,
) -> None:
    """In data of both directions also pairs with the sides exchanged."""

    def rows(pairs: list[tuple[str, str]]) -> Rows:
        return Rows({"src": [src for src, _ in pairs], "tgt": [tgt for _, tgt in pairs]})

    sources = {normalized(src) for src, _ in (*valid, *test)}
    exchanged = (*valid, *test) if both_directions else ()
    reversed_pairs = {(normalized(tgt), normalized(src)) for src, tgt in exchanged}
    expected = [
        (src, tgt)
        for src, tgt in train
        if normalized(src) not in sources
        and (normalized(src), normalized(tgt)) not in reversed_pairs
    ]
    known = KnownRows.from_rows([rows(valid), rows(test)], both_directions=both_directions)
    remaining = known.drop_from(rows(train))
    assert [*zip(remaining["src"], remaining["tgt"], strict=True)] == expected
    assert (remaining.report.num_lines, remaining.report.num_kept) == (len(train), len(expected))
    assert remaining.report.num_also_held_out == len(train) - len(expected)


def test_a_damaged_file_is_named_among_line_parallel_ones(tmp_path: Path) -> None:
    files = {side: [file_of(tmp_path, f"t.{side}.gz", PACKED)] for side in ("src", "tgt")}
    content = "".join(f"{line}\n" for line in range(9000))
    for damaged in files:
        for side, (path,) in files.items():
            data = gzip.compress(content.encode())
            path.write_bytes(data[: len(data) // 2] if side == damaged else data)
        with pytest.raises(UserError, match=rf"t\.{damaged}\.gz is damaged gzip"):
            read_rows(files)


@pytest.mark.parametrize(
    ("first", "fields"),
    [
        ("src\ttgt", PAIR),
        ("English\tGerman", {"src": 1, "tgt": 2}),
        ("en\tzh-CN", PAIR),
        ("Source Text\tTranslation", PAIR),
        ("sentence\tlabel", LABELED),
        ("Satz\tKlasse", LABELED),
    ],
)
def test_a_header_of_a_tsv_is_recognized_counted_and_left_out(
    tmp_path: Path, first: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_LINES", 20)
    lines = [f"a {i}\t{'good' if i % 3 else 'bad'}" for i in range(50)]
    path = file_of(tmp_path, "t.tsv", "\n".join([first, *lines]))
    rows = read_rows([path], fields)
    assert len(rows) == 50
    assert (rows.report.num_headers, rows.report.num_lines) == (1, 51)
    assert "1 with names of columns left out" in rows.report.summary()
    assert rows.location(0) == f"{path}, line 2"
    source = open_rows([path], fields, header=False)
    assert sum(len(chunk.parse()) for chunk in source.chunks()) == 51
    chunks = [*open_rows([path], fields).chunks()]
    places = {0: [chunk.place for chunk in chunks if chunk.place is not None]}
    again = [row.parse() for row in open_rows([path], fields).chunks(places)]
    assert sum(map(len, again)) == 50


@pytest.mark.parametrize(
    ("first", "fields"),
    [
        ("a dog\tein Hund", PAIR),
        ("it is good\tes ist gut", PAIR),
        ("English\tEnglisch", PAIR),
        ("title\tgood", LABELED),
        ("title\t7", LABELED),
    ],
)
def test_a_first_row_that_names_no_columns_is_a_row(
    tmp_path: Path, first: str, fields: dict[str, Any]
) -> None:
    lines = [f"a {i}\t{'good' if i % 3 else 'bad'}" for i in range(50)]
    path = file_of(tmp_path, "t.tsv", "\n".join([first, *lines]))
    rows = read_rows([path], fields)
    assert (len(rows), rows.report.num_headers) == (51, 0)
    source = open_rows([path], fields, header=True)
    assert sum(len(chunk.parse()) for chunk in source.chunks()) == 50


@pytest.mark.parametrize(
    ("first", "fields", "message"),
    [
        ("label\tsentence", LABELED, "names column 1 'label', which is read as the text"),
        ("target\tsource", PAIR, "data.train.tgt_field=1"),
    ],
)
def test_columns_whose_names_are_in_another_order_are_refused(
    tmp_path: Path, first: str, fields: dict[str, Any], message: str
) -> None:
    """Labels were read as texts, and targets as sources."""
    path = file_of(tmp_path, "t.tsv", f"{first}\nx\ty\n")
    with pytest.raises(UserError, match=message):
        read_rows([path], fields)
    by_number = dict(zip(fields, (2, 1), strict=True))
    assert read_rows([path], by_number).columns == dict(zip(fields, (["y"], ["x"]), strict=True))
    source = open_rows([path], fields, header=False)
    assert sum(len(chunk.parse()) for chunk in source.chunks()) == 2


@pytest.mark.parametrize(
    ("first", "columns"),
    [
        ("de\ten", "src_field=2 data.train.tgt_field=1"),
        ("German\tenglish", "src_field=2 data.train.tgt_field=1"),
        ("de-DE\ten-US", "src_field=2 data.train.tgt_field=1"),
        ("fr\tde", "src_field=N data.train.tgt_field=2"),
        ("en\ttext", ""),
        ("english\tde-AT", ""),
        ("text1\ttext2", ""),
    ],
)
def test_columns_named_by_other_languages_than_the_runs_are_refused(
    tmp_path: Path, first: str, columns: str
) -> None:
    """They were read by position: German as English."""
    path = file_of(tmp_path, "t.tsv", f"{first}\nx\ty\n")
    recipe = parse_recipe(
        {
            "task": "translation",
            "data": {"train": {"file": str(path)}, "src_language": "en", "tgt_language": "de"},
            "training": {"max_steps": 1},
        }
    )
    [entry] = split_files(recipe)
    if not columns:
        assert collect(open_pairs(entry, recipe)).columns == {"src": ["x"], "tgt": ["y"]}
        return
    cell = first.split("\t")[0].lower()
    refusal = f"column 1 '{cell}', which is read as the src (en): give columns, such as data.train."
    with pytest.raises(UserError, match=re.escape(refusal + columns)):
        collect(open_pairs(entry, recipe))


def test_a_column_named_by_a_related_language_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, "t.tsv", "en\tno\nx\ty\n")
    related = open_rows([path], PAIR, languages={"src": "en", "tgt": "nb"})
    assert collect(related)["tgt"] == ["y"]


def test_a_header_after_blank_lines_is_left_out(tmp_path: Path) -> None:
    path = file_of(tmp_path, "t.tsv", "\n \t\nsentence\tlabel\na dog\tgood\na cat\tbad\n")
    rows = read_rows([path], LABELED)
    assert rows["label"] == ["good", "bad"]
    assert (rows.report.num_headers, rows.report.num_empty, rows.report.num_lines) == (1, 2, 5)
    assert rows.location(0) == f"{path}, line 4"


@pytest.mark.parametrize(
    ("name", "fields"), [("a.tsv", None), ("a.txt", None), ("a.jsonl", {"text": "src"})]
)
def test_a_header_setting_without_effect_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any] | None
) -> None:
    path = file_of(tmp_path, name, "src\ttgt\na\tb\n")
    with pytest.raises(UserError, match="no line of column names"):
        [chunk.parse() for chunk in open_rows([path], fields, header=True).chunks()]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a.jsonl", "is a table, not lines of text; in a recipe, give it as file"),
        ("a.JSONL", "is a table, not lines of text"),
        ("a.ndjson.gz", "is a table, not lines of text"),
        ("a.Parquet", "is a table, not lines of text"),
        ("a.csv", "is a table, not lines of text; in a recipe, give it as file"),
        ("a.csv.gz", "is a table, not lines of text"),
        ("a.tmx.gz", "holds pairs, not lines of text"),
        ("a.json", r"convert it to \.tsv or \.jsonl"),
        ("a.tsv", "has several columns, not lines of text; in a recipe, give it as file"),
        ("a.vtt.gz", "is a file of subtitles, not lines of text"),
    ],
)
def test_tables_are_not_read_as_lines_of_text(tmp_path: Path, name: str, problem: str) -> None:
    path = file_of(tmp_path, name, '\n{"src": "a",\t"tgt": "b"}\n')
    text = file_of(tmp_path, "b.txt", "a\n")
    with pytest.raises(UserError, match=problem):
        read_rows({"src": [path], "tgt": [text]})
    if "csv" in name or "vtt" in name or "tsv" in name:
        # A language model has no key `file`.
        problem = problem.replace("in a recipe, give it as file", "name its column of texts")
        with pytest.raises(UserError, match=problem):
            read_rows([path])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"%PDF-1.7\n1 0 obj", "is a PDF, not text; extract its text"),
        (lzma.compress(b"a\n"), r"is compressed by xz, not text; pack it again: `xz -dc FILE"),
        (bz2.compress(b"a\n"), "is compressed by bzip2, not text; pack it again: `bzip2 -dc"),
        ("word/document.xml", r"is a Word document \(\.docx\), not text; save it as plain text"),
        ("xl/workbook.xml", r"is an Excel spreadsheet .* tab-separated text"),
        ("application/vnd.oasis.opendocument.text", r"is an OpenDocument text \(\.odt\)"),
        ("other", "is a ZIP file, not text; unpack it"),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.docx"])
def test_documents_are_recognized_by_content(
    tmp_path: Path, name: str, content: bytes | str, problem: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        is_open = content.startswith("application")
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("mimetype" if is_open else content, content)
    for fields in (None, PAIR):
        with pytest.raises(UserError, match=problem):
            read_rows([path], fields)


def test_a_tsv_of_one_column_is_lines_of_text(tmp_path: Path) -> None:
    """One of several columns was read with its tabs; in line-parallel files it was refused."""
    rows = read_rows([file_of(tmp_path, "a.TSV", "text\n\neins\n")])
    assert (rows["text"], rows.report.num_headers) == (["text", "eins"], 0)
    packed = file_of(tmp_path, "b.TSV.GZ", "1\teins\n2\tzwei\n")
    for unit in ("line", "paragraph"):
        with pytest.raises(UserError, match=r"several columns.*name its column of texts"):
            read_rows([packed], unit=unit)
    assert read_rows([packed], {"text": 2})["text"] == ["eins", "zwei"]


@pytest.mark.parametrize("packed", ["", ".GZ"])
def test_names_in_capitals_have_the_format_of_their_ending(packed: str, tmp_path: Path) -> None:
    """`X.JSONL` was read as lines of text, the braces included."""
    jsonl = file_of(tmp_path, "T.JSONL" + packed, '{"src": "a", "tgt": "b"}\n')
    tsv = file_of(tmp_path, "T.TSV" + packed, "a\tb\n")
    for path in (jsonl, tsv):
        rows = read_rows([path], PAIR)
        assert (rows["src"], rows["tgt"]) == (["a"], ["b"])
    assert format_of(Path("T.PARQUET")) == "table"
    assert format_of(Path("T.TMX" + packed)) == "tmx"
    if packed:
        file = tmp_path / "T.TXT.GZ"
        file.write_text("a\n", encoding="utf-8")
        with pytest.raises(UserError, match="is not gzip"):
            read_rows([file])
