"""Streams, signals and errors around a command, in real processes."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from commands import GONE, assert_refused, default_signals, write_recipe

HEEDFUL = [sys.executable, "-c", "from heedful.cli import main; main()"]


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_never_a_traceback(redirect: str) -> None:
    line = f'"$0" -c "from heedful.cli import main; main()" recipes ls {redirect}'
    done = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (2 if ">&-" in redirect.replace("2>&-", "") else 0)


def test_text_is_utf_8_in_any_locale() -> None:
    code = "from heedful.cli.guard import run_checked as run\nrun(lambda **o: print('14 März 狗'))"
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, check=False, env=ascii_alone)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == "14 März 狗\n".encode()


def test_a_signal_after_the_command_ends_the_process_without_an_exception() -> None:
    code = (
        "import atexit, os, signal\n"
        "from heedful.cli.guard import run_checked\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "run_checked(lambda **o: print('complete', flush=True))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "complete\n", "")


def test_a_file_in_the_current_folder_does_not_replace_a_package(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('the wrong typer')")
    words = [sys.executable, "-m", "heedful", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from heedful.cli import guard

    colors = []
    monkeypatch.setattr(typer, "secho", lambda text, fg, err: colors.append(fg))
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        with pytest.raises(SystemExit):
            guard._fail("wrong")
    assert colors == ["red", None]


def test_notes_and_warnings_have_no_control_characters() -> None:
    """A model's folder can come from anybody, and names in it reach notes."""
    code = (
        "import logging\n"
        "from heedful.cli.guard import run_checked\n"
        "from heedful.cli.shared import note\n"
        "def command(**_):\n"
        "    note('file \\x1b]0;owned\\x07 狗')\n"
        "    logging.getLogger('heedful').warning('of \\x1b[2J\\r%s', '\\x9b31m')\n"
        "run_checked(command)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    first, second = done.stderr.decode().splitlines()
    assert first == r"note: file \x1b]0;owned\x07 狗"
    assert second == r"of \x1b[2J\r\x9b31m"


def test_a_full_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*HEEDFUL, "recipes", "ls"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert done.stderr == b"error: cannot write to stdout: No space left on device\n"


def test_a_run_with_a_closed_stdout_completes(commands, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=3)
    done = commands.run("train", recipe, "--out", tmp_path / "run", stdout=GONE)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "run" / "scores.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_run_saves(commands, tmp_path: Path, number: signal.Signals) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    done = commands.train(recipe, tmp_path / "run", kill={"interrupt_at": 2, "signal": number})
    assert "stopped and saved" in done.err
    assert done.code == 130
    assert (tmp_path / "run/checkpoints/interim-00000002").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ignored_at_the_start_stays_ignored(commands, tmp_path: Path, number) -> None:
    """As under nohup, or in the background of a shell without job control."""
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=3)
    kill = {"interrupt_at": 2, "signal": number, "ignored": True}
    done = commands.train(recipe, tmp_path / "run", kill=kill)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "run" / "scores.json").is_file()


INTERRUPTED = {
    "by a library made something else": """
def command(**options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("no whole file")
""",
    "where Python cannot raise, and so a little later": """
class Closed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
def command(**options):
    Closed()
    time.sleep(20)
""",
}


@pytest.mark.parametrize("command", INTERRUPTED.values(), ids=list(INTERRUPTED))
def test_an_interrupt_ends_the_command_anywhere(command: str) -> None:
    code = f"import os, signal, time{command}"
    code += "from heedful.cli.guard import run_checked\nrun_checked(command)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, check=False, preexec_fn=default_signals)
    assert (done.returncode, done.stderr) == (130, b"")


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "heedful", "--version"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("translate", "missing argument"),
        ("info a b", "unexpected extra argument"),
        ("info --nonsense", "no such option"),
        ("evaluate m --beam-size x", "must be a whole number"),
        ("translate m --seed -1", "must be at least 0"),
        ("nonsense", "no such command"),
    ],
)
def test_wrong_arguments_are_one_line(commands, line: str, part: str) -> None:
    assert_refused(commands.run(*line.split()), part, "--help")


def test_an_error_is_one_line_for_any_name(commands) -> None:
    assert_refused(commands.run("info", "x\ny\x1b[31m"), r"x\ny\x1b[31m")
    assert len(commands.run("info", "x" * 100_000).err) < 2_000


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("translate M -i {0} -o {0}", "is read"),
        ("translate M -i lines -o M/out", "is inside"),
        ("translate M --device meta", "no device meta"),
        ("translate M -o /", "Is a directory"),
        ("translate M -o lines/out", "Not a directory"),
    ],
)
def test_an_unwritable_output_is_refused_first(commands, tmp_path, line, part) -> None:
    """The model is missing: a later check would report that instead."""
    (tmp_path / "lines").write_text("a\n")
    (tmp_path / "M").mkdir()
    assert_refused(commands.run(*line.format("lines").split(), cwd=tmp_path), part)


def test_lists_can_be_json(commands) -> None:
    assert "dates" in json.loads(commands.run("recipes", "ls", "--json").out)
    assert json.loads(commands.run("info", "--json").out)["torch"] == version("torch")


def test_too_little_memory_is_one_line() -> None:
    """When a tensor is allocated; the size of a model is checked before."""
    code = "import torch; from heedful.cli.guard import run_checked; "
    code += "run_checked(lambda **options: torch.empty(2**60))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: not enough memory")
    assert done.stderr.count("\n") == 1
