"""Documents: what files hold, how a tail is held out, and ids on disk with their counts."""

import gzip
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.documents import (
    TextReport,
    TokenCounts,
    encode_documents,
    open_documents,
    read_documents,
    split_tail,
)
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

WORD = train_tokenizer(["a b c d e f g h"], kind="word")
BYTE = train_tokenizer([], kind="byte")


def file_of(directory: Path, name: str, content: str | bytes) -> Path:
    path = directory / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    return path


TEXT = "\ufeffone\n two \r\n\n \t\nthree\n\n\nfour\r\nfive"


@pytest.mark.parametrize(
    ("unit", "expected", "places", "num_empty"),
    [
        ("line", ["one", " two ", "three", "four", "five"], [1, 2, 5, 8, 9], 4),
        ("paragraph", ["one\n two ", "three", "four\nfive"], [1, 5, 8], 0),
        ("file", [TEXT[1:]], [1], 0),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_units(
    tmp_path: Path, name: str, unit: str, expected: list[str], places: list[int], num_empty: int
) -> None:
    path = file_of(tmp_path, name, TEXT)
    other = file_of(tmp_path, "other", "last\n")
    documents, report = read_documents([path, other], unit)  # type: ignore[arg-type]
    assert documents == [*expected, "last\n" if unit == "file" else "last"]
    assert report == TextReport(num_lines=10, num_kept=len(documents), num_empty=num_empty)
    assert [report.place(i) for i in range(len(documents))] == [
        *(f"{path}, line {line}" for line in places),
        f"{other}, line 1",
    ]


@given(text=st.text(alphabet=st.sampled_from("ab \t\r\n\x0b\u2028é今"), min_size=1))
@settings(max_examples=200, deadline=None)
def test_a_file_is_its_text_and_units_lose_only_blank_lines(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = file_of(tmp_path_factory.getbasetemp(), "whole.txt", text)
    if not text.strip():
        for unit in ("line", "paragraph", "file"):
            with pytest.raises(UserError, match=r"whole\.txt holds no text"):
                read_documents([path], unit)  # type: ignore[arg-type]
        return
    assert read_documents([path], "file")[0] == [text]
    lines, by_line = read_documents([path], "line")
    paragraphs, by_paragraph = read_documents([path], "paragraph")
    assert [line for paragraph in paragraphs for line in paragraph.split("\n")] == lines
    raw = text.split("\n")
    num_lines = len(raw) - (raw[-1] == "")
    assert by_line.num_lines == by_paragraph.num_lines == num_lines
    assert by_line.num_kept + by_line.num_empty == num_lines


def test_jsonl_is_a_document_an_object_whatever_the_unit(tmp_path: Path) -> None:
    texts = ["a\n\nb\r\n", "", "今 天"]
    content = "\n".join(json.dumps({"body": text, "n": 1}) for text in texts) + "\n\n"
    for name, format in (("t.jsonl", None), ("t.jsonl.gz", None), ("t.txt", "jsonl")):
        path = file_of(tmp_path, name, content)
        for unit in ("line", "paragraph", "file"):
            documents, report = read_documents(
                [path],
                unit,  # type: ignore[arg-type]
                text_field="body",
                format=format,  # type: ignore[arg-type]
            )
            assert documents == [texts[0], texts[2]]
            assert (report.num_lines, report.num_empty) == (4, 2)
            assert report.place(1) == f"{path}, line 3"
            assert report.summary() == "4 lines read, 2 texts kept; 2 dropped as empty"
    plain = read_documents([file_of(tmp_path, "t.jsonl", "{}")], "line", format="text")
    assert plain[0] == ["{}"]


PACKED = gzip.compress(b"some text\n" * 50, mtime=0)


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"fine\nfine\nbad \xff\xfe\n", r"t\.txt, line 3: not UTF-8 at byte 5"),
        ("t.txt", b"", r"t\.txt holds no text; leave it out"),
        ("t.txt", b"\n \t\r\n\n", r"t\.txt holds no text"),
        ("t.txt", b"\xef\xbb\xbf", r"t\.txt holds no text"),
        ("t.gz", b"plain\n", r"t\.gz is named \.gz but is not gzip"),
        ("t.gz", PACKED[:-8] + b"\0" * 8, r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[: len(PACKED) // 2], r"t\.gz is damaged gzip"),
        ("t.jsonl", b'{"text": "a"}\n{"text": ', r"t\.jsonl, line 2: not JSON"),
        ("t.jsonl", b"[" * 100_000, r"t\.jsonl, line 1: not JSON"),
        ("t.jsonl", b'"text"', r"t\.jsonl, line 1: not a JSON object"),
        ("t.jsonl", b'{"body": "a"}', r"t\.jsonl, line 1: no key 'text' .found: 'body'"),
        ("t.jsonl", b'{"text": 3}', r"t\.jsonl, line 1: 'text' is not a text"),
        ("t.jsonl", b'{"text": "\\ud83d"}', r"t\.jsonl, line 1: 'text' holds half"),
        ("t.jsonl", b'{"text": " "}\n', r"t\.jsonl holds no text"),
    ],
)
def test_broken_files(tmp_path: Path, unit: str, name: str, content: bytes, message: str) -> None:
    good = file_of(tmp_path, "good.jsonl", '{"text": "a"}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_documents([good, tmp_path / name], unit)  # type: ignore[arg-type]


def test_files_and_units_that_are_not_there(tmp_path: Path) -> None:
    for unit in ("line", "paragraph", "file"):
        with pytest.raises(UserError, match=r"cannot read .*none\.txt: No such file"):
            read_documents([tmp_path / "none.txt"], unit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
            read_documents([tmp_path], unit)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no file is named"):
        read_documents([], "line")


DOCUMENTS = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=9)
FRACTIONS = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.1, 0.3, 0.5, 0.9]))


