"""The use of a CPU's cores: measured, the same steps in each, and processes that end together."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Commands, write_recipe
from heedful import processes
from heedful.cli import shared
from heedful.files import read_json
from heedful.recipe_files import load_recipe
from heedful.run import follow, train
from heedful.tasks import cores
from heedful.tasks.cores import CoreUse, TimedSteps
from process_group import assert_equal_steps, run_command

NO_DROPOUT = {"model__dropout": 0.0}


def measure(winner: str, threads: int = 2) -> None:
    """Let this process measure any run, as on a CPU with some threads.

    The others are forked, where threads would not survive: their number is only recorded.

    Args:
        winner: usual, one thread, or several.
    """
    used = [threads]
    torch.get_num_threads = lambda: used[-1]
    torch.set_num_threads = used.append  # type: ignore[assignment]
    cores._LEAST_RUN, cores._MAX_STEPS, cores._ROUNDS = 0.0, 3, 1
    real = TimedSteps.take

    def take(self: TimedSteps, count: int) -> tuple[float, int]:
        _, tokens = real(self, count)
        is_several = self._updates._processes.count > 1
        is_best = {"usual": used[-1] == threads, "one thread": used[-1] == 1, "several": is_several}
        return (0.1 if is_best[winner] and (is_several == (winner == "several")) else 0.4), tokens

    TimedSteps.take = take  # type: ignore[method-assign]
    start = torch.multiprocessing.start_processes
    torch.multiprocessing.start_processes = partial(_fork, start)  # type: ignore[assignment]


def _fork(start: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return start(*arguments, **{**options, "start_method": "fork"})


def train_measured(
    recipe: Path, out: Path, winner: str, lines: Path, resume: bool = False, threads: int = 2
) -> None:
    """Train, write the printed lines to a file, and check that nothing is left behind."""
    measure(winner, threads)
    variables, printed = dict(os.environ), list[str]()
    options: dict[str, Any] = {"print_line": printed.append, "progress": False, "resume": resume}
    train(load_recipe(recipe), out, follower=follow, **options)
    lines.write_text("".join(f"{line}\n" for line in printed if line.startswith("cores ")))
    assert torch.get_num_threads() == threads
    assert not multiprocessing.active_children()
    added = {key for key in os.environ if os.environ[key] != variables.get(key)}
    assert added <= {"GLOO_SOCKET_IFNAME"}


def measured(
    commands: Commands, folder: Path, winner: str, **changes: Any
) -> tuple[Path, str, Mapping[str, Any]]:
    """A tiny run that is measured; its folder, its line on the cores, and its facts."""
    recipe = write_recipe(folder / "recipe.json", **changes)
    commands.call(train_measured, recipe, folder / "run", winner, folder / "lines")
    facts = read_json(folder / "run" / "run.json")
    return folder / "run", (folder / "lines").read_text(), facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """A run without dropout in one process, which measures nothing."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = write_recipe(folder / "recipe.json", **NO_DROPOUT)
    assert commands.train(recipe, folder / "run").code == 0
    facts = read_json(folder / "run" / "run.json")
    assert (facts["processes"], facts["threads"], facts["batch_parts"]) == (None, None, 1)
    return folder / "run"


def test_several_processes_take_the_steps_of_one(
    commands: Commands, alone: Path, tmp_path: Path
) -> None:
    run, line, facts = measured(commands, tmp_path, "several", **NO_DROPOUT)
    assert line.startswith("cores      2 processes of 1 thread: ")
    assert "1 process of 2 threads" in line
    assert "1 process of 1 thread" in line
    assert (facts["processes"], facts["threads"], facts["batch_parts"]) == (2, 1, 2)
    assert_equal_steps(run, alone)


@pytest.mark.parametrize(("winner", "threads"), [("usual", 2), ("one thread", 1)])
def test_one_process_is_chosen_where_it_is_faster(
    commands: Commands, alone: Path, tmp_path: Path, winner: str, threads: int
) -> None:
    run, line, facts = measured(commands, tmp_path, winner, **NO_DROPOUT)
    assert line.startswith(f"cores      1 process of {threads} thread")
    assert "2 processes of 1 thread" in line
    assert (facts["processes"], facts["threads"], facts["batch_parts"]) == (1, threads, 1)
    assert_equal_steps(run, alone)


