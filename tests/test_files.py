"""Atomic writes: a path keeps its kind, and is replaced completely or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from heedful.errors import UserError
from heedful.files import (
    MODEL_FILES,
    atomic_open,
    atomic_replace,
    check_new,
    check_writable,
    parse_json,
    plain_name,
    read_text,
    write_directory,
    write_json,
    write_lines,
    write_text,
)

pytestmark = pytest.mark.whole


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail_half_way() -> None:
        with atomic_open(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_folders_made_for_a_file_that_is_not_written_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("new/inner/file", "old/inner/file"):
        with pytest.raises(ZeroDivisionError), atomic_replace(tmp_path / name):
            1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    with atomic_replace(tmp_path / "new/inner/file") as beside:
        beside.touch()
    assert (tmp_path / "new/inner/file").is_file()


def test_a_link_still_points_to_the_written_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A rename over a device file would destroy it for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(timeout=10)
    assert "".join(read) == '{\n  "a": 1\n}\n'
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(UserError, match="No space left"):
        write_text(Path("/dev/full"), "something")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@pytest.mark.parametrize(
    "name", ["/a", "../a", "a/b", "..", ".", "", "a\\b", "C:a", "a\0", 1, None]
)
def test_a_name_read_from_a_file_is_never_a_path(name: object) -> None:
    assert plain_name("model-1 (2).safetensors", "index.json") == "model-1 (2).safetensors"
    with pytest.raises(UserError, match=r"index\.json must name a file beside it"):
        plain_name(name, "index.json")


OWN = ("text",)


def fill(text: str):
    return lambda directory: write_text(directory / "text", text)


@pytest.mark.parametrize("exchange", [2, 0], ids=["at once", "without the system's exchange"])
def test_a_directory_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: int
) -> None:
    monkeypatch.setattr("heedful.files._EXCHANGE", exchange)  # 0 refuses existing files
    path = tmp_path / "model"
    write_directory(path, fill("old"), OWN)

    def fail_half_way(directory: Path) -> None:
        fill("half")(directory)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_directory(path, fail_half_way, OWN)
    assert (path / "text").read_text() == "old"
    write_directory(path, fill("new"), OWN)
    assert (path / "text").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_files_of_killed_writers_are_removed_and_those_of_running_ones_kept(
    tmp_path: Path,
) -> None:
    dead, living = tmp_path / ".model.999999999.tmp", tmp_path / f".model.{os.getppid()}.tmp"
    scratch = tmp_path / ".model.folder.999999999.tmp"
    others = [tmp_path / ".models.999999999.tmp", tmp_path / f".model.align.{os.getpid()}.tmp"]
    for folder in (dead, living, scratch, *others):
        folder.mkdir()
    write_directory(tmp_path / "model", fill("new"))
    assert [*map(Path.exists, (dead, scratch, living, *others))] == [False, False, True, True, True]


def test_existing_paths_are_refused(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    check_new(full)
    check_new(tmp_path / "new" / "model")
    write_text(full / "config.json", "{}")
    write_text(full / "sub" / "thesis", "years of work")
    (tmp_path / "nowhere").symlink_to("nothing")
    owns = {"config.json", "sub"}
    check_new(full, overwrite=True, owns=owns)
    for path, options in (
        (full, {}),
        (full, {"overwrite": True, "owns": {"config.json"}}),
        (full, {"overwrite": True, "owns": owns, "source": full / "sub"}),
        (full / "config.json", {"overwrite": True}),
        (full / "config.json" / "new", {}),
        (tmp_path / "nowhere", {}),
        (Path("/"), {"overwrite": True}),
        (Path(), {"overwrite": True}),
        (full / "..", {"overwrite": True}),
    ):
        with pytest.raises(UserError):
            check_new(path, **options)


def test_a_folder_without_weights_is_no_model_to_replace(tmp_path: Path) -> None:
    path = tmp_path / "app"
    path.mkdir()
    for name in ("config.json", "example.py"):
        (path / name).write_text("the user's")
        with pytest.raises(UserError, match="holds no model, so it is not replaced"):
            check_new(path, overwrite=True, owns=MODEL_FILES)
        with pytest.raises(UserError, match="holds no model"):
            write_directory(path, fill("new"))
    (path / "model.safetensors").touch()
    check_new(path, overwrite=True, owns=MODEL_FILES)


def test_an_unwritable_file_is_refused_at_the_start(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("file", "new/folder/file", "/dev/null"):
        check_writable(tmp_path / path)
    for path in ("", "file/inside", "loop", "a" * 300):
        with pytest.raises(UserError, match="cannot write"):
            check_writable(tmp_path / path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested"),
        ("9" * 5_000, "digits"),
        ("NaN", "NaN"),
        ("[-Infinity]", "Infinity"),
        ('"\\ud800"', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
        ("{", "not JSON"),
    ],
)
def test_invalid_json_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^where.*{problem}"):
        parse_json(text, "where")


def test_valid_json_is_read() -> None:
    assert parse_json('["\\ud83e\\udd9c", 1e3]', "where") == ["\U0001f99c", 1000.0]


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(UserError, match="larger than"):
        read_text(Path("/dev/zero"), most=1_000)


def test_lines_are_written_one_for_each_text(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert write_lines(path, ["a", "b\nc\r\n", "", "d\u2028e"]) == 2
    assert path.read_text() == "a\nb c \n\nd e\n"
