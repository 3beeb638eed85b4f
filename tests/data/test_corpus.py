"""Corpora: lines and pairs from raw files, every kind of broken one, and ids on disk."""

import gzip
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.corpus import CorpusReport, PairSource, read_pairs
from heedful.data.lines import read_lines
from heedful.data.pair_store import encode_pairs, open_pairs
from heedful.data.store import open_ids, pack_ids, write_ids
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

WORD = train_tokenizer(["a b c d e f g h"], kind="word")


def parallel(directory: Path, src: str, tgt: str) -> PairSource:
    (directory / "x.src").write_text(src, newline="")
    (directory / "x.tgt").write_text(tgt, newline="")
    return PairSource(src=directory / "x.src", tgt=directory / "x.tgt")


@given(lines=st.lists(st.text().filter(lambda t: "\n" not in t and not t.endswith("\r"))))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_lines_come_back_as_written(
    packed: bool, end: str, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / ("lines.gz" if packed else "lines.txt")
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    if lines and lines[0].startswith("\ufeff"):
        lines[0] = lines[0][1:]
    assert list(read_lines(path)) == lines


def test_only_newlines_end_lines_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes("\ufeffa\u2028b\x0bc\x85d\re\r\n\ufefff\n\nlast".encode())
    assert list(read_lines(path)) == ["a\u2028b\x0bc\x85d\re", "\ufefff", "", "last"]
    path.write_bytes(gzip.compress(b"packed\n"))  # without the name
    assert list(read_lines(path)) == ["packed"]
    path.write_bytes(b"")
    assert list(read_lines(path)) == []


# No clock and no chance in it: workers that collect in parallel must see the same names.
PACKED = gzip.compress(random.Random(0).randbytes(200).hex().encode() + b"\n" * 50, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"fine\nfine\nbad \xff\xfe\n", r"t\.txt, line 3: not UTF-8 at byte 5"),
        ("t.txt", b"\xed\xa0\x80\n", r"t\.txt, line 1: not UTF-8"),
        ("t.gz", gzip.compress(b"fine\nb\xc3\n", mtime=0), r"t\.gz, line 2: not UTF-8"),
        ("t.gz", b"plain\n", r"t\.gz is named \.gz but is not gzip"),
        ("t.gz", b"", r"t\.gz is named \.gz but is not gzip"),
        ("t.gz", PACKED[: len(PACKED) // 2], r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:5], r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:-8] + b"\0" * 8, r"t\.gz is damaged gzip"),
        ("t.gz", PACKED[:40] + b"\xff" * 9 + PACKED[49:], r"t\.gz is damaged gzip"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_lines(tmp_path / name))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.txt: No such file"):
        list(read_lines(tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        list(read_lines(tmp_path))
    locked = tmp_path / "locked"
    locked.touch(mode=0)
    if not os.access(locked, os.R_OK):  # root may read everything
        with pytest.raises(UserError, match="Permission denied"):
            list(read_lines(locked))


def test_parallel_files(tmp_path: Path) -> None:
    source = parallel(tmp_path, "a\n\n c \n\t\nlast", "b\nx\nd\ny\n\u3000\n")
    pairs, report = read_pairs(source)
    assert pairs == [("a", "b"), (" c ", "d")]
    assert report == CorpusReport(
        num_lines=5, num_kept=2, num_empty=3, num_empty_src=2, num_empty_tgt=1
    )
    assert [report.place(i).split(", ")[-1] for i in range(2)] == ["line 1", "line 3"]
    assert report.summary() == (
        "5 lines read, 2 pairs kept; 3 dropped as empty (source 2, target 1)"
    )


@pytest.mark.parametrize(("src", "tgt"), [("a\nb\nc\n", "a\n"), ("a\n", "a\nb\nc\n")])
def test_files_of_different_length(tmp_path: Path, src: str, tgt: str) -> None:
    numbers = rf"x\.src has {src.count('a') + src.count('b') + src.count('c')} lines but .*x\.tgt"
    with pytest.raises(UserError, match=rf"{numbers} has {len(tgt.split())};"):
        read_pairs(parallel(tmp_path, src, tgt))


@pytest.mark.parametrize(("src", "tgt"), [("", ""), ("\n\n", "a\nb\n"), ("a\n \n", " \nb\n")])
def test_an_empty_corpus(tmp_path: Path, src: str, tgt: str) -> None:
    with pytest.raises(UserError, match=r"corpus is empty: .*x\.src and .*x\.tgt"):
        read_pairs(parallel(tmp_path, src, tgt))


def test_tsv_and_jsonl(tmp_path: Path) -> None:
    tsv, jsonl, other = tmp_path / "p.tsv", tmp_path / "p.jsonl.gz", tmp_path / "p.txt"
    tsv.write_text("a\tb\n\n\td\n今天\tf g\n")
    entries: list[dict[str, object]] = [{"src": "a", "tgt": "b", "n": 1}, {"src": "", "tgt": "d"}]
    jsonl.write_bytes(gzip.compress("\n".join(map(json.dumps, entries)).encode()))
    other.write_text('{"en": "a", "de": "b"}\n')
    assert read_pairs(PairSource(file=tsv))[0] == [("a", "b"), ("今天", "f g")]
    assert read_pairs(PairSource(file=tsv))[1].num_empty == 2
    assert read_pairs(PairSource(file=jsonl))[0] == [("a", "b")]
    named = PairSource(file=other, format="jsonl", src_field="de", tgt_field="en")
    assert read_pairs(named)[0] == [("b", "a")]
    pairs, report = read_pairs([PairSource(file=tsv), named, PairSource(file=jsonl)])
    assert pairs == [("a", "b"), ("今天", "f g"), ("b", "a"), ("a", "b")]
    assert (report.num_lines, report.num_kept, report.num_empty) == (7, 4, 3)
    assert [report.place(i) for i in (1, 2)] == [f"{tsv}, line 4", f"{other}, line 1"]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("p.tsv", "a", "line 2: 1 columns"),
        ("p.tsv", "a\tb\tc", "line 2: 3 columns"),
        ("p.jsonl", '{"src": "a"', "line 2: not JSON"),
        ("p.jsonl", "[1]", "line 2: not a JSON object"),
        ("p.jsonl", '{"src": "a"}', "line 2: no key 'tgt' .found: 'src'.; set"),
        ("p.jsonl", '{"src": "a", "tgt": null}', "line 2: 'tgt' is not a text"),
        ("p.jsonl", '{"src": "a", "tgt": "\\ud83d"}', "line 2: 'tgt' holds half"),
    ],
)
def test_lines_that_are_no_pair(tmp_path: Path, name: str, line: str, message: str) -> None:
    good = "a\tb" if name == "p.tsv" else '{"src": "a", "tgt": "b"}'
    (tmp_path / name).write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=message):
        read_pairs(PairSource(file=tmp_path / name))


def test_sources_that_cannot_be() -> None:
    p = Path("p.tsv")
    for make in (
        PairSource,
        lambda: PairSource(src=p),
        lambda: PairSource(src=p, tgt=p, file=p),
        lambda: PairSource(tgt=p, file=p),
    ):
        with pytest.raises(UserError, match="either src and tgt, or file"):
            make()
    with pytest.raises(UserError, match="write it as one of them"):
        PairSource(file=Path("p.csv"))


@given(
    sequences=st.lists(st.lists(st.integers(0, 69_999), max_size=9), max_size=9),
    wide=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ids_come_back_in_the_dtype_of_the_vocabulary(
    sequences: list[list[int]], wide: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    vocab_size = 70_000 if wide else 2**16
    sequences = [[i % vocab_size for i in ids] for ids in sequences]
    path = tmp_path_factory.getbasetemp() / "ids"
    write_ids(path, sequences, vocab_size)
    store = open_ids(path)
    assert store.ids.dtype == (np.uint32 if wide else np.uint16)
    assert len(store) == len(sequences)
    assert [store[i].tolist() for i in range(len(store))] == sequences
    assert store.lengths.tolist() == [len(ids) for ids in sequences]
    assert store.lengths.dtype == np.int64


def test_the_largest_id_of_each_dtype(tmp_path: Path) -> None:
    for vocab_size in (2**16, 2**16 + 1, 2**32):
        write_ids(tmp_path / "v", [[0, vocab_size - 1]], vocab_size)
        assert open_ids(tmp_path / "v")[0].tolist() == [0, vocab_size - 1]
    with pytest.raises(AssertionError):
        write_ids(tmp_path / "v", [[10]], 10)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["s.ids.npy", "s.offsets.npy"])
@pytest.mark.parametrize(
    "damage",
    [
        cut_in_half,
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not numpy at all"),
        lambda path: path.unlink(),
        lambda path: np.save(path, np.array([0.0, 2.0])),
        lambda path: np.save(path, np.array([{}], dtype=object)),
        lambda path: np.save(path, np.zeros((2, 2), np.int64)),
        lambda path: np.save(path, np.array([3, 1], dtype=np.int64)),
    ],
)
def test_a_damaged_store(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    write_ids(tmp_path / "s", [[1, 2], list(range(300))], 300)
    assert len(open_ids(tmp_path / "s")) == 2
    damage(tmp_path / name)
    with pytest.raises(UserError, match="encode again"):
        open_ids(tmp_path / "s")


def test_encoded_pairs_end_in_eos_and_unknown_words_are_counted(tmp_path: Path) -> None:
    pairs = [("a b", "c"), ("zz a", "d zz zz")]
    store, report = encode_pairs(pairs, WORD, WORD, tmp_path, max_length=9, too_long="error")
    for again in (store, open_pairs(tmp_path)):
        assert [again.src[i].tolist() for i in (0, 1)] == [[4, 5, 2], [3, 4, 2]]
        assert [again.tgt[i].tolist() for i in (0, 1)] == [[6, 2], [7, 3, 3, 2]]
        assert again.src_lengths.tolist() == [3, 3]
        assert again.tgt_lengths.tolist() == [2, 4]
    assert report.summary() == (
        "2 lines read, 2 pairs kept; unknown tokens: source 1 (25.00%), target 2 (50.00%)"
    )


def test_over_long_pairs(tmp_path: Path) -> None:
    source = parallel(tmp_path, "a\n\na b c\na b c d\ne\n", "b\nx\na\na\na b c d e\n")
    pairs, read = read_pairs(source)
    message = r"x\.src and .*x\.tgt, line 4: 5 source and 2 target tokens .* max_length 4; raise"
    with pytest.raises(UserError, match=message):
        encode_pairs(pairs, WORD, WORD, tmp_path, max_length=4, too_long="error", report=read)
    assert not list(tmp_path.glob("*.npy"))
    store, report = encode_pairs(
        pairs, WORD, WORD, tmp_path, max_length=4, too_long="drop", report=read
    )
    assert len(store) == report.num_kept == 2
    assert (report.num_lines, report.num_empty, report.num_dropped) == (5, 1, 2)
    assert "2 dropped as too long" in report.summary()
    store, report = encode_pairs(
        pairs, WORD, WORD, tmp_path, max_length=4, too_long="truncate", report=read
    )
    assert (report.num_kept, report.num_dropped, report.num_truncated) == (4, 0, 2)
    assert store.src[2].tolist() == [4, 5, 6, 2]
    assert store.tgt[2].tolist() == [4, 2]
    assert store.tgt[3].tolist() == [4, 5, 6, 2]
    with pytest.raises(UserError, match="all 4 are longer than max_length 1"):
        encode_pairs(pairs, WORD, WORD, tmp_path, max_length=1, too_long="drop")


def test_many_chunks_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.data.pair_store.CHUNK", 3)
    pairs = [("a " * (i % 5 + 1), "b " * (i % 3 + 1)) for i in range(20)]
    store, _ = encode_pairs(pairs, WORD, WORD, tmp_path, max_length=4, too_long="drop")
    expected = [(s.split(), t.split()) for s, t in pairs if len(s.split()) < 4]
    assert [store.src[i].tolist() for i in range(len(store))] == [
        [4] * len(s) + [2] for s, _ in expected
    ]
    assert [store.tgt[i].tolist() for i in range(len(store))] == [
        [5] * len(t) + [2] for _, t in expected
    ]


def test_sides_of_different_length_are_refused(tmp_path: Path) -> None:
    write_ids(tmp_path / "src", [[1], [2]], 10)
    write_ids(tmp_path / "tgt", [[1]], 10)
    with pytest.raises(UserError, match="2 sources but 1 targets"):
        open_pairs(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_ids(tmp_path / "file" / "src", [[1]], 10)


def test_a_store_in_memory_is_the_one_on_disk(tmp_path: Path) -> None:
    write_ids(tmp_path / "s", [[1, 2], [], [3]], 10)
    stored, packed = open_ids(tmp_path / "s"), pack_ids([[1, 2], [], [3]], 10)
    assert stored.ids.tolist() == packed.ids.tolist()
    assert stored.offsets.tolist() == packed.offsets.tolist() == [0, 2, 2, 3]
    assert stored.ids.dtype == packed.ids.dtype


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("src", "tgt"),
    [
        ("multi30k/val.en.gz", "multi30k/val.de.gz"),
        ("tatoeba/val.en.gz", "tatoeba/val.zh.gz"),
    ],
)
def test_real_corpora_encode_and_decode(tmp_path: Path, src: str, tgt: str) -> None:
    pairs, read = read_pairs(PairSource(src=DATA / src, tgt=DATA / tgt))
    joint = train_tokenizer([text for pair in pairs for text in pair], kind="bpe", vocab_size=4000)
    store, report = encode_pairs(
        pairs, joint, joint, tmp_path, max_length=256, too_long="error", report=read
    )
    assert len(store) == report.num_kept == len(pairs) == read.num_lines - read.num_empty
    assert (report.num_src_unknown, report.num_tgt_unknown) == (0, 0)
    for i in range(len(store)):
        assert joint.decode(store.src[i].tolist()) == joint.normalize(pairs[i][0])
        assert joint.decode(store.tgt[i].tolist()) == joint.normalize(pairs[i][1])


def test_pairs_that_are_set_apart_keep_their_lines(tmp_path: Path) -> None:
    for name, lines in {"a.tsv": "x\t1\n\t\ny\t2\nz\t3\n", "b.tsv": "u\t4\nv\t5\n"}.items():
        (tmp_path / name).write_text(lines, encoding="utf-8")
    pairs, report = read_pairs([PairSource(file=tmp_path / name) for name in ("a.tsv", "b.tsv")])
    chosen = [1, 2, 4]
    apart = replace(report, origins=report.origins_of(chosen))
    assert [apart.place(i) for i in range(3)] == [report.place(i) for i in chosen]
    assert apart.place(0) == f"{tmp_path / 'a.tsv'}, line 3"
    assert pairs[chosen[0]] == ("y", "2")