@pytest.mark.parametrize("parts", [None, 1, 2])
def test_dropout_depends_on_the_parts_which_are_not_changed(
    commands: Commands, tmp_path: Path, parts: int | None
) -> None:
    """Several processes are measured only where a step already has a part for each."""
    recipe = {"training__batch_parts": parts}
    run, line, facts = measured(commands, tmp_path, "several", **recipe)
    assert ("2 processes" in line) == (parts == 2)
    assert facts["processes"] == (2 if parts == 2 else 1)
    assert facts["batch_parts"] == (parts or 1)
    whole = write_recipe(tmp_path / "whole.json", **recipe)
    assert commands.train(whole, tmp_path / "whole").code == 0
    assert_equal_steps(run, tmp_path / "whole")


def test_a_resumed_run_uses_the_cores_as_before(
    commands: Commands, alone: Path, tmp_path: Path
) -> None:
    """Without another measurement; on a machine with fewer threads, one process."""
    changes = {**NO_DROPOUT, "training__max_steps": 6}
    run, _, _ = measured(commands, tmp_path, "several", **changes)
    recipe = write_recipe(tmp_path / "longer.json", **{**NO_DROPOUT, "training__max_steps": 9})
    lines = tmp_path / "lines"
    commands.call(train_measured, recipe, run, "usual", lines, True)
    assert lines.read_text() == "cores      2 processes of 1 thread, as at the start of the run\n"
    recipe = write_recipe(tmp_path / "recipe.json", **NO_DROPOUT)
    commands.call(train_measured, recipe, run, "usual", lines, True, 1)
    assert lines.read_text() == ""
    assert_equal_steps(run, alone)


def not_measured(recipe: Path, out: Path, least: float, threads: int, follower: Any) -> None:
    """Train where no step may be timed."""
    measure("usual", threads)
    cores._LEAST_RUN = least
    TimedSteps.__init__ = None  # type: ignore[method-assign, assignment]
    train(load_recipe(recipe), out, follower=follower, progress=False)


