"""`heedful cache` lists prepared data and removes them, except those that a run is using."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from commands import tiny, tree
from heedful import plugins
from heedful.cli.app import make_app
from heedful.config import parse_recipe
from heedful.data.prepared import MANIFEST, FolderLock, cache_folder, prepare_once
from heedful.errors import UserError
from heedful.tasks.prepared_data import prepare
from heedful.tasks.run_data import Inherited

DAY = 24 * 60 * 60


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    return cache_folder()


def add(cache: Path, number: int, *, days: float = 0, size: int = 1_000) -> Path:
    """A prepared folder that was last used some days ago."""
    about = {"task": "translation", "files": [f"/corpus/{number}.en", f"/corpus/{number}.de"]}

    def fill(directory: Path) -> None:
        (directory / "train").write_bytes(bytes(size))

    path = prepare_once(cache, {"number": number}, fill, about)
    used = time.time() - days * DAY
    os.utime(path / MANIFEST, (used, used))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(make_app(["cache"]), ["cache", *map(str, words)])


def assert_refused(result: Result, *parts: str) -> None:
    assert isinstance(result.exception, UserError)
    assert all(part in str(result.exception) for part in parts), result.exception


def list_names() -> dict[str, dict[str, object]]:
    listed = json.loads(run("ls", "--json").stdout)
    return {entry.pop("name"): entry for entry in listed}


def test_entries_are_listed_with_size_use_and_origin(cache: Path) -> None:
    old, new = add(cache, 1, days=40, size=5_000_000), add(cache, 2)
    (cache / "theirs").mkdir()
    listed = list_names()
    assert list(listed) == [new.name, old.name], "the last used first, and nothing else"
    entry = listed[old.name]
    assert entry["bytes"] == sum(path.stat().st_size for path in old.iterdir())
    assert (entry["task"], entry["in_use"]) == ("translation", False)
    assert entry["files"] == ["/corpus/1.en", "/corpus/1.de"]
    lines = run("ls").stdout.splitlines()
    assert lines[1].split() == [
        *(old.name, "5.0", "MB", str(entry["last_used"])[:10]),
        *("translation:", "/corpus/1.en,", "/corpus/1.de"),
    ]
    assert lines[2].startswith(f"2 in {cache}, 5.0 MB")


def test_only_the_named_entries_are_removed(cache: Path) -> None:
    paths = [add(cache, number, days=10 * number) for number in range(6)]
    (cache / "theirs").mkdir()
    (cache / f".{paths[0].name}.999999999.tmp").mkdir()  # of a killed process
    assert run("rm", "--older-than", 35).exit_code == 0
    assert list_names().keys() == {path.name for path in paths[:4]}
    assert run("rm", paths[0].name, paths[1].name[:15]).exit_code == 0
    assert list_names().keys() == {path.name for path in paths[2:4]}
    assert run("rm", "--all").exit_code == 0
    assert list(tree(cache)) == ["theirs"]
    assert run("ls").stdout == f"0 in {cache}, 0 bytes\n"


@pytest.mark.parametrize("how", ["name", "--all", "--older-than"])
def test_data_in_use_are_kept(cache: Path, how: str) -> None:
    used, free = add(cache, 1), add(cache, 2)
    hold = FolderLock(used)
    before = tree(used)
    words = {"name": [used.name, free.name], "--all": [how], "--older-than": [how, 0]}[how]
    assert list_names()[used.name]["in_use"] is True
    ended = run("rm", *words)
    if how == "name":
        assert_refused(ended, used.name, "in use by a run")
    else:
        assert (ended.exit_code, ended.stderr.count(used.name)) == (0, 1)
    assert tree(used) == before
    assert not free.exists()
    del hold
    assert run("rm", used.name).exit_code == 0
    assert not used.exists()


def test_wrong_names_and_no_choice_are_refused(cache: Path) -> None:
    add(cache, 1)
    (cache.parent / "theirs").mkdir()
    before = tree(cache.parent)
    for words, messages in (
        ([], "give names"),
        (["--all", "--older-than", "3"], "give names"),
        (["../theirs"], "no prepared data have a name"),
        (["x"], "no prepared data have a name"),
    ):
        assert_refused(run("rm", *words), messages)
    add(cache, 2)
    assert_refused(run("rm", ""), "several prepared data")
    assert before.items() <= tree(cache.parent).items()


def test_a_run_locks_its_data(cache: Path) -> None:
    recipe = parse_recipe(tiny())
    task = plugins.task.get(recipe.task)(recipe)
    data = prepare(task, cache, Inherited(), lambda line: None)
    assert [entry["in_use"] for entry in list_names().values()] == [True]
    del data
    assert [entry["in_use"] for entry in list_names().values()] == [False]