@given(documents=DOCUMENTS, fraction=FRACTIONS, unit=st.sampled_from(["line", "paragraph", "file"]))
@settings(max_examples=300, deadline=None)
def test_a_tail_is_the_last_part_of_the_characters(
    documents: list[str], fraction: float, unit: str
) -> None:
    total = sum(map(len, documents))
    exact = total * (1 - fraction)
    border = int(exact + 1e-9)
    # The places where a document ends, the nearest first, of equally near ones the later.
    ends = sorted(accumulate(map(len, documents), initial=0), key=lambda e: (abs(e - border), -e))
    expected = border if unit == "file" else ends[0]
    if expected in (0, total):
        with pytest.raises(UserError, match="leaves none to"):
            split_tail(documents, fraction, unit)  # type: ignore[arg-type]
        return
    train, held_out = split_tail(documents, fraction, unit)  # type: ignore[arg-type]
    assert "".join(train + held_out) == "".join(documents)
    assert len("".join(train)) == expected
    assert unit == "file" or train + held_out == documents
    assert all(train)
    assert all(held_out)


def test_tails_of_small_texts() -> None:
    assert split_tail(["0123456789"], 0.1, "file") == (["012345678"], ["9"])
    assert split_tail(["0123456789"], 0.9, "file") == (["0"], ["123456789"])  # not 0.99 of one
    assert split_tail(["01234", "56789"], 0.5, "file") == (["01234"], ["56789"])
    assert split_tail(["01234", "56789"], 0.3, "file") == (["01234", "56"], ["789"])
    assert split_tail(["01234", "56789"], 0.3, "line") == (["01234"], ["56789"])
    assert split_tail(["0123", "45", "6789"], 0.5, "line") == (["0123", "45"], ["6789"])  # a tie
    for documents, fraction, unit, side in (
        (["0123456789"], 0.1, "line", "hold out"),
        (["0123456789"], 0.9, "line", "train on"),
        (["0"], 0.5, "file", "train on"),
    ):
        with pytest.raises(UserError, match=f"leaves none to {side}"):
            split_tail(documents, fraction, unit)  # type: ignore[arg-type]
    for fraction in (0.0, 1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="set it between 0 and 1"):
            split_tail(["a", "b"], fraction, "line")


