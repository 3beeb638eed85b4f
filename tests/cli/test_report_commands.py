"""`heedful report` and `heedful compare`, on runs that ended, were interrupted, or are damaged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import Commands, assert_refused, write_recipe
from heedful.recipe_files import load_recipe
from heedful.run import train
from heedful.training.comparison import Comparison
from heedful.training.events import Evaluated
from heedful.training.run_report import RecordedRun, ReportFacts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("slow", 0.001), ("fast", 0.01)):
        keys = {"training__max_steps": 4, "training__log_every": 1, "training__evaluate_every": 2}
        recipe = write_recipe(folder / f"{name}.json", **keys)
        content = json.loads(recipe.read_text())
        content["training"]["schedule"] = {"name": "constant", "learning_rate": rate}
        recipe.write_text(json.dumps(content))
        train(recipe, folder / name, progress=False)
    return folder


def test_a_report_written_again_is_equal(commands: Commands, runs: Path, tmp_path: Path) -> None:
    page = runs / "slow" / "report.html"
    first = page.read_text()
    done = commands.run("report", runs / "slow", "-o", tmp_path / "page.html")
    assert (done.code, done.out) == (0, f"{tmp_path / 'page.html'}\n"), done.err
    assert (tmp_path / "page.html").read_text() == first
    page.unlink()
    assert commands.run("report", runs / "slow").code == 0
    assert page.read_text() == first


def test_a_report_is_not_written_through_a_link(
    commands: Commands, runs: Path, tmp_path: Path
) -> None:
    """A folder from elsewhere could name a file of the user."""
    run, file = tmp_path / "run", tmp_path / "file"
    shutil.copytree(runs / "slow", run)
    file.write_text("mine")
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(file)
    assert_refused(commands.run("report", run), f"{run / 'report.html'} is a link", "--output")
    assert file.read_text() == "mine"


def test_a_run_that_did_not_end_has_a_report(commands: Commands, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    assert commands.train(recipe, tmp_path / "run", kill={"interrupt_at": 2}).code == 130
    (tmp_path / "run" / "report.html").unlink(missing_ok=True)
    assert commands.run("report", tmp_path / "run").code == 0
    assert "interrupted" in (tmp_path / "run" / "report.html").read_text()


def test_runs_are_compared(commands: Commands, runs: Path) -> None:
    names = (runs / "slow", runs / "fast")
    done = commands.run("compare", *names)
    assert done.code == 0, done.err
    rows = {line.split("  ")[0].strip(): line.split() for line in done.out.splitlines() if line}
    assert rows["training.schedule.learning_rate"][1:] == ["0.001", "0.01"]
    assert rows["steps"][1:] == ["4", "4"]
    assert rows["scores of"][2:] == ["test", "text"] * 2
    assert "training.max_steps" not in rows, "only what differs is printed"
    actual = json.loads(commands.run("compare", *names, "--json").out)
    assert actual["runs"] == ["slow", "fast"]
    assert actual["scores_of"] == ["test text"] * 2
    scores = [json.loads((path / "scores.json").read_text())["scores"] for path in names]
    assert actual["scores"].keys() == scores[0].keys()
    for metric, values in actual["scores"].items():
        assert values == [one[metric]["score"] for one in scores]


def test_scores_of_different_texts_are_told_apart(runs: Path) -> None:
    """Those of a run that has not ended are of held-out text, beside test scores of another."""
    ended = RecordedRun.read(runs / "slow")
    unfinished = replace(ended, facts=ReportFacts())
    rows = Comparison({"one": ended, "other": unfinished}).tables()["Runs"]
    assert rows["scores of"] == ["test text", "held-out text, during training"]


def test_scores_are_in_the_order_of_the_runs() -> None:
    recipe = load_recipe("copy")
    scores: list[dict[str, Any]] = [{"bleu": {"score": 31.5}, "loss": 2}, {"bleu": {"score": 42}}]
    runs = [RecordedRun(Path("-"), recipe, [], ReportFacts(scores=one)) for one in scores]
    best = Evaluated(4, 0, 1.0, 1.5, 4.5, 0.5, {"bleu": 7.0}, is_best=True)
    later = replace(best, step=5, loss=1.6, scores={"bleu": 6.0}, is_best=False)
    runs.append(RecordedRun(Path("-"), recipe, [best, later], ReportFacts()))
    comparison = Comparison(dict(zip("abc", runs, strict=True)))
    assert comparison.scores() == {"bleu": [31.5, 42, 7.0], "loss": [2, None, 1.5]}
    shown = {"BLEU": ["31.50", "42.00", "7.00"], "loss": ["2.000", "", "1.500"]}
    assert comparison.tables()["Scores"] == shown


def test_settings_are_compared_key_by_key() -> None:
    names = ("copy", "rhyme")
    runs = {n: RecordedRun(Path(n), load_recipe(n), [], ReportFacts()) for n in names}
    rows = Comparison(runs).tables()["Differing settings"]
    assert rows["task"] == ["copy", "language_modeling"]
    assert rows["model.architecture"] == ["vaswani2017", "gpt2"]
    assert rows["model.norm_placement"] == ["pre", ""]
    assert not {"model", "objective"} & rows.keys()
    assert all({*cells} - {"", "null"} for cells in rows.values()), "a key that no run sets"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("report nowhere", "not the folder of a run"),
        ("compare slow", "give 2 to 6 runs, not 1"),
        ("compare slow slow", "given twice"),
        ("compare slow nowhere", "nowhere is not the folder of a run"),
    ],
)
def test_bad_input_is_one_line(commands: Commands, runs: Path, line: str, part: str) -> None:
    assert_refused(commands.run(*line.split(), cwd=runs), part)
