"""Keys of prepared data depend on text and settings, not on the files' paths."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from commands import tiny
from heedful import plugins
from heedful.config import parse_recipe
from heedful.data.prepared import FORMAT, MANIFEST
from heedful.tasks import prepared_data
from heedful.tasks.run_data import Inherited, RunData

PAIRS = {side: "".join(f"{side} {n}\n" for n in range(12)) for side in ("src", "tgt")}


def prepare(cache: Path, **changes: Any) -> RunData:
    recipe = parse_recipe(tiny(**changes))
    task = plugins.task.get(recipe.task)(recipe)
    return prepared_data.prepare(task, cache, Inherited(), lambda line: None)


def prepare_pairs(cache: Path, folder: Path, ending: str = ".txt", **changes: Any) -> str:
    """The name of the prepared folder of pairs, whose files are written into `folder`."""
    folder.mkdir(parents=True)
    names = {}
    for side, text in PAIRS.items():
        (folder / f"{side}{ending}").write_text(text)
        names[side] = str(folder / f"{side}{ending}")
    recipe: dict[str, Any] = {"task": "translation", "data": {"train": names, "valid_size": 2}}
    return prepare(cache, **recipe, **changes).directory.name


def test_a_corpus_that_was_moved_or_renamed_is_not_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        prepare_pairs(tmp_path / "cache", tmp_path / "one"),
        prepare_pairs(tmp_path / "cache", tmp_path / "two", ".en.gz-not"),
    }
    monkeypatch.chdir(tmp_path)
    names.add(prepare_pairs(tmp_path / "cache", Path("three")))
    monkeypatch.setattr("heedful.__version__", "9.9")
    names.add(prepare_pairs(tmp_path / "cache", tmp_path / "four"))
    assert len(names) == 1


def test_other_reading_settings_are_prepared_separately(tmp_path: Path) -> None:
    """The same bytes: as plain lines, as a table, and as one document."""
    keys = {"task": "language_modeling", "model": {"architecture": "gpt"}}
    names = set()
    for number, (name, unit) in enumerate([("a.txt", "line"), ("a.tsv", "line"), ("a", "file")]):
        path = tmp_path / f"{number}" / name
        path.parent.mkdir()
        path.write_text("".join(f"a {n}\td\n" for n in range(40)))
        recipe = json.loads(json.dumps(tiny() | keys))
        column = {"text_field": 1} if path.suffix == ".tsv" else {}
        recipe["data"] = {"train": {"text": str(path), **column}, "text_unit": unit}
        del recipe["evaluation"]
        task = plugins.task.get("language_modeling")(parse_recipe(recipe))
        data = prepared_data.prepare(task, tmp_path / "cache", Inherited(), lambda line: None)
        names.add(data.directory.name)
    assert len(names) == 3


# The format, and a digest of the columns and texts that it has for one recipe. Where the digest
# changes, `FORMAT` must be raised, so that no run opens data of the old kind.
STORED = (11, "7c2bc81597df4a39")


def test_stored_data_change_with_the_format_alone(tmp_path: Path) -> None:
    directory = prepare(tmp_path).directory
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name not in (MANIFEST, "src.json"):
            digest.update(path.read_bytes())
    assert (FORMAT, digest.hexdigest()) == STORED
