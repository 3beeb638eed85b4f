"""Blocks of lines: equal to lines read one by one, of files plain and compressed."""

import gzip
import io
import os
import pickle
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.bulk.job import BulkJob
from heedful.data import text_files
from heedful.data.prepared import content_key
from heedful.data.row_files import read_rows
from heedful.data.text_files import LineBlock, read_line_blocks, read_lines
from heedful.errors import UserError

LINE = st.text(st.sampled_from("ab \t\r\ufeffé今\u2028\x85"), max_size=8)


def by_hand(data: bytes) -> list[str]:
    """The lines of a file by the standard library."""
    lines = [line.decode() for line in io.BytesIO(data)]
    lines[:1] = [line.removeprefix("\ufeff") for line in lines[:1]]
    return [line.removesuffix("\n").removesuffix("\r") for line in lines]


def data_of(block: LineBlock) -> list[io.BytesIO]:
    """The lines of each side of a block."""
    return [io.BytesIO(block.data(side)) for side in range(len(block.paths))]


@given(
    lines=st.lists(st.tuples(LINE, LINE), max_size=30),
    ends=st.tuples(st.sampled_from(["\n", "\r\n"]), st.booleans()),
    limits=st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(1, 40)),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_blocks_have_the_lines_of_parallel_files(
    lines: list[tuple[str, str]],
    ends: tuple[str, bool],
    limits: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, limit in zip(("BLOCK_LINES", "BLOCK_BYTES", "_READ_BYTES"), limits, strict=True):
        monkeypatch.setattr(text_files, name, limit)
    end, is_ended = ends
    sides = [end.join(side) + end * is_ended for side in zip(*lines, strict=True)] or ["", ""]
    sides = [side if side or not lines else end for side in sides]  # one line, not an empty file
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, side in zip(paths, sides, strict=True):
        path.write_bytes(side.encode())
    expected = [by_hand(path.read_bytes()) for path in paths]
    if len(expected[0]) != len(expected[1]):  # the last line of one is empty
        with pytest.raises(UserError, match=f"a has {len(expected[0])} lines but .*b has"):
            list(read_line_blocks(paths))
        return
    blocks = list(read_line_blocks(paths))
    actual = [[t for block in blocks for t in block.texts(side)] for side in (0, 1)]
    assert actual == expected
    assert [list(read_lines(path)) for path in paths] == expected
    kept = ["".join(read_lines(path, keep_ends=True)) for path in paths]
    assert kept == [
        "\n".join(side) + "\n" * path.read_bytes().endswith(b"\n")
        for side, path in zip(expected, paths, strict=True)
    ]
    first = 1
    for block in blocks:
        assert block.first == first
        assert block.num_rows == len(block.texts(0)) <= limits[0]
        sizes = [sum(map(len, pair)) for pair in zip(*data_of(block), strict=True)]
        assert sum(sizes[:-1]) < limits[1]  # a line less is below the limit
        assert block is blocks[-1] or sum(sizes) >= limits[1] or len(sizes) == limits[0]
        half = block.num_rows // 2
        parts = [block.slice(0, half), block.slice(half, block.num_rows)] if half else [block]
        assert [part.first for part in parts] == [first, first + half][: len(parts)]
        for side in (0, 1):
            assert b"".join(part.data(side) for part in parts) == block.data(side)
        first += block.num_rows
    assert sum(block.num_bytes for block in blocks) == sum(len(p.read_bytes()) for p in paths)
    places = [block.plain_place for block in blocks]
    again = [*read_line_blocks(paths, places)]
    assert [(b.place, b.content) for b in again] == [(b.place, b.content) for b in blocks]
    assert [block.data(1) for block in again] == [block.data(1) for block in blocks]


def blocks_by_hand(
    sides: list[list[bytes]], most_lines: int, most_bytes: int, longest: int
) -> list[tuple[int, list[bytes]]] | int:
    """The first line and the sides of each block, line by line; or the number of a long line."""
    blocks: list[tuple[int, list[bytes]]] = []
    block, size, first = [b""] * len(sides), 0, 1
    for number, lines in enumerate(zip(*sides, strict=True), 1):
        if max(map(len, lines)) > longest:
            return number
        block = [data + line for data, line in zip(block, lines, strict=True)]
        size += sum(map(len, lines))
        if number - first + 1 == most_lines or size >= most_bytes:
            blocks.append((first, block))
            block, size, first = [b""] * len(sides), 0, number + 1
    return [*blocks, (first, block)] if size or not blocks else blocks


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 50), st.sampled_from([b"\n", b"\r\n"])),
        max_size=25,
    ),
    is_ended=st.booleans(),
    packed=st.lists(st.booleans(), min_size=1, max_size=3),
    limits=st.tuples(
        st.integers(1, 9), st.integers(1, 60), st.integers(1, 40), st.integers(20, 90)
    ),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_blocks_end_at_the_first_limit(
    rows: list[tuple[int, int, bytes]],
    is_ended: bool,
    packed: list[bool],
    limits: tuple[int, int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("BLOCK_LINES", "BLOCK_BYTES", "_READ_BYTES", "LONGEST_LINE")
    for name, limit in zip(names, limits, strict=True):
        monkeypatch.setattr(text_files, name, limit)
    paths, sides = [], []
    for number, is_packed in enumerate(packed):  # files with other lengths of the same lines
        sizes = [(row[number % 2], row[2]) for row in rows]
        lines = [b"x" * size + end for size, end in sizes]
        if lines and not is_ended:
            lines[-1] = lines[-1].rstrip() or b"y"
        paths.append(tmp_path / f"{number}{'.gz' * is_packed}")
        data = b"".join(lines)
        paths[-1].write_bytes(gzip.compress(data) if is_packed else data)
        sides.append(lines)
    expected = blocks_by_hand(sides, limits[0], limits[1], limits[3])
    if isinstance(expected, int):
        numbers = [[n for n, line in enumerate(side, 1) if len(line) > limits[3]] for side in sides]
        found = "|".join(
            f"{path.name}, line {of_path[0]}"
            for path, of_path in zip(paths, numbers, strict=True)
            if of_path
        )
        with pytest.raises(UserError, match=f"({found}): longer than"):
            list(read_line_blocks(paths))
        return
    blocks = [*read_line_blocks(paths)]
    assert [
        (block.first, [block.data(side) for side in range(len(paths))]) for block in blocks
    ] == expected
    assert sum(block.num_bytes for block in blocks) == sum(p.stat().st_size for p in paths)
    places = [(first, tuple(map(len, data))) for first, data in expected]
    found_places = [(b.place.first, b.place.sizes) for b in blocks if b.plain_place]
    assert found_places == (places if not any(packed) else [])


def test_a_wrong_byte_and_a_long_line_are_named_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_LINES", 4)
    monkeypatch.setattr(text_files, "_READ_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\n" * 10 + b"ab\xff\n" + b"abc\n" * 3)
    for read in (lambda: [*read_lines(path)], lambda: read_rows([path])):
        with pytest.raises(UserError, match=r"a\.txt, line 11: not UTF-8 at byte 3 of the line"):
            read()
    monkeypatch.setattr(text_files, "LONGEST_LINE", 20)
    for number, end in ((6, "\nabc\n"), (9, "\n"), (3, "")):
        path.write_text("abc\n" * (number - 1) + "y" * 21 + end)
        with pytest.raises(UserError, match=rf"a\.txt, line {number}: longer than"):
            list(read_lines(path))
    path.write_text("abc\n" + "y" * 19 + "\nabc\n")
    assert len(list(read_lines(path))) == 3


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_have_the_rows_of_plain_ones(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_READ_BYTES", 100)
    data = "".join(f"{i}\ttext {i}\n" for i in range(500)).encode()
    plain, packed = tmp_path / "a.tsv", tmp_path / f"a.tsv{ending}"
    plain.write_bytes(data)

    def compress(data: bytes) -> bytes:
        if ending == ".gz":
            return gzip.compress(data)
        with pa.BufferOutputStream() as sink, pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
            stream.flush()
            stream.close()
            return bytes(sink.getvalue())

    packed.write_bytes(compress(data[:900]) + compress(data[900:]))  # as after `cat`
    fields = {"src": 1, "tgt": 2}
    rows, expected = read_rows([packed], fields), read_rows([plain], fields)
    assert rows.columns == expected.columns
    assert len(rows) == 500
    assert rows.report == expected.report
    renamed = tmp_path / "a.tsv"  # the format is found by the content, too
    renamed.write_bytes(packed.read_bytes())
    assert read_rows([renamed], fields).columns == expected.columns
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged"):
        read_rows([packed], fields)
    packed.write_bytes(data)
    with pytest.raises(UserError, match=f"is named {ending} but is not"):
        read_rows([packed], fields)


def test_blocks_of_plain_files_are_sent_as_places_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_LINES", 100)
    plain, packed = tmp_path / "a.txt", tmp_path / "b.gz"
    lines = [f"ligne {n} é\r\n".encode() for n in range(1_000)]
    plain.write_bytes(b"".join(lines)[:-2])
    packed.write_bytes(gzip.compress(b"".join(lines)))
    blocks = [*read_line_blocks([plain, packed])]
    assert [block.plain_place for block in blocks] == [None] * 10
    sent = [pickle.dumps(block) for block in blocks]
    for received, block, data in zip(map(pickle.loads, sent), blocks, sent, strict=True):
        assert [received.data(side) for side in (0, 1)] == [block.data(side) for side in (0, 1)]
        assert len(data) < len(block.data(1)) + 400  # the bytes of the packed file alone
    plain.write_bytes(plain.read_bytes()[:-1])
    with pytest.raises(UserError, match="became shorter while it was read"):
        pickle.loads(sent[-1]).data(0)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_beside_utf_8_is_named(encoding: str, tmp_path: Path) -> None:
    """It was an error about the numbers of lines."""
    (tmp_path / "a").write_text("x\ny\n")
    (tmp_path / "b").write_bytes("\ufeffਊ x\ny\n".encode(encoding))
    with pytest.raises(UserError, match="b is UTF-16; convert it to UTF-8"):
        list(read_line_blocks([tmp_path / "a", tmp_path / "b"]))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pipe_is_read_once_and_refused_where_it_is_read_again(
    is_packed: bool, tmp_path: Path
) -> None:
    pipe, data = tmp_path / "pipe", b"a dog\n\nthe cat\n" * 9_000
    os.mkfifo(pipe)
    content = gzip.compress(data) if is_packed else data
    writer = threading.Thread(target=lambda: pipe.write_bytes(content))
    writer.start()
    assert [*read_lines(pipe)] == data.decode().split("\n")[:-1]
    writer.join()
    with pytest.raises(UserError, match=r"pipe is a pipe, which .*; write it to a file, and name"):
        content_key([pipe])
    with pytest.raises(UserError, match="pipe is a pipe, which can be read once"):
        BulkJob(task="classify", model=tmp_path, inputs=[pipe], output=tmp_path / "o").reader()
