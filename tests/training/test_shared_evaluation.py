"""Evaluations that several processes share: equal to those of one, ended together."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import Commands, write_recipe
from encoder_runs import recipe_of
from heedful.errors import UserError
from heedful.evaluation.likelihood import sum_losses
from heedful.evaluation.sharing import current_shares, share_evaluation
from heedful.parts.losses import LossSum
from heedful.processes import Processes
from heedful.tasks.translation import Translation
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import Evaluated, RunFinished
from heedful.training.listeners import read_log
from process_group import Case, run_command, run_group, run_two, train_all, write_case

TASKS: dict[str, dict[str, Any]] = {
    "translation": {"training__ema_decay": 0.5, "evaluation__decode_sentences": 7},
    "language_modeling": {"training__average_checkpoints": 2},
    "classification": {},
    "masked_lm": {"evaluation__num_samples": 2},
    "denoising": {},
}


def case_of(task: str, folder: Path, sharing: str) -> Case:
    keys = {"training__max_steps": 2, "training__evaluate_every": 1, "training__batch_parts": 3}
    recipe = recipe_of(task, folder, **keys, **TASKS[task], training__parallel=sharing)
    content = json.loads(recipe.model_dump_json(exclude_unset=True))
    return write_case(folder, f"{task}-{sharing}", content)


def small_batches(tokens: int) -> None:
    """Evaluate in batches of few tokens, so that each process has some or none of them."""
    from heedful.data import plans
    from heedful.pipelines import scoring

    plans.plan_evaluation_batches.__kwdefaults__["max_tokens"] = tokens
    scoring.EVALUATION_BATCH_TOKENS = tokens


def train_counting(
    rank: int, cases: list[Case], tokens: int, folder: Path, before: Any = None
) -> None:
    """Train with small evaluation batches; `folder`/RANK.json: the shares of this process."""
    from heedful.evaluation import sharing

    small_batches(tokens)
    if before is not None:
        before(rank)
    numbers: list[int] = []
    real = sharing.Shares.map

    def counted(self: sharing.Shares, function: Any, items: Any) -> Any:
        numbers.append(len(items[self.part]))
        return real(self, function, items)

    sharing.Shares.map = counted  # type: ignore[method-assign]
    train_all(rank, cases)
    (folder / f"{rank}.json").write_text(json.dumps(numbers))


def assert_equal_evaluations(actual: Path, expected: Path) -> None:
    """All that evaluations and final scores say, but for the order of sums."""
    pairs = [
        [e for e in read_log(run / "log.jsonl") if isinstance(e, Evaluated)]
        for run in (actual, expected)
    ]
    assert len(pairs[0]) == len(pairs[1]) > 0
    for event, same in zip(*pairs, strict=True):
        np.testing.assert_allclose(event.loss, same.loss, rtol=1e-6)
        np.testing.assert_allclose(event.token_accuracy, same.token_accuracy, rtol=1e-6)
        assert event.samples == same.samples
        assert event.scores.keys() == same.scores.keys()
        for name, value in event.scores.items():
            np.testing.assert_allclose(value, same.scores[name], rtol=1e-6)
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in actual.iterdir()} == names
    for name in names:
        if name.endswith((".output.txt", "samples.txt")):
            assert (actual / name).read_text() == (expected / name).read_text()
    ends = [
        next(e for e in read_log(run / "log.jsonl") if isinstance(e, RunFinished))
        for run in (actual, expected)
    ]
    for name, value in ends[1].scores.items():
        np.testing.assert_allclose(ends[0].scores[name], value, rtol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Callable[[str], Path]:
    """The run of a task in one process."""
    folder = tmp_path_factory.mktemp("alone")
    cases = {task: case_of(task, folder, "none") for task in TASKS}
    commands.call(train_counting, 0, [*cases.values()], 40, folder)
    return lambda task: cases[task].out


def _no_room(rank: int) -> None:
    """The memory of one process is too small for the whole net."""
    from heedful.training import parallel

    if rank == 1:
        parallel.host_memory = lambda: 1000


@pytest.mark.parametrize(("sharing", "before"), [("ddp", None), ("fsdp", None), ("fsdp", _no_room)])
def test_three_processes_evaluate_as_one(
    commands: Commands, alone: Callable[[str], Path], tmp_path: Path, sharing: str, before: Any
) -> None:
    """Numbers of batches and sentences that three does not divide; each process has its share."""
    tasks = [*TASKS] if sharing == "ddp" else [*TASKS][:1] if before else [*TASKS][:2]
    cases = {task: case_of(task, tmp_path, sharing) for task in tasks}
    run_group(commands, tmp_path, 3, train_counting, [*cases.values()], 40, tmp_path, before)
    for task, case in cases.items():
        assert_equal_evaluations(case.out, alone(task))
    numbers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    if before is None:
        assert [counts[0] for counts in numbers] == [3, 2, 2]
    else:  # the main process alone
        assert (numbers[0][0], numbers[1:]) == (7, [[], []])


def test_a_line_says_that_the_main_process_evaluates_alone(
    commands: Commands, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", training__parallel="fsdp")
    words = ["train", recipe, "--out", tmp_path / "run"]
    run_group(commands, tmp_path, 2, run_command, tmp_path, words, _no_room)
    assert "the main process evaluates alone" in (tmp_path / "out.0").read_text()


def test_processes_without_a_batch_add_zeros(commands: Commands, tmp_path: Path) -> None:
    """One batch for three processes."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    commands.call(train_counting, 0, [case_of("masked_lm", alone, "none")], 8192, alone)
    case = case_of("masked_lm", shared, "ddp")
    run_group(commands, shared, 3, train_counting, [case], 8192, shared)
    assert_equal_evaluations(case.out, alone / "masked_lm-none")