@pytest.mark.parametrize(
    ("changes", "least", "threads", "follower"),
    [
        ({}, 600.0, 2, follow),
        ({"training__max_minutes": 5, "training__max_steps": 4}, 301.0, 2, follow),
        ({"training__parallel": "none"}, 0.0, 2, follow),
        ({"training__parallel": "ddp"}, 0.0, 2, follow),
        ({}, 0.0, 1, follow),
        ({}, 0.0, 2, None),
    ],
    ids=["short", "minutes", "none", "ddp", "one thread", "Python"],
)
def test_nothing_is_measured_where_nothing_can_be_chosen(
    commands: Commands,
    tmp_path: Path,
    changes: dict[str, Any],
    least: float,
    threads: int,
    follower: Any,
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", **changes)
    commands.call(not_measured, recipe, tmp_path / "run", least, threads, follower)
    assert read_json(tmp_path / "run" / "run.json")["processes"] is None


def test_processes_that_do_not_fit_into_the_memory_are_not_started(
    commands: Commands, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", **NO_DROPOUT)
    commands.call(train_in_little_memory, recipe, tmp_path / "run")
    assert read_json(tmp_path / "run" / "run.json")["processes"] == 1


def train_in_little_memory(recipe: Path, out: Path) -> None:
    """Train where the memory is that of one process."""
    cores.host_memory = lambda: 50 << 20
    processes.start_others = None  # type: ignore[assignment]
    train_measured(recipe, out, "several", out.parent / "lines")


def test_a_machine_without_connections_trains_in_one_process(
    commands: Commands, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", **NO_DROPOUT)
    commands.call(train_without_connections, recipe, tmp_path / "run")
    line = (tmp_path / "lines").read_text().splitlines()[0]
    assert line == "cores      one process, since no other can be started: no sockets"


def train_without_connections(recipe: Path, out: Path) -> None:
    """Train where no store of a group can be opened."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no sockets\nframe 1")

    torch.distributed.TCPStore = refuse  # type: ignore[assignment, misc]
    train_measured(recipe, out, "several", out.parent / "lines")


def command_that_ends(folder: Path, words: list[object], victim: int, number: int) -> None:
    """`heedful train` in two processes, one of which gets a signal after step 4."""
    from heedful.training.trainer import Trainer

    measure("several")
    real = Trainer._step

    def stepped(self: Trainer) -> None:
        real(self)
        if self.state.step == 4 and self.processes.rank == victim:
            os.kill(os.getpid(), number)

    Trainer._step = stepped  # type: ignore[method-assign]
    run_command(0, folder, words)


@pytest.mark.parametrize(
    ("victim", "number"), [(0, signal.SIGINT), (0, signal.SIGTERM), (1, signal.SIGTERM)]
)
def test_a_signal_saves_and_ends_all_processes(
    commands: Commands, tmp_path: Path, victim: int, number: int
) -> None:
    """Whichever of them it reaches; Ctrl-C is for the main one."""
    child, lines = end(commands, tmp_path, victim, number)
    assert child.exitcode == 130
    run = tmp_path / "run"
    assert lines == [f"stopped and saved; continue with: heedful train {run} --resume"]
    assert (run / "checkpoints" / "interim-00000004").is_dir()


@pytest.mark.parametrize(("victim", "code"), [(0, -signal.SIGKILL), (1, 2)])
def test_a_killed_process_is_named(
    commands: Commands, tmp_path: Path, victim: int, code: int
) -> None:
    """By the main one, or, if that is killed, by the other, which then ends too."""
    child, lines = end(commands, tmp_path, victim, signal.SIGKILL)
    assert child.exitcode == code
    deadline = time.monotonic() + 20
    while not lines:  # the other process ends later
        assert time.monotonic() < deadline
        time.sleep(0.1)
        lines = errors(tmp_path)
    (line,) = lines
    assert line.startswith(f"error: rank {victim} of 2 (process ")


def command_that_fails(folder: Path, words: list[object]) -> None:
    """`heedful train` in two processes, of which the other one has an internal error."""
    from heedful.training.trainer import Trainer

    measure("several")
    real = Trainer._step

    def stepped(self: Trainer) -> None:
        real(self)
        if self.state.step == 4 and self.processes.rank == 1:
            raise ArithmeticError("a defect")

    Trainer._step = stepped  # type: ignore[method-assign]
    run_command(0, folder, words)


def test_an_internal_error_of_another_process_is_printed(
    commands: Commands, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", **NO_DROPOUT)
    words = ["train", recipe, "--out", tmp_path / "run", "--quiet"]
    child = commands.start(command_that_fails, tmp_path, words)
    child.join()
    assert child.exitcode == 2
    assert (tmp_path / "out.0").read_text().count("ArithmeticError: a defect") == 1


def end(commands: Commands, folder: Path, victim: int, number: int) -> tuple[Any, list[str]]:
    """A run in two processes, one of which gets a signal; the main process, and what is printed."""
    recipe = write_recipe(folder / "recipe.json", **NO_DROPOUT)
    words = ["train", recipe, "--out", folder / "run", "--quiet"]
    child = commands.start(command_that_ends, folder, words, victim, number)
    child.join()
    return child, errors(folder)


def errors(folder: Path) -> list[str]:
    """The printed lines, without those of torch's C++, which a forked process does not silence."""
    lines = (folder / "out.0").read_text().splitlines()
    return [line for line in lines if line.startswith(("error: ", "stopped ", "Traceback"))]


@pytest.mark.slow
def test_the_command_starts_python_processes(commands: Commands, tmp_path: Path) -> None:
    """As for users: new interpreters, which are not forked."""
    recipe = write_recipe(tmp_path / "recipe.json", **NO_DROPOUT)
    words = ["train", recipe, "--out", tmp_path / "run"]
    commands.call(command_with_interpreters, tmp_path, words)
    assert read_json(tmp_path / "run" / "run.json")["processes"] == 2
    assert "cores      2 processes of 1 thread" in (tmp_path / "out.0").read_text()


def command_with_interpreters(folder: Path, words: list[object]) -> None:
    """`heedful train` that chooses two processes."""
    start = torch.multiprocessing.start_processes
    measure("several")
    torch.multiprocessing.start_processes = start
    assert shared.follow_run.__module__ == "heedful.cli.shared"  # found by a new interpreter
    run_command(0, folder, words)


def test_a_use_is_named() -> None:
    assert [str(use) for use in (CoreUse(1, 8), CoreUse(4, 1))] == [
        "1 process of 8 threads",
        "4 processes of 1 thread",
    ]
