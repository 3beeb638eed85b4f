"""Runs of several processes: equal to those of one, resumed by any number, ended together."""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from commands import Commands, write_recipe
from encoder_runs import recipe_of
from heedful.processes import Group
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import RunStarted
from heedful.training.listeners import read_log
from process_group import (
    Case,
    assert_equal_steps,
    launch,
    run_group,
    run_two,
    steps_of,
    train_all,
    write_case,
)

STEPS = 4
MOE = {"architecture": "mixtral", "d_model": 16, "num_heads": 2, "num_kv_heads": 2}
MOE |= {"num_layers": 2, "d_ff": 32, "num_experts": 4}
# Each with dropout. Three batches a step, the last one of an epoch without its equal share of rows.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder-decoder": (
        "translation",
        {"training__ema_decay": 0.5, "training__activation_checkpointing": True},
    ),
    "decoder": ("language_modeling", {"training__layer_lr_decay": 0.5}),
    "masked": ("masked_lm", {"training__word_dropout": 0.2}),
    "experts": ("language_modeling", {"model": MOE}),
    "muon": ("classification", {"training__optimizer": {"name": "muon"}}),
}


def recipe_json(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    task, keys = RECIPES[name]
    defaults = {"training__max_steps": STEPS, "training__evaluate_every": STEPS}
    defaults |= {"training__gradient_accumulation": 3, "training__batch_parts": 2}
    defaults |= {} if "model" in keys else {"model__dropout": 0.2}
    recipe = recipe_of(task, folder, **(defaults | keys | changes))
    content: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_unset=True))
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Callable[[str], Path]:
    """The run of a recipe in one process."""
    folder = tmp_path_factory.mktemp("whole")
    cases = {name: write_case(folder, name, recipe_json(name, folder)) for name in RECIPES}
    longer = recipe_json("encoder-decoder", folder, training__max_steps=2 * STEPS)
    cases["longer"] = write_case(folder, "longer", longer)
    commands.call(train_all, 0, list(cases.values()))
    return lambda name: cases[name].out


