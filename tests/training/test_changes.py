"""Resuming with other settings: allowed keys, and notes in log and report."""

import re
import shlex
import shutil

import pytest

from commands import assert_refused, assert_same_checkpoints, tree, write_recipe
from heedful.training.events import Evaluated, RunStarted, StepDone
from heedful.training.listeners import read_log
from heedful.training.verdict import verdicts

# Beyond a step the learning rate is infinite, unless the recipe asks for a low one.
DIVERGES = """
import math

from heedful import plugins


@plugins.schedule("diverges_after_{step}")
def diverges(settings, **_):
    low = settings.learning_rate < 0.005
    return lambda step: settings.learning_rate if low or step <= {step} else 1e38
"""
WIDE = [{"step": step, "low": 0.0, "high": 99.0} for step in (3, 9)]


@pytest.fixture(scope="module")
def stopped(commands, tmp_path_factory):
    """A run that was interrupted at step 7 of 12."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = write_recipe(folder / "recipe.json")
    assert commands.train(recipe, folder / "run", kill={"interrupt_at": 7}).code == 130
    return folder


@pytest.fixture
def interrupted(stopped, tmp_path):
    """A copy of `stopped`: its recipe's file and its folder."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path / "recipe.json", tmp_path / "run"


def starts_of(out):
    return [event for event in read_log(out / "log.jsonl") if isinstance(event, RunStarted)]


def steps_of(out):
    return [event.step for event in read_log(out / "log.jsonl") if isinstance(event, StepDone)]


@pytest.mark.parametrize("step", [1, 7])
def test_the_advice_after_a_divergence_works_as_it_is_printed(commands, tmp_path, step):
    """Before the first checkpoint the run starts again; afterwards it resumes."""
    plugin, out = tmp_path / f"diverges{step}.py", tmp_path / "a run"
    plugin.write_text(DIVERGES.format(step=step))
    recipe = write_recipe(
        tmp_path / "recipe.json",
        plugins=[str(plugin)],
        training__schedule={"name": f"diverges_after_{step}", "learning_rate": 0.01},
        training__clip_norm=None,
        training__log_every=1,
    )
    diverged = commands.train(recipe, out)
    assert_refused(diverged, f"step {step + 2}: the loss is nan", "try: heedful train ")
    words = shlex.split(diverged.err.partition("heedful ")[2])
    assert ("--resume" in words) == (step > 3)
    ended = commands.run(*words)
    assert ended.code == 0, ended.err
    assert steps_of(out) == list(range(1, 13))
    last = starts_of(out)[-1]
    if step > 3:
        assert last.resumed_from == 6
        assert last.changes == [
            "training.clip_norm (null -> 1.0)",
            "training.schedule.learning_rate (0.01 -> 0.001)",
        ]
        assert "changed from here on: training.clip_norm (null -> 1.0)" in ended.out
        page = (out / "report.html").read_text(encoding="utf-8")
        assert "Changed from step 6 on: training.clip_norm (null -&gt; 1.0), " in page
    else:
        assert (last.resumed_from, last.changes) == (None, [])