def _fail_in_evaluation(error: Exception, rank: int) -> None:
    """Raise an error in one process as it evaluates."""
    real = Translation.collate

    def collate(self: Any, data: Any, item: Any, split: str = "train") -> Any:
        if rank == 1 and split == "valid":
            raise error
        return real(self, data, item, split)

    Translation.collate = collate  # type: ignore[method-assign]


def _interrupt_in_evaluation(victim: int, rank: int) -> None:
    """SIGTERM to one process as it decodes the second time."""
    real, calls = Translation.decode, [0]

    def decode(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if rank == victim and calls[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    Translation.decode = decode  # type: ignore[method-assign]


def _small_and(before: Any, rank: int) -> None:
    small_batches(20)
    before(rank)


@pytest.mark.parametrize(
    ("error", "sharing"),
    [(UserError("no such row"), "ddp"), (RuntimeError("out of memory\nat x"), "fsdp")],
)
def test_an_error_in_an_evaluation_names_its_rank(
    commands: Commands, tmp_path: Path, error: Exception, sharing: str
) -> None:
    before = partial(_small_and, partial(_fail_in_evaluation, error))
    (line,) = run_two(commands, tmp_path, before, [2, 2], training__parallel=sharing)
    kind = "" if isinstance(error, UserError) else "RuntimeError: "
    reason = " ".join(str(error).split())
    newest = Checkpoints(tmp_path / "run" / "checkpoints", 1).newest()
    assert line.startswith("error: step 3: the evaluation failed: rank 1 of 2 (process ")
    assert line.endswith(f"): {kind}{reason}; step 3 is saved in {newest}: resume from it")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """The run of `run_two` in one process, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(folder / "recipe.json", training__batch_parts=2)
    assert commands.train(recipe, folder / "run").code == 0
    return folder / "run"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_ends_the_evaluation_in_all(
    commands: Commands, whole: Path, tmp_path: Path, victim: int
) -> None:
    """Whichever process it reaches; the run goes on with the evaluation that was left."""
    before = partial(_interrupt_in_evaluation, victim)
    lines = run_two(commands, tmp_path, before, [130, 130])
    run = tmp_path / "run"
    assert lines == [f"stopped and saved; continue with: heedful train {run} --resume"]
    newest = Checkpoints(run / "checkpoints", 1).newest()
    assert newest is not None
    assert newest.name.startswith("interim-")
    assert commands.run("train", run, "--resume", "--quiet").code == 0
    assert_equal_evaluations(run, whole)


def test_one_process_has_all_work_and_no_wrapped_error() -> None:
    assert share_evaluation(Processes(), lambda: current_shares().map(list, [1, 2])) == [1, 2]

    def fail() -> None:
        raise UserError("as it is")

    with pytest.raises(UserError, match=r"^as it is$"):
        share_evaluation(Processes(), fail)


def test_the_sum_of_no_losses_changes_no_sum() -> None:
    one = LossSum(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(3), 4)
    total = sum_losses([one, sum_losses([])])
    assert [float(value) for value in total if value is not None] == [2.0, 1.0, 3.0, 4.0]
    uncounted = sum_losses([one._replace(correct=None), sum_losses([])])
    assert uncounted.correct is None
