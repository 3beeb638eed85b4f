"""Labelled texts: fields of every form, every kind of broken file, and a store that holds them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.documents import TextReport
from heedful.data.labelled import (
    Labelled,
    cut_pair,
    encode_labelled,
    open_labelled,
    read_labelled,
)
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# `<s>` is 1, `</s>` is 2, unknown is 3, and a to f are 4 to 9.
BOTH = train_tokenizer(["a b c d e f"], kind="word", template="both")
BARE = train_tokenizer(["a b c d e f"], kind="word", template="none")


def file_of(directory: Path, name: str, content: str) -> Path:
    path = directory / name
    data = content.encode()
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    return path


def labelled(texts: list[str], labels: list[str], pairs: list[str] | None = None) -> Labelled:
    return Labelled(texts, pairs, labels, TextReport(len(texts), len(texts)))


@pytest.mark.parametrize(
    ("name", "content", "fields"),
    [
        ("t.tsv", "a b\t1\r\n\n \t0\n今 天\t 0 \n", {}),
        ("t.tsv.gz", "a b\t1\n\n\t0\n今 天\t0\n", {"text_field": 1, "label_field": 2}),
        (
            "t.txt",
            "1\ta b\n\n0\t\n0\t今 天\n",
            {"text_field": 2, "label_field": 1, "format": "tsv"},
        ),
        ("t.tsv", "x\ta b\t1\n\nx\t\t0\nx\t今 天\t0", {"text_field": 2, "label_field": 3}),
        (
            "t.tsv",
            "\ufefflabel\tid\tsentence\n1\tx\ta b\n0\ty\t\n0\tz\t今 天\n",
            {"text_field": "sentence", "label_field": "label"},
        ),
        (
            "t.jsonl",
            '{"text": "a b", "label": 1}\n\n{"text": "", "label": 0}\n'
            '{"text": "今 天", "label": 0}',
            {},
        ),
        (
            "t.jsonl.gz",
            '{"s": "a b", "l": "1"}\n\n{"s": " ", "l": "0"}\n{"s": "今 天", "l": "0"}\n',
            {"text_field": "s", "label_field": "l"},
        ),
    ],
)
def test_fields(tmp_path: Path, name: str, content: str, fields: dict[str, int | str]) -> None:
    path = file_of(tmp_path, name, content)
    read = read_labelled([path], **fields)  # type: ignore[arg-type]
    assert read.texts == ["a b", "今 天"]
    assert read.labels == ["1", "0"]
    assert read.pairs is None
    assert len(read) == read.report.num_kept == 2
    assert read.report.num_empty == (1 if "sentence" in content else 2)
    assert [read.report.place(i) for i in range(2)] == [
        f"{path}, line {line}" for line in ((2, 4) if "sentence" in content else (1, 4))
    ]


def test_pairs_and_several_files(tmp_path: Path) -> None:
    tsv = file_of(tmp_path, "t.tsv", "yes\ta\tb\nno\t\tb\nno\ta\t \nno\tc\td e\n")
    jsonl = file_of(tmp_path, "t.jsonl", '{"q": "f", "p": "a", "y": true}\n')
    fields: dict[str, int | str] = {"text_field": 2, "pair_field": 3, "label_field": 1}
    read = read_labelled([tsv, tsv], **fields)  # type: ignore[arg-type]
    assert read.texts == ["a", "c"] * 2
    assert read.pairs == ["b", "d e"] * 2
    assert read.labels == ["yes", "no"] * 2
    assert (read.report.num_lines, read.report.num_empty) == (8, 4)
    again = read_labelled([jsonl], text_field="q", pair_field="p", label_field="y")
    assert (again.texts, again.pairs, again.labels) == (["f"], ["a"], ["true"])
    some = read.select(np.array([3, 0]))
    assert (some.texts, some.pairs, some.labels) == (["c", "a"], ["d e", "b"], ["no", "yes"])
    assert [some.report.place(i) for i in range(2)] == [f"{tsv}, line 4", f"{tsv}, line 1"]


NAMED = {"text_field": "a", "label_field": "b"}


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("t.tsv", "a\t1\nb\n", {}, r"t\.tsv, line 2: 1 columns where there must be 2; keep tabs"),
        ("t.tsv", "a\t1\nb\tc\t1\n", {}, r"line 2: 3 columns where there must be 2"),
        ("t.tsv", "a\tb\t1\n", {}, r"line 1: 3 columns where there must be 2"),
        ("t.tsv", "a\tb\t1\nb\t1", {"label_field": 3}, r"line 2: 2 columns .* must be 3"),
        ("t.tsv", "a\t1\n", {"label_field": 3}, r"line 1: 2 columns where there must be 3"),
        ("t.tsv", "a\t1\nb\t \n", {}, r"t\.tsv, line 2: no label; add it"),
        ("t.tsv", "a\t1\n", {"text_field": 0}, "counted from 1, so there is no column 0"),
        ("t.tsv", "a\t1\n", {"text_field": "a"}, "all columns by the header, or all by number"),
        ("t.tsv", "a\tc\nb\t1\n", NAMED, r"line 1: column 'b' is not in the header .'a', 'c'."),
        ("t.tsv", "a\tb\tb\nb\t1\t2\n", NAMED, r"column 'b' is twice in the header"),
        ("t.tsv", "a\tb\nb\t1\t2\n", NAMED, r"line 2: 3 columns where there must be 2"),
        ("t.tsv", "a\tb\n", NAMED, r"t\.tsv holds no labelled text"),
        ("t.tsv", "", NAMED, r"line 1: column 'a' is not in the header"),
        ("t.tsv", "", {}, r"t\.tsv holds no labelled text; leave it out"),
        ("t.tsv", "\n \t1\n", {}, r"t\.tsv holds no labelled text"),
        ("t.csv", "a,1\n", {}, r"t\.csv is not named \.tsv or \.jsonl; write it as one of them"),
        ("t.jsonl", '{"text": "a"}', {}, r"t\.jsonl, line 1: no key 'label' .found: 'text'"),
        ("t.jsonl", '{"label": "a"}', {}, r"t\.jsonl, line 1: no key 'text'"),
        ("t.jsonl", '{"text": "a", "label": 0.5}', {}, r"line 1: 'label' is not a text"),
        ("t.jsonl", '{"text": "a", "label": null}', {}, r"line 1: 'label' is not a text"),
        ("t.jsonl", '{"text": "a", "label": ""}', {}, r"line 1: no label"),
        ("t.jsonl", '{"text": "a", "label": 1', {}, r"line 1: not JSON"),
        ("t.jsonl", '{"text": "a", "label": 1}', {"label_field": 2}, "name them instead of num"),
        ("t.jsonl", '{"text": "a", "label": 1}', {"label_field": 0}, "name them instead of num"),
        ("t.jsonl", '{"text": "a", "label": 1}', {"pair_field": "b"}, "no key 'b'"),
    ],
)
def test_broken_files(
    tmp_path: Path, name: str, content: str, fields: dict[str, int | str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_labelled([file_of(tmp_path, name, content)], **fields)  # type: ignore[arg-type]


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.tsv"):
        read_labelled([tmp_path / "none.tsv"])
    with pytest.raises(UserError, match="no file is named"):
        read_labelled([])
    (tmp_path / "t.tsv").write_bytes(b"a\t1\n\xff\t0\n")
    with pytest.raises(UserError, match=r"t\.tsv, line 2: not UTF-8"):
        read_labelled([tmp_path / "t.tsv"])


def names_of(labels: list[str]) -> list[str]:
    return list(labelled(["a"] * len(labels), labels).label_names())


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
def test_label_ids_are_places_among_the_names_in_any_order_of_texts(labels: list[str]) -> None:
    if len(set(labels)) < 2:
        return
    names = names_of(labels)
    assert names == names_of(labels[::-1])
    assert sorted(names) == sorted(set(labels))
    ids = labelled(["a"] * len(labels), labels).label_ids(names)
    assert [names[i] for i in ids] == labels


def test_a_label_that_training_lacks(tmp_path: Path) -> None:
    path = file_of(tmp_path, "valid.tsv", "a\tgood\n\nb\tfair\n")
    read = read_labelled([path])
    with pytest.raises(
        UserError, match=r"valid\.tsv, line 3: label 'fair' is not among .*'bad', 'good'.; correct"
    ):
        read.label_ids(["bad", "good"])
    many = [str(i) for i in range(30)]
    with pytest.raises(UserError, match=r"'0', .*'9' and 20 more"):
        read.label_ids(many)


def sequences(store_path: Path) -> list[list[int]]:
    store = open_labelled(store_path)
    return [store.ids[i].tolist() for i in range(len(store))]


def test_texts_on_disk(tmp_path: Path) -> None:
    texts = labelled(["a b", "zz", "c"], ["10", "9", "10"])
    store, report = encode_labelled(
        texts, BOTH, tmp_path / "x", label_names=["9", "10"], max_length=4, too_long="error"
    )
    for again in (store, open_labelled(tmp_path / "x")):
        assert again.labels.tolist() == [1, 0, 1]
        assert again.label_names == ("9", "10")
        assert again.seconds is None
        assert again.lengths.tolist() == [4, 3, 3]
        assert len(again) == 3
    assert sequences(tmp_path / "x") == [[1, 4, 5, 2], [1, 3, 2], [1, 6, 2]]
    assert report == TextReport(3, 3, num_tokens=4, num_unknown=1)
    assert report.summary() == "3 lines read, 3 texts kept; unknown tokens: 1 (25.00%)"


def test_pairs_on_disk(tmp_path: Path) -> None:
    pairs = labelled(["a b", "zz"], ["x", "y"], ["c", "d zz"])
    store, report = encode_labelled(
        pairs, BOTH, tmp_path / "x", label_names=["x", "y"], max_length=9, too_long="error"
    )
    assert sequences(tmp_path / "x") == [[1, 4, 5, 2, 6, 2], [1, 3, 2, 7, 3, 2]]
    assert store.seconds is not None
    assert store.seconds.tolist() == [4, 3]
    assert (report.num_tokens, report.num_unknown) == (6, 2)
    # Single texts at the same place leave nothing of the pairs.
    encode_labelled(
        labelled(["a"], ["x"]),
        BARE,
        tmp_path / "x",
        label_names=["x", "y"],
        max_length=9,
        too_long="error",
    )
    assert open_labelled(tmp_path / "x").seconds is None
    assert sequences(tmp_path / "x") == [[4]]
    assert not (tmp_path / "x.seconds.npy").exists()


def test_over_long_texts(tmp_path: Path) -> None:
    content = "a b c\t0\n\na\t1\na b c d e\t1\nb\t0\n"
    read = read_labelled([file_of(tmp_path, "t.tsv", content)])
    names = read.label_names()
    with pytest.raises(UserError, match=r"t\.tsv, line 1: 5 tokens .marks counted.* max_length 4"):
        encode_labelled(
            read, BOTH, tmp_path / "x", label_names=names, max_length=4, too_long="error"
        )
    assert not list(tmp_path.glob("*.npy"))
    store, report = encode_labelled(
        read, BOTH, tmp_path / "x", label_names=names, max_length=4, too_long="drop"
    )
    assert sequences(tmp_path / "x") == [[1, 4, 2], [1, 5, 2]]
    assert store.labels.tolist() == [1, 0]
    assert (report.num_kept, report.num_dropped, report.num_empty) == (2, 2, 1)
    assert report.place(1) == f"{tmp_path / 't.tsv'}, line 5"
    assert "2 dropped as too long" in report.summary()
    store, report = encode_labelled(
        read, BOTH, tmp_path / "x", label_names=names, max_length=4, too_long="truncate"
    )
    assert sequences(tmp_path / "x") == [[1, 4, 5, 2], [1, 4, 2], [1, 4, 5, 2], [1, 5, 2]]
    assert store.labels.tolist() == [0, 1, 1, 0]
    assert (report.num_kept, report.num_truncated, report.num_tokens) == (4, 2, 6)
    with pytest.raises(UserError, match="leaves no room for text beside 2 marks"):
        encode_labelled(
            read, BOTH, tmp_path / "x", label_names=names, max_length=2, too_long="drop"
        )
    with pytest.raises(UserError, match="all 1 are longer than max_length 3"):
        encode_labelled(
            read.select(np.array([2])),
            BOTH,
            tmp_path / "x",
            label_names=names,
            max_length=3,
            too_long="drop",
        )


@given(first=st.integers(0, 20), second=st.integers(0, 20), room=st.integers(2, 39))
@settings(max_examples=300, deadline=None)
def test_the_longer_of_a_pair_gives_way_token_by_token(first: int, second: int, room: int) -> None:
    a, b = list(range(first)), list(range(second))
    if first + second <= room:
        return
    cut = cut_pair(a.copy(), b.copy(), room)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    assert cut == (a, b)


def test_pairs_are_cut_inside_their_marks(tmp_path: Path) -> None:
    pairs = labelled(["a b c d", "a", "a b c"], ["x", "y", "x"], ["e", "b c d e", "d e f"])
    store, report = encode_labelled(
        pairs, BOTH, tmp_path / "x", label_names=["x", "y"], max_length=6, too_long="truncate"
    )
    assert sequences(tmp_path / "x") == [
        [1, 4, 5, 2, 8, 2],
        [1, 4, 2, 5, 6, 2],
        [1, 4, 5, 2, 7, 2],
    ]
    assert store.seconds is not None
    assert store.seconds.tolist() == [4, 3, 4]
    assert report.num_truncated == 3
    with pytest.raises(UserError, match="no room for text beside 3 marks"):
        encode_labelled(
            pairs, BOTH, tmp_path / "x", label_names=["x", "y"], max_length=4, too_long="truncate"
        )


def test_many_chunks_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a " * (i % 5 + 1) for i in range(20)]
    many = labelled(texts, [str(i % 3) for i in range(20)], ["b " * (i % 2 + 1) for i in range(20)])
    settings_ = {"label_names": ["0", "1", "2"], "max_length": 8, "too_long": "drop"}
    encode_labelled(many, BOTH, tmp_path / "whole", **settings_)  # type: ignore[arg-type]
    monkeypatch.setattr("heedful.data.labelled.CHUNK", 3)
    encode_labelled(many, BOTH, tmp_path / "parts", **settings_)  # type: ignore[arg-type]
    kept = [i for i in range(20) if i % 5 + i % 2 + 5 <= 8]
    assert open_labelled(tmp_path / "parts").labels.tolist() == [i % 3 for i in kept]
    for ending in ("ids.npy", "offsets.npy", "labels.npy", "seconds.npy", "labels.json"):
        parts = (tmp_path / f"parts.{ending}").read_bytes()
        assert parts == (tmp_path / f"whole.{ending}").read_bytes()


def rewrite(**changes: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "x.labels.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        rewrite(label_names=["a"]),
        rewrite(label_names=[1, 2]),
        rewrite(label_names="ab"),
        rewrite(more=1),
        lambda d: (d / "x.labels.json").write_text("[]"),
        lambda d: (d / "x.labels.npy").unlink(),
        lambda d: (d / "x.seconds.npy").unlink(),
        lambda d: (d / "x.ids.npy").unlink(),
        lambda d: np.save(d / "x.labels.npy", np.array([0, 1, 0])),
        lambda d: np.save(d / "x.labels.npy", np.array([0, 2])),
        lambda d: np.save(d / "x.labels.npy", np.array([0, -1])),
        lambda d: np.save(d / "x.labels.npy", np.array([0.0, 1.0])),
        lambda d: np.save(d / "x.seconds.npy", np.array([1, 99])),
        lambda d: np.save(d / "x.seconds.npy", np.array([1])),
    ],
)
def test_a_damaged_store(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    pairs = labelled(["a b", "c"], ["x", "y"], ["c", "d"])
    encode_labelled(
        pairs, BOTH, tmp_path / "x", label_names=["x", "y"], max_length=9, too_long="error"
    )
    assert len(open_labelled(tmp_path / "x")) == 2
    damage(tmp_path)
    with pytest.raises(UserError, match="encode again"):
        open_labelled(tmp_path / "x")


def test_a_store_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = labelled(["a"], ["x"])

    def encode() -> None:
        encode_labelled(
            one, BOTH, tmp_path / "x", label_names=["x", "y"], max_length=9, too_long="error"
        )

    encode()

    def stop(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heedful.data.labelled.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        encode()
    with pytest.raises(UserError, match=r"cannot read .*labels\.json"):
        open_labelled(tmp_path / "x")


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
def test_sst2(tmp_path: Path) -> None:
    train, dev = (read_labelled([DATA / "sst2" / f"{name}.tsv"]) for name in ("train", "dev"))
    assert (len(train), len(dev)) == (6920, 872)  # as published
    names = train.label_names()
    assert names == ("0", "1")
    bpe = train_tokenizer(train.texts, kind="bpe", vocab_size=1000, template="both")
    store, report = encode_labelled(
        dev, bpe, tmp_path / "dev", label_names=names, max_length=40, too_long="truncate"
    )
    assert report.num_truncated > 0
    assert int(store.lengths.max()) == 40
    for i in range(0, len(store), 50):
        ids = store.ids[i].tolist()
        assert (ids[0], ids[-1]) == (1, 2)
        assert bpe.normalize(dev.texts[i]).startswith(bpe.decode(ids))
        assert names[store.labels[i]] == dev.labels[i]