@pytest.mark.parametrize(
    ("old", "new", "is_noted"),
    [("d_model: 16", "d_model: 32", False), ("learning_rate: 0.01", "learning_rate: 0.02", True)],
)
def test_an_edited_recipe_of_a_run_is_refused_or_noted(commands, interrupted, old, new, is_noted):
    _, out = interrupted
    path = out / "recipe.yaml"
    content = path.read_text()
    assert content.count(old) == 1
    path.write_text(content.replace(old, new))
    ended = commands.run("train", out, "--resume")
    if is_noted:
        assert ended.code == 0, ended.err
        key, before, now = "training.schedule.learning_rate", 0.01, 0.02
        assert starts_of(out)[-1].changes == [f"{key} ({before} -> {now})"]
    else:
        assert_refused(ended, "recipe.yaml was edited", "model.d_model (16 -> 32)")


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("", []),
        ("  r_drop: 0.5\n", ["training.r_drop (null -> 0.5)"]),
        ("  layer_lr_decay: 0.5\n", None),
    ],
)
def test_keys_that_are_newer_than_a_run_have_their_defaults(commands, interrupted, line, changes):
    """As in a run of an earlier version: neither its log nor its recipe.yaml has them."""
    _, out = interrupted
    key = line.strip().partition(":")[0] or "r_drop"
    log, path = out / "log.jsonl", out / "recipe.yaml"
    content, count = re.subn(rf'"{key}":[^,]*,', "", log.read_text())
    assert count == 1
    log.write_text(content)
    content, count = re.subn(rf"  {key}: .*\n", line, path.read_text())
    assert count == 1
    path.write_text(content)
    ended = commands.run("train", out, "--resume")
    if changes is None:
        assert_refused(ended, "recipe.yaml was edited", "training.layer_lr_decay (null -> 0.5)")
    else:
        assert ended.code == 0, ended.err
        assert starts_of(out)[-1].changes == changes


def test_changed_settings_stay_with_the_run_and_end_its_bands(commands, tmp_path):
    recipe, out = write_recipe(tmp_path / "recipe.json", expect=WIDE), tmp_path / "run"
    assert commands.train(recipe, out, kill={"interrupt_at": 7}).code == 130
    change = ("--set", "training.precision=bf16")
    kill = {"call": "replace", "path": r"checkpoints/step-00000009$", "when": "before"}
    assert commands.train(recipe, out, "--resume", *change, kill=kill).signal == 9
    assert commands.train(out, out, "--resume", kill={"interrupt_at": 8}).code == 130
    ended = commands.train(out, out, "--resume")
    assert ended.code == 0, ended.err
    noted = [(start.resumed_from, start.changes) for start in starts_of(out)]
    changes = ['training.precision ("fp32" -> "bf16")']
    assert [entry for entry in noted if entry[1]] == [(7, changes)]
    assert "bf16" in (out / "report.html").read_text(encoding="utf-8")
    events = read_log(out / "log.jsonl")
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 6, 9, 12]
    assert not [verdict for verdict in verdicts(events, out) if "within" in verdict.text]
    # The recipe that it began with is another one now.
    refused = commands.train(recipe, out, "--resume")
    assert_refused(refused, 'training.precision ("bf16" -> "fp32")', "with --set")


def test_a_setting_that_is_restored_at_the_same_step_is_no_change(commands, stopped, tmp_path):
    recipe = stopped / "recipe.json"
    for out in ("whole", "changed"):
        shutil.copytree(stopped / "run", tmp_path / out)
    for value in (0.5, 1.0):
        change = ("--set", f"training.clip_norm={value}")
        kill = {"call": "replace", "path": r"checkpoints/step-00000009$", "when": "before"}
        resumed = commands.train(
            recipe, tmp_path / "changed", "--resume", *change, kill=kill if value < 1 else None
        )
        assert (resumed.code, resumed.signal) == ((-1, 9) if value < 1 else (0, 0)), resumed.err
    assert commands.train(recipe, tmp_path / "whole", "--resume").code == 0
    assert [start.changes for start in starts_of(tmp_path / "changed")] == [[], []]
    assert_same_checkpoints(tmp_path / "whole", tmp_path / "changed")


@pytest.mark.parametrize(
    "setting",
    ["model.d_model=32", "data.max_length=9", "tokenizer.kind=char", "training.batch_sentences=8"],
)
def test_a_setting_that_no_checkpoint_fits_is_refused_and_nothing_changes(
    commands, interrupted, setting
):
    recipe, out = interrupted
    before = tree(out)
    refused = commands.train(recipe, out, "--resume", "--set", setting)
    assert_refused(refused, "cannot resume", setting.partition("=")[0], "start a new run")
    assert tree(out) == before
