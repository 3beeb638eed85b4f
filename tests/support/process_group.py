"""Several processes that train together, forked from one that has imported torch."""

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from commands import Commands, default_signals, run_whole, write_recipe
from heedful.cli import main
from heedful.recipe_files import load_recipe
from heedful.run import train
from heedful.training.events import Evaluated, StepDone
from heedful.training.listeners import read_log


@dataclass(frozen=True)
class Case:
    """A run: a recipe as JSON, its folder, and the arguments of `train`."""

    recipe: Path
    out: Path
    resume: bool = False
    changes: tuple[str, ...] = ()


def run_group(
    commands: Commands,
    folder: Path,
    count: int,
    function: Callable[..., None],
    *arguments: Any,
    codes: Sequence[int] | None = None,
    wait: float = 90,
    trials: int = 1,
) -> None:
    """Call `function(rank, *arguments)` in `count` processes of one group.

    Args:
        codes: the expected exit codes by rank; default: 0.
        wait: seconds for which a process waits for another one, which may be compiling kernels.
        trials: for a function that can be called again: one of some eighty groups waits until
            gloo, which is not tested here, gives up.
    """
    expected = list(codes or [0] * count)
    for trial in range(trials):
        (folder / "store").unlink(missing_ok=True)
        members = [(folder, rank, count, wait, function, arguments) for rank in range(count)]
        children = [commands.start(_member, *member) for member in members]
        for child in children:
            child.join()
        actual = [child.exitcode for child in children]
        if actual == expected:
            return
        print(f"trial {trial + 1}: exit codes {actual}")
    raise AssertionError(f"exit codes {actual}, expected {expected}")


def run_two(
    commands: Commands, folder: Path, before: Any, codes: list[int], **changes: Any
) -> list[str]:
    """A tiny run of two processes in `folder`/run; all lines that they print.

    Without those of gloo, which some versions of torch print on standard error.
    """
    recipe = write_recipe(folder / "recipe.json", **changes)
    words = ["train", recipe, "--out", folder / "run", "--quiet"]
    run_group(commands, folder, 2, run_command, folder, words, before, codes=codes)
    lines = [(folder / f"out.{rank}").read_text().splitlines() for rank in range(2)]
    return [line for line in lines[0] + lines[1] if not line.startswith("[Gloo]")]


def train_all(rank: int, cases: Sequence[Case]) -> None:
    """Train the runs one after the other, in this process of a group or alone."""
    for case in cases:
        recipe = load_recipe(case.recipe)
        train(recipe, case.out, resume=case.resume, changes=case.changes, progress=False)


def run_command(rank: int, folder: Path, words: Sequence[object], before: Any = None) -> None:
    """`heedful WORDS` in this process of a group; what it prints goes to `folder`/out.RANK."""
    default_signals()
    handle = os.open(folder / f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if before is not None:
        before(rank)
    sys.argv = ["heedful", *map(str, words)]
    main()


def launch(folder: Path, count: int, words: Sequence[object], restarts: int, before: Any) -> None:
    """`torchrun --max-restarts RESTARTS -m heedful WORDS`, with forked processes."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["PYTHON_EXEC"] = sys.executable
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        max_restarts=restarts,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.05,
    )
    elastic_launch(config, _launched)(folder, words, before)


def _launched(folder: Path, words: Sequence[object], before: Any) -> None:
    torch.set_num_threads(1)
    run_whole(False)
    try:
        run_command(int(os.environ["RANK"]), folder, words, before)
    except SystemExit as end:  # as a program's end: this launcher knows only functions
        os._exit(int(end.code or 0)) if end.code else None


def write_case(folder: Path, name: str, recipe: Mapping[str, Any], **more: Any) -> Case:
    """A case whose recipe and run are in `folder`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    return Case(path, folder / name, **more)


def steps_of(run: Path) -> list[tuple[int, float, float, float]]:
    """Step, loss, negative log-likelihood and gradient norm of each step."""
    events = [e for e in read_log(run / "log.jsonl") if isinstance(e, StepDone)]
    return [(event.step, event.loss, event.nll, event.grad_norm) for event in events]


def assert_equal_steps(actual: Path, expected: Path, *, of_norms: float = 1e-5) -> None:
    """Every step equal but for the order of sums; and the scores.

    Args:
        of_norms: relative tolerance of gradient norms, which move by more than losses over many
            steps, as Adam divides small gradients by their size.
    """
    steps, same_steps = np.array(steps_of(actual)), np.array(steps_of(expected))
    np.testing.assert_allclose(steps[:, :3], same_steps[:, :3], rtol=1e-5)
    np.testing.assert_allclose(steps[:, 3], same_steps[:, 3], rtol=of_norms)
    scores, same = (
        [event.loss for event in read_log(run / "log.jsonl") if isinstance(event, Evaluated)]
        for run in (actual, expected)
    )
    np.testing.assert_allclose(scores, same, rtol=1e-5)
    assert {path.name for path in actual.iterdir()} == {path.name for path in expected.iterdir()}


def _member(
    folder: Path,
    rank: int,
    count: int,
    wait: float,
    function: Callable[..., None],
    arguments: Any,
) -> None:
    faulthandler.dump_traceback_later(wait + 60, exit=True)  # instead of hanging silently
    # Without a port that another may take, and without asking a resolver for this host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    run_whole(False)
    distributed.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=wait),
    )
    function(rank, *arguments)
    distributed.destroy_process_group()