def test_two_processes_take_the_steps_of_one(
    commands: Commands, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """With dropout, by both ways to share the net."""
    cases = {
        (name, sharing): write_case(
            tmp_path, f"{name}-{sharing}", recipe_json(name, tmp_path, training__parallel=sharing)
        )
        for sharing in ("ddp", "fsdp")
        for name in RECIPES
        if (name, sharing) != ("muon", "fsdp")  # refused
    }
    run_group(commands, tmp_path, 2, train_all, [*cases.values()])
    for (name, _), case in cases.items():
        assert_equal_steps(case.out, whole(name))


@pytest.mark.slow
def test_a_checkpoint_of_four_goes_on_at_one_and_three(
    commands: Commands, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the same random numbers, and whichever way the net is shared.

    A step has six parts, so that in the second round two of four processes have none.
    """
    first = write_case(
        tmp_path, "first", recipe_json("encoder-decoder", tmp_path, training__parallel="fsdp")
    )
    run_group(commands, tmp_path, 4, train_all, [first])
    assert_equal_steps(first.out, whole("encoder-decoder"))
    newest = Checkpoints(first.out / "checkpoints", 1).newest()
    assert newest is not None
    assert len([*(newest / "training").glob("*.safetensors")]) == 4
    for count, sharing in ((1, "auto"), (3, "fsdp")):
        out = tmp_path / f"at-{count}"
        shutil.copytree(first.out, out)
        changes = {"training__max_steps": 2 * STEPS, "training__parallel": sharing}
        content = recipe_json("encoder-decoder", tmp_path, **changes)
        recipe = write_case(tmp_path, f"recipe-{count}", content).recipe
        case = Case(recipe, out, resume=True)
        if count == 1:
            commands.call(train_all, 0, [case])
        else:
            run_group(commands, tmp_path, count, train_all, [case])
        assert_equal_steps(out, whole("longer"))


def _kill_at(step: int, victim: int, number: int, rank: int, *, once: bool = True) -> None:
    """Send a signal to this process, if its rank is `victim` (-1: any), after a step."""
    from heedful.training.trainer import Trainer

    real = Trainer._step

    def stepped(self: Trainer) -> None:
        real(self)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.state.step == step and victim in (rank, -1) and (is_first or not once):
            os.kill(os.getpid(), number)

    Trainer._step = stepped  # type: ignore[method-assign]


def _lose_loss(rank: int) -> None:
    """Let the loss of one process be NaN."""
    from heedful.training.step import LossNet

    real = LossNet.forward

    def forward(self: LossNet, batch: Any) -> Any:
        sums = real(self, batch)
        return sums._replace(loss=sums.loss * float("nan")) if rank == 1 else sums

    LossNet.forward = forward  # type: ignore[method-assign]


def _fill_disk(rank: int) -> None:
    """Files of one process must be smaller than its part, yet not than the group's store."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", "cuda:1"), ("cuda", "cuda:0")])
def test_a_device_that_is_named_by_its_number_is_used(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the one process of a machine; it was replaced by the first device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    group = Group.__new__(Group)
    group.count, group.local_rank, group.local_count = 2, 0, 1
    assert group.device(torch.device(name)) == torch.device(expected)
    assert chosen == [torch.device(expected)]


@pytest.mark.parametrize("victim", [-1, 1])
def test_a_signal_saves_and_ends_all_processes(
    commands: Commands, tmp_path: Path, victim: int
) -> None:
    """Whichever of them it reaches."""
    before = partial(_kill_at, 4, victim, signal.SIGTERM)
    run, lines = tmp_path / "run", run_two(commands, tmp_path, before, [130, 130])
    assert lines == [f"stopped and saved; continue with: heedful train {run} --resume"]
    newest = Checkpoints(run / "checkpoints", 1).newest()
    assert newest is not None
    assert newest.name == "interim-00000004"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_once(commands: Commands, tmp_path: Path, victim: int) -> None:
    before = partial(_kill_at, 4, victim, signal.SIGKILL)
    codes = [-9, 2] if victim == 0 else [2, -9]
    (line,) = run_two(commands, tmp_path, before, codes)
    assert line.startswith(f"error: rank {victim} of 2 (process ")
    assert "--resume" in line


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": (None, {"training__parallel": "none"}, "training.parallel none is for one process"),
    "recipe": (None, {"training__paralel": "ddp"}, "unknown key training.paralel"),
    "muon": (
        None,
        {"training__parallel": "fsdp", "training__optimizer": {"name": "muon"}},
        "muon needs whole matrices",
    ),
    "not finite": (_lose_loss, {}, "the loss is nan"),
    "full disk": (_fill_disk, {"training__parallel": "fsdp"}, "rank 1 cannot write its part"),
}


@pytest.mark.parametrize(("before", "changes", "part"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_printed_by_one_process(
    commands: Commands, tmp_path: Path, before: Any, changes: dict[str, Any], part: str
) -> None:
    run = tmp_path / "run"
    (line,) = run_two(commands, tmp_path, before, [2, 2], **changes)
    assert line.startswith("error: ")
    assert part in line
    assert not Checkpoints(run / "checkpoints", 1).newest()
    assert not [*run.rglob(".*.tmp")]


def test_a_killed_process_is_restarted_by_torchrun(commands: Commands, tmp_path: Path) -> None:
    """From the last checkpoint, without --resume, to the same end."""
    changes = {"training__batch_parts": 2, "training__checkpoint_every": 2}
    recipe = write_recipe(tmp_path / "recipe.json", **changes)
    assert commands.train(recipe, tmp_path / "whole").code == 0
    words = ["train", recipe, "--out", tmp_path / "run", "--quiet"]
    before = partial(_kill_at, 5, 1, signal.SIGKILL)
    commands.call(launch, tmp_path, 2, words, 1, before)
    assert_equal_steps(tmp_path / "run", tmp_path / "whole")
    events = read_log(tmp_path / "run" / "log.jsonl")
    starts = [event.resumed_from for event in events if isinstance(event, RunStarted)]
    assert starts == [None, 4]


@pytest.mark.benchmarks
@pytest.mark.parametrize("count", [2, 4])
def test_fifty_steps_are_those_of_one_process(
    commands: Commands, tmp_path: Path, count: int
) -> None:
    """The loss of each step within 1e-5, its weights updated by their own gradients."""
    kinds = ("encoder-decoder", "decoder", "masked", "experts")
    cases: dict[tuple[str, str], Case] = {}
    for name in kinds:
        for sharing in ("none", "ddp", "fsdp"):
            changes = {"training__max_steps": 50, "training__evaluate_every": 50}
            content = recipe_json(name, tmp_path, **changes, training__parallel=sharing)
            cases[name, sharing] = write_case(tmp_path, f"{name}-{sharing}", content)
    alone = [case for (_, sharing), case in cases.items() if sharing == "none"]
    commands.call(train_all, 0, alone)
    run_group(commands, tmp_path, count, train_all, [c for c in cases.values() if c not in alone])
    for (name, _), case in cases.items():
        assert len(steps_of(case.out)) == 50
        assert_equal_steps(case.out, cases[name, "none"].out, of_norms=1e-4)


def _kill_after(seconds: dict[tuple[str, int], float], rank: int) -> None:
    """Kill this process after some seconds, by the number of the attempt and its rank."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"], rank
    if attempt in seconds:
        Timer(seconds[attempt], os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.benchmarks
@pytest.mark.parametrize("sharing", ["ddp", "fsdp"])
def test_twenty_kills_at_random_moments(commands: Commands, tmp_path: Path, sharing: str) -> None:
    """Torchrun starts the processes again each time; the run ends as one that was never killed."""
    changes = {"training__batch_parts": 2, "training__checkpoint_every": 5}
    changes |= {"training__max_steps": 400, "training__evaluate_every": 100}
    recipe = write_recipe(tmp_path / "recipe.json", **changes, training__parallel=sharing)
    whole = commands.train(recipe, tmp_path / "whole")
    assert whole.code == 0
    draw = random.Random(sharing)
    # From before the processes have met to some steps of training.
    kills = {(str(n), draw.randrange(2)): draw.uniform(0.05, 2.5) for n in range(20)}
    words = ["train", recipe, "--out", tmp_path / "run", "--quiet"]
    commands.call(launch, tmp_path, 2, words, 20, partial(_kill_after, kills))
    assert_equal_steps(tmp_path / "run", tmp_path / "whole")
    assert not [*(tmp_path / "run").rglob(".*.tmp")]
