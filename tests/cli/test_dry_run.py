"""`heedful prepare` and `heedful train --dry-run`: their estimates hold for the run."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from commands import Commands, assert_refused, tree, write_recipe
from heedful.cli.app import make_app
from heedful.cost.timing import StepTimer
from heedful.data.collate import Batch
from heedful.data.prepared import cache_folder, list_entries
from heedful.dry_run import estimate_run
from heedful.recipe_files import load_recipe
from heedful.training.events import RunStarted
from heedful.training.listeners import read_log


def prepared() -> set[str]:
    """The folders of prepared data in the cache of these tests."""
    return {str(entry.path) for entry in list_entries(cache_folder())}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    keys = {"training__max_steps": 2, "training__gradient_accumulation": 2}
    return write_recipe(tmp_path / "recipe.json", **keys)


def test_a_dry_run_estimates_the_run(commands: Commands, recipe: Path, tmp_path: Path) -> None:
    files = tree(tmp_path).keys()
    result = commands.run("train", recipe, "--dry-run", "--json", cwd=tmp_path)
    assert result.code == 0, result.err
    actual = json.loads(result.out)
    assert tree(tmp_path).keys() == files, "nothing is written but the cache"
    entries = prepared()
    assert commands.run("train", recipe, "--out", tmp_path / "run", "--quiet").code == 0
    assert prepared() == entries, "the run takes what is prepared"
    start = next(e for e in read_log(tmp_path / "run" / "log.jsonl") if isinstance(e, RunStarted))
    assert actual["total_steps"] == start.total_steps == 2
    assert actual["num_parameters"]["total"] == start.num_parameters
    examples = (actual["examples"]["train"], actual["examples"]["valid"])
    assert examples == (start.num_train, start.num_valid)
    assert (actual["device"], actual["precision"]) == (start.device, "fp32")
    weights = 4 * start.num_parameters  # bytes of weights, gradients and two averages of Adam
    assert 4 * weights <= actual["state_bytes"] < 4.1 * weights + 10_000
    assert actual["peak_bytes"] > actual["state_bytes"]
    assert actual["seconds"] == pytest.approx(2 * actual["seconds_per_step"])


def test_a_dry_run_prints_a_line_for_each_fact(commands: Commands, recipe: Path) -> None:
    lines = commands.run("train", recipe, "--dry-run", "--steps", 7).out.splitlines()
    names = ["data", "model", "device", "steps", "memory", "time"]
    assert [line.split()[0] for line in lines[-len(names) :]] == names
    assert lines[-3].split()[1:3] == ["7", "in"]


def test_a_compiled_runs_steps_are_measured_uncompiled_and_that_is_noted(
    commands: Commands, recipe: Path
) -> None:
    key = ("--set", "training.compile=true")
    note = "the steps are measured without training.compile"
    assert note in commands.run("train", recipe, "--dry-run", *key).out
    assert note not in commands.run("train", recipe, "--dry-run").out


def test_the_time_of_a_run_is_at_most_its_minutes(recipe: Path) -> None:
    loaded = load_recipe(recipe, {"training.max_minutes": 1e-9, "training.max_steps": None})
    assert estimate_run(loaded, lambda line: None).seconds == pytest.approx(6e-8)


def test_a_dry_run_takes_its_steps_in_the_parts_of_the_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[list[int]] = []

    def take(timer: StepTimer, batches: Sequence[Batch]) -> float:
        rows.append([len(batch.tokens.ids) for batch in batches])
        return 30.0

    monkeypatch.setattr(StepTimer, "take", take)
    estimate_run(load_recipe(recipe, {"training.batch_parts": 3}), lambda line: None)
    assert rows == [[5, 5, 6, 5, 5, 6]]


def test_prepared_data_are_found_by_the_run(
    commands: Commands, recipe: Path, tmp_path: Path
) -> None:
    done = commands.run("prepare", recipe, "--json")
    assert done.code == 0, done.err
    content = json.loads(done.out)
    entries = prepared()
    assert content["directory"] in entries
    assert content["rows"].keys() == {"train", "valid", "test"}
    commands.run("train", recipe, "--out", tmp_path / "run", "--quiet", "--set", "model.d_ff=12")
    assert prepared() == entries


def test_standard_input_is_no_data_of_a_run(commands: Commands, tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.json", task="translation", data={"train": {"file": "x"}})
    words = ("train", path, "--out", tmp_path / "run", "--set", "data.train.file=-")
    assert_refused(commands.run(*words, stdin=b"a\tb\n"), "store standard input in a file first")


@pytest.mark.parametrize("words", [("prepare",), ("train", "--dry-run")])
def test_wrong_data_are_one_line(
    commands: Commands, tmp_path: Path, words: tuple[str, ...]
) -> None:
    data = {"train": {"src": "nowhere.en", "tgt": "nowhere.de"}}
    recipe = write_recipe(tmp_path / "pairs.json", task="translation", data=data)
    assert_refused(commands.run(words[0], recipe, *words[1:], cwd=tmp_path), "nowhere.en")


def test_a_dry_run_from_a_model_writes_no_file(
    commands: Commands, recipe: Path, tmp_path: Path
) -> None:
    assert commands.run("train", recipe, "--out", tmp_path / "run", "--quiet").code == 0
    files = tree(tmp_path)
    keys = ["init_from=run", "model={}", "adapter.rank=2", "adapter.targets=[q]"]
    sets = [word for key in keys for word in ("--set", key)]
    result = commands.run("train", recipe, "--dry-run", *sets, cwd=tmp_path)
    assert result.code == 0, result.err
    assert "adapter    rank 2 on 3 linear layers" in result.out
    assert tree(tmp_path) == files


def test_the_rows_that_filters_drop_are_shown_and_nothing_is_written(tmp_path: Path) -> None:
    lines = [f"w{i} x" for i in range(40)]
    (tmp_path / "a").write_text("".join(f"{line}\n" for line in ["x", *lines, lines[3]]))
    data = {"text": str(tmp_path / "a")}
    path = tmp_path / "r.yaml"
    path.write_text(
        json.dumps(
            {
                "task": "masked_lm",
                "data": {"train": data, "filters": {"min_words": 2, "unique": ["row"]}},
                "training": {"max_steps": 1, "schedule": {"learning_rate": 0.1}},
            }
        )
    )
    before, entries = tree(tmp_path), prepared()

    def run(*words: str) -> Result:
        return CliRunner().invoke(make_app(["prepare"]), ["prepare", str(path), *words])

    shown = run("--dry-run").output
    assert "min_words 2: 1 of 42 dropped (2.4%)" in shown
    assert f"  {tmp_path / 'a'}, line 42: w3 x" in shown
    assert "filters    2 of 42 texts dropped (4.8%); min_words 2: 1, unique row: 1" in shown
    content = json.loads(run("--dry-run", "--json").stdout)
    assert content["rows"] == {"train": 36, "valid": 4}
    assert [count["num_dropped"] for count in content["filters"]] == [1, 1]
    assert content["filters"][1]["examples"][0]["texts"] == {"text": "w3 x"}
    assert (tree(tmp_path), prepared()) == (before, entries)
    assert "filters    none" in run("--dry-run", "--set", "data.filters={}").output


def test_a_dry_run_prints_every_count_of_the_preparation(tmp_path: Path) -> None:
    """Rows that are empty, filtered, also held out or too long; unknown tokens; labels."""
    rows = [f"word{n} {'x' if n % 3 else 'y'}\t{n % 2}" for n in range(40)]
    rows += ["word3  y\t0", "\t1", f"{'a b ' * 30}\t1", rows[7]]
    held_out = ["word3 y\t1", "other z\t0"]
    for name, lines in (("train", rows), ("valid", held_out)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
    names = {name: {"file": str(tmp_path / f"{name}.tsv")} for name in ("train", "valid")}
    data = {**names, "max_length": 12, "filters": {"unique": ["row"]}}
    training = {"max_steps": 1, "schedule": {"learning_rate": 0.1}}
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps({"task": "classification", "data": data, "training": training}))

    def run(*words: str) -> list[str]:
        result = CliRunner().invoke(make_app(["prepare"]), ["prepare", str(path), *words])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    entries = prepared()
    shown = run("--dry-run")
    assert prepared() == entries
    *expected, last = run()
    assert last.startswith("prepared ")
    assert shown[-len(expected) :] == expected
    train = next(line for line in shown if line.startswith("train "))
    for count in ("2 dropped as also held out", "1 dropped as too long", "unknown tokens: "):
        assert count in train
    assert any("1 dropped by filters" in line and "1 dropped as empty" in line for line in shown)
    assert shown[-1].startswith("labels ")
