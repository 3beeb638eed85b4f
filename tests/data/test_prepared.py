"""Prepared data: prepared once per key, complete or not at all, and refused if changed."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heedful.data import prepared
from heedful.data.columns import Columns, open_columns, pack_ids, write_columns
from heedful.data.prepared import FORMAT, content_key, prepare_once
from heedful.data.reports import DataReport
from heedful.errors import UserError


def fill(directory: Path) -> None:
    columns = {"x": pack_ids([[1, 2], [3]], 10), "n": np.arange(2)}
    write_columns(directory / "train", Columns(columns, DataReport(2, 2)))
    (directory / "tokenizer.json").write_text("{}")


def never(directory: Path) -> None:
    raise AssertionError("prepared a second time")


def test_each_format_version_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare_once(tmp_path, {}, fill)
    monkeypatch.setattr("heedful.data.prepared.FORMAT", FORMAT + 1)
    assert prepare_once(tmp_path, {}, fill) != path


def test_only_equal_keys_share_a_folder(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a")
    path = prepare_once(tmp_path / "cache", {"files": content_key([text]), "max_length": 9}, fill)
    assert path.parent == tmp_path / "cache"
    assert open_columns(path / "train").sequences("x")[0].tolist() == [1, 2]
    again = {"max_length": 9, "files": content_key([text])}
    assert prepare_once(tmp_path / "cache", again, never) == path
    text.write_text("b")
    others = [
        prepare_once(tmp_path / "cache", {"files": content_key([text]), "max_length": 9}, fill),
        prepare_once(tmp_path / "cache", {**again, "max_length": 8}, fill),
    ]
    assert len({path, *others}) == 3
    with pytest.raises(UserError, match="/dev/zero is a device"):
        content_key([Path("/dev/zero")])
    with pytest.raises(UserError, match=r"cannot read .*none"):
        content_key([tmp_path / "none"])


def test_digests_of_files_in_sections_change_with_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_SECTION_BYTES", 8)
    monkeypatch.setattr(prepared, "_READ_BYTES", 4)
    data, path = bytes(range(20)), tmp_path / "file"

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        [value] = content_key([path])
        return value

    parts = [hashlib.blake2b(data[i : i + 8], digest_size=16).digest() for i in (0, 8, 16)]
    assert digest(data) == hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
    others = [data[:i] + b"x" + data[i + 1 :] for i in range(20)]
    others += [data[:i] for i in range(20)] + [data + b"\0", data[8:16] + data[:8] + data[16:]]
    assert len({digest(content) for content in (data, *others)}) == 1 + len(others)
    (tmp_path / "empty").touch()
    several = content_key([tmp_path / "empty", path, tmp_path / "empty"])
    assert several == [digest(b""), digest(others[-1]), digest(b"")]
    assert content_key([]) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("no text")])
def test_a_folder_does_not_appear_if_preparing_fails(error: BaseException, tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        fill(directory)
        raise error

    with pytest.raises((KeyboardInterrupt, UserError)):
        prepare_once(tmp_path, {}, fail)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    path = prepare_once(tmp_path, {}, fill)
    (tmp_path / f".{path.name}.1.tmp").mkdir()  # as a killed process leaves it
    other = prepare_once(tmp_path / "other", {}, fill)
    assert other.name == path.name


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "train/x.ids.bin").write_bytes(b"x"),
        lambda path: (path / "train/n.bin").unlink(),
        lambda path: (path / "train/more").touch(),
        lambda path: (path / "tokenizer.json").write_text("[]"),
        lambda path: (path / "prepared.json").unlink(),
        lambda path: (path / "prepared.json").write_text('{"files": {}}'),
        lambda path: (path / "prepared.json").write_text("[]"),
    ],
)
def test_changed_files_are_refused(change: Callable[[Path], object], tmp_path: Path) -> None:
    path = prepare_once(tmp_path, {}, fill)
    change(path)
    with pytest.raises(
        UserError, match=r"have changed since \(.*\); remove .* heedful cache rm \w{20},"
    ):
        prepare_once(tmp_path, {}, never)


RACE = """
import sys, time
from pathlib import Path
from heedful.data.prepared import prepare_once

def fill(directory):
    print("prepares", flush=True)
    time.sleep(1)
    (directory / "text").write_text("a")

print(prepare_once(Path(sys.argv[1]), {"a": 1}, fill).name)
"""


def test_of_two_processes_one_prepares_and_the_other_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate()[0].split() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[1] == ["prepares", outputs[0][0]]
    assert json.loads((tmp_path / outputs[0][0] / "prepared.json").read_text())["key"] == {"a": 1}
