"""Names of data files: folders and patterns."""

from pathlib import Path

import pytest

from heedful.data.row_files import expand_path
from heedful.errors import UserError


def test_folders_and_patterns_are_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.gz", "a.gz", ".hidden", "c[1].txt", "10.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    names = ["10.txt", "a.gz", "b.gz", "c[1].txt"]
    assert [path.name for path in expand_path(tmp_path)] == names
    assert [path.name for path in expand_path(tmp_path / "*.gz")] == ["a.gz", "b.gz"]
    assert expand_path(tmp_path / "c[1].txt") == [tmp_path / "c[1].txt"]
    assert expand_path(tmp_path / "none") == [tmp_path / "none"]  # an error where it is read
    with pytest.raises(UserError, match=r"no file matches the pattern .*\*\.zst"):
        expand_path(tmp_path / "*.zst")
    with pytest.raises(UserError, match="folder has no files"):
        expand_path(tmp_path / "folder")
    (tmp_path / "folder" / "state.json").write_text("{}")
    assert expand_path(tmp_path / "folder") == [tmp_path / "folder"]
