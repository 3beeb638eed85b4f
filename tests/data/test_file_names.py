"""Names of data files: folders, patterns and standard input."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import tiny
from heedful.config import parse_recipe
from heedful.data import file_names
from heedful.data.file_names import expand_path, store_stdin
from heedful.data.prepared import list_entries
from heedful.errors import UserError
from heedful.tasks.corpora import split_files


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


def recipe_of(**train: Any) -> Any:
    data = {"train": train, "folder": "there"}
    return parse_recipe(tiny(task="translation") | {"data": data})


@pytest.mark.parametrize(
    ("content", "name"), [(b"a\tb\n", "stdin.tsv"), (b' {"src": "a"}\n', "stdin.jsonl")]
)
def test_standard_input_becomes_a_file_of_the_cache(
    content: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the second time the file is there
        buffer = io.BytesIO(content)
        stdin = SimpleNamespace(buffer=buffer, isatty=lambda: False)
        monkeypatch.setattr(file_names.sys, "stdin", stdin)
        stored = store_stdin(recipe_of(file=["x.tsv", "-"]), tmp_path / "cache")
        first, path = stored.data.train.file
        assert (first, Path(path).name, Path(path).read_bytes()) == ("x.tsv", name, content)
    assert split_files(stored)[0].files.file == [os.path.join("there", "x.tsv"), path]
    [entry] = list_entries(tmp_path / "cache")
    assert entry.about == {"task": "standard input", "files": []}
    assert not list((tmp_path / "cache").glob("*.tmp"))
    recipe = recipe_of(file="x")
    assert store_stdin(recipe, tmp_path) is recipe
    with pytest.raises(UserError, match=r"names - .standard input. 2 times"):
        store_stdin(recipe_of(src="-", tgt="-"), tmp_path)
    stdin.isatty = lambda: True
    with pytest.raises(UserError, match="which is a terminal; pipe"):
        store_stdin(recipe_of(file="-"), tmp_path)