def test_documents_on_disk_and_their_counts(tmp_path: Path) -> None:
    documents = ["a b", "é zz\na", "c"]
    for marks in (True, False):
        counts = encode_documents(documents, WORD, tmp_path / "x", marks=marks)
        assert counts == TokenCounts(
            num_documents=3,
            num_characters=10,
            num_bytes=11,
            num_words=6,
            num_tokens=6,
            num_unknown=2,
            marks=marks,
        )
        store, again = open_documents(tmp_path / "x")
        assert again == counts
        assert len(store.ids) == counts.num_stored == (12 if marks else 6)
        ids = [[4, 5], [3, 3, 4], [6]]
        assert [store[i].tolist() for i in range(3)] == [
            [1, *text, 2] if marks else text for text in ids
        ]


@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=9),
    marks=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_bytes_come_back_and_are_counted(
    documents: list[str], marks: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    if not any(documents):
        with pytest.raises(UserError, match="no token of the text"):
            encode_documents(documents, BYTE, path, marks=marks)
        return
    counts = encode_documents(documents, BYTE, path, marks=marks)
    store, _ = open_documents(path)
    assert [BYTE.decode(store[i].tolist()) for i in range(len(store))] == documents
    assert counts.num_tokens == counts.num_bytes == len("".join(documents).encode())
    assert counts.num_characters == len("".join(documents))
    assert counts.num_words == sum(len(text.split()) for text in documents)


def test_many_chunks_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["a " * (i % 7) + "b" for i in range(50)]
    whole = encode_documents(documents, WORD, tmp_path / "whole", marks=True)
    monkeypatch.setattr("heedful.data.documents._CHUNK", 20)
    sizes: list[int] = []
    encode_batch = WORD.encode_batch

    def counted(texts: list[str]) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return encode_batch(texts)

    monkeypatch.setattr(WORD, "encode_batch", counted)
    assert encode_documents(documents, WORD, tmp_path / "parts", marks=True) == whole
    assert len(sizes) > 10
    assert max(sizes) <= 20
    for ending in (".ids.npy", ".offsets.npy", ".counts.json"):
        parts = (tmp_path / f"parts{ending}").read_bytes()
        assert parts == (tmp_path / f"whole{ending}").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [content],
        lambda content: content | {"more": 1},
        lambda content: {k: v for k, v in content.items() if k != "marks"},
        lambda content: content | {"num_words": "2"},
        lambda content: content | {"marks": 1},
        lambda content: content | {"num_tokens": 3},
        lambda content: content | {"num_documents": 2},
    ],
)
def test_counts_that_are_not_those_of_the_store(
    tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    encode_documents(["a b"], WORD, tmp_path / "x", marks=True)
    path = tmp_path / "x.counts.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match="encode again"):
        open_documents(tmp_path / "x")


def test_no_counts_stand_beside_ids_that_were_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_documents(["a b"], WORD, tmp_path / "x", marks=True)

    def stop(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heedful.data.documents.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        encode_documents(["c d"], WORD, tmp_path / "x", marks=True)
    with pytest.raises(UserError, match=r"cannot read .*x\.counts\.json"):
        open_documents(tmp_path / "x")


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
def test_tiny_shakespeare_is_split_as_by_convention(tmp_path: Path) -> None:
    path = DATA / "tinyshakespeare" / "input.txt"
    documents, report = read_documents([path], "file")
    text = path.read_bytes().decode()
    assert documents == [text]
    assert report.num_lines == text.count("\n") == 40_000
    train, held_out = split_tail(documents, 0.1, "file")
    border = int(len(text) * 0.9)
    assert (train, held_out) == ([text[:border]], [text[border:]])
    assert (len(train[0]), len(held_out[0])) == (1_003_854, 111_540)
    counts = encode_documents(held_out, BYTE, tmp_path / "valid", marks=False)
    store, _ = open_documents(tmp_path / "valid")
    assert counts.num_tokens == counts.num_characters == 111_540
    assert BYTE.decode(store[0].tolist()) == held_out[0]
