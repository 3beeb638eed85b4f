"""Writing whole files: what a path already is stays what it is."""

import os
import stat
import threading
from pathlib import Path

import pytest

from heedful.errors import UserError
from heedful.files import plain_name, replacing, write_json, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail_half_way() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_link_still_leads_to_what_was_written(tmp_path: Path) -> None:
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
