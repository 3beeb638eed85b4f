"""A run's folder belongs to the run that works in it, and a start that fails removes its own."""

import os
import signal
import subprocess
import sys

import pytest

from commands import assert_refused, tree, write_recipe
from heedful.errors import UserError
from heedful.training.folder import LOCK, RunFolder


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "recipe.json", training__max_steps=3)


def failing_start(path, write):
    with RunFolder(path) as folder, folder.undone_on_error():
        write()
        raise ZeroDivisionError


def test_a_start_that_fails_leaves_what_others_wrote_meanwhile(tmp_path):
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


def test_a_start_that_fails_keeps_what_was_there(tmp_path):
    (tmp_path / "config.json").write_text("an older one")
    before = tree(tmp_path)
    with pytest.raises(ZeroDivisionError):
        failing_start(tmp_path, lambda: (tmp_path / "recipe.yaml").write_text("task: copy"))
    assert tree(tmp_path) == before


def test_folders_that_a_failed_start_made_are_gone(tmp_path):
    with pytest.raises(ZeroDivisionError):
        failing_start(tmp_path / "a" / "b" / "c", lambda: None)
    assert not tree(tmp_path)


def test_the_loser_of_two_starts_removes_nothing_of_the_winners(commands, recipe, tmp_path):
    out = tmp_path / "runs" / "one"
    with RunFolder(out):
        (out / "config.json").write_text("the winner's")
        before = tree(tmp_path)
        assert_refused(commands.train(recipe, out), out, f"in use by a run (process {os.getpid()})")
        assert tree(tmp_path) == before
    with pytest.raises(UserError, match="is in use"), RunFolder(out), RunFolder(out):
        pass


@pytest.mark.parametrize("changed", [False, True])
def test_a_resume_beside_a_working_run_is_refused_and_touches_nothing(
    commands, recipe, tmp_path, changed
):
    out = tmp_path / "run"
    assert commands.train(recipe, out).code == 0
    more = ("--set", "training.max_steps=4") if changed else ()
    with RunFolder(out):
        # What the working run is about to rename.
        (out / ".model.safetensors.1.tmp").write_text("half")
        before = tree(out)
        assert_refused(commands.train(recipe, out, "--resume", *more), out, "in use by a run")
        assert tree(out) == before


def test_the_lock_of_a_killed_run_keeps_nobody_out(tmp_path):
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
