"""The folder of a run: locking, and removal of the files of a failed start."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from commands import assert_refused, tree, write_recipe
from heedful.errors import UserError
from heedful.training.checkpoint import Checkpoints
from heedful.training.folder import LOCK, MARKER, RunFolder

WHOLE = ("model.safetensors", "state.json", "training.safetensors")  # files of a checkpoint


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "recipe.json", training__max_steps=3)


def failing_start(path, write):
    with RunFolder(path) as folder, folder.undone_on_error():
        write()
        raise ZeroDivisionError


def test_a_failed_start_keeps_files_of_other_processes(tmp_path):
    runs = tmp_path / "runs"

    def write():
        (runs / "mine" / "recipe.yaml").write_text("task: copy")
        (runs / "mine" / "checkpoints").mkdir()
        (runs / "mine" / "notes.txt").write_text("the user's, written meanwhile")
        (runs / "theirs").mkdir()
        (runs / "theirs" / "config.json").write_text("{}")

    with pytest.raises(ZeroDivisionError):
        failing_start(runs / "mine", write)
    assert sorted(tree(runs)) == ["mine", "mine/notes.txt", "theirs", "theirs/config.json"]


@pytest.fixture
def project(tmp_path):
    """A folder with a recipe, and files with names that a run also uses."""
    folder = tmp_path / "project"
    folder.mkdir()
    text = write_recipe(folder / "recipe.yaml", training__max_steps=1).read_text()
    (folder / "recipe.yaml").write_text(f"# mine\n{text}")
    for name in ("data.json", "config.json", "tokenizer_mine.json", "log.jsonl", ".lock"):
        (folder / name).write_text(f"the user's {name}")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "other_model.pt").write_text("weights")
    return folder


@pytest.mark.parametrize("fails", [False, True])
def test_a_recipe_in_the_folder_of_a_project_is_trained_elsewhere(
    commands, project, tmp_path, fails
):
    before = tree(project)
    more = ("--set", "tokenizer.path=none") if fails else ()
    for recipe, cwd in (("project/recipe.yaml", tmp_path), ("recipe.yaml", project)):
        ended = commands.run("train", recipe, "--quiet", *more, cwd=cwd)
        assert ended.code == (2 if fails else 0), ended.err
        folder = cwd / "runs" / "project"
        assert folder.exists() is not fails
        own = {name: content for name, content in tree(project).items() if name[:4] != "runs"}
        assert own == before


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_folder_with_other_files_is_refused_and_unchanged(commands, project, tmp_path, resume):
    before = tree(tmp_path)
    message = "holds no run" if resume else "no run wrote; give a new --out FOLDER"
    for recipe in (project / "recipe.yaml", "copy"):
        assert_refused(commands.train(recipe, project, *resume), f"{project}", message)
        assert tree(tmp_path) == before


def test_after_a_killed_start_only_files_of_the_run_are_removed(commands, recipe, tmp_path):
    out = tmp_path / "run"
    kill = {"call": "replace", "path": r"run/config\.json$", "when": "after", "nth": 1}
    assert commands.train(recipe, out, kill=kill).signal == 9
    assert {MARKER, "recipe.yaml", "config.json"} <= tree(out).keys()
    (out / "recipe.yaml").write_text("# mine\n" + (out / "recipe.yaml").read_text())
    (out / "checkpoints").mkdir()
    (out / "tensorboard").mkdir()
    for name in ("tokenizer_mine.json", "checkpoints/other_model.pt", "tensorboard/notes"):
        (out / name).write_text("the user's")
    before = tree(out)
    other = commands.run("train", out, "--quiet", "--set", "training.seed=9")
    assert_refused(other, "recipe.yaml was edited and is another recipe")
    ended = commands.run("train", out, "--quiet")
    assert ended.code == 0, ended.err
    other_files = (
        "recipe.yaml",
        "tokenizer_mine.json",
        "checkpoints/other_model.pt",
        "tensorboard/notes",
    )
    after = tree(out)
    assert all(after[name] == before[name] for name in other_files)


def test_copies_of_checkpoints_stay_when_others_are_pruned(tmp_path):
    others = ("step-00000001-good", "step-best", "interim-mine", "steps-1")
    for name in others:
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, torch.nn.Linear(1, 1).state_dict(), {}, {})
    checkpoints.clean()
    assert sorted(tree(tmp_path)) == sorted(
        [*others, "step-00000002", *(f"step-00000002/{name}" for name in WHOLE)]
    )


def test_a_failed_start_removes_the_folders_it_created(tmp_path):
    with pytest.raises(ZeroDivisionError):
        failing_start(tmp_path / "a" / "b" / "c", lambda: None)
    assert not tree(tmp_path)


def test_of_two_concurrent_starts_one_fails_without_changes(commands, recipe, tmp_path):
    out = tmp_path / "runs" / "one"
    with RunFolder(out) as folder:
        folder.claim("fp32")
        (out / "config.json").write_text("the winner's")
        before = tree(tmp_path)
        assert_refused(commands.train(recipe, out), out, f"in use by a run (process {os.getpid()})")
        assert tree(tmp_path) == before
    with pytest.raises(UserError, match="is in use"), RunFolder(out), RunFolder(out):
        pass


@pytest.mark.parametrize("changed", [False, True])
def test_resuming_a_running_run_is_refused_without_changes(commands, recipe, tmp_path, changed):
    out = tmp_path / "run"
    assert commands.train(recipe, out).code == 0
    more = ("--set", "training.max_steps=4") if changed else ()
    with RunFolder(out):
        # What the working run is about to rename.
        (out / ".model.safetensors.1.tmp").write_text("half")
        before = tree(out)
        assert_refused(commands.train(recipe, out, "--resume", *more), out, "in use by a run")
        assert tree(out) == before


def test_the_lock_file_of_a_killed_run_does_not_block(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from heedful.training.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {other.pid}"), RunFolder(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with RunFolder(tmp_path):
        pass
    assert not tree(tmp_path)
