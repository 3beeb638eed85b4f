"""Checkpoints written while training goes on: as of a run that waits for them, or absent."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import Commands, write_recipe
from heedful.errors import UserError
from heedful.training.checkpoint import Checkpoints, CheckpointWriter
from heedful.training.events import CheckpointSaved
from heedful.training.listeners import read_log
from process_group import run_command, run_group, run_two
from trainers import pairs, settings, small_net, trainer_of

FILES = ("model.safetensors", "training.safetensors")


def make_trainer(folder: Path, **changes: Any) -> Any:
    """A trainer of twelve steps that saves after every third one."""
    keys = {"max_steps": 12, "evaluate_every": 3, "average_checkpoints": 4, "ema_decay": 0.9}
    store = pairs([(3, 2), (4, 5)])
    trainer, _ = trainer_of(small_net(), store, [[0], [1]], settings(**(keys | changes)), folder)
    return trainer


def contents(folder: Path) -> dict[str, bytes]:
    """The files of all checkpoints, without the time in their states."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for name in files:
        if name.endswith("state.json"):
            state = json.loads(files[name])
            del state["seconds"]
            files[name] = json.dumps(state).encode()
    return files


def test_checkpoints_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    """To the bit; and the next steps do not change what a slow writer writes."""
    folders = {}
    real = Checkpoints.save

    def slow(self: Checkpoints, *arguments: Any, **options: Any) -> Path:
        time.sleep(0.05)  # some steps
        return real(self, *arguments, **options)

    for is_asynchronous in (False, True):
        trainer = make_trainer(tmp_path / str(is_asynchronous), async_checkpoints=is_asynchronous)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "save", slow)
            trainer.run()
        folders[is_asynchronous] = trainer.checkpoints.directory
        saved = [e.step for e in trainer.listeners[0].of_type(CheckpointSaved)]
        assert saved == [3, 6, 9, 12]
    assert contents(folders[False]) == contents(folders[True]) != {}


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 3 is written in the middle of step 6, with the weights of step 3."""
    may_write, in_flight, most = threading.Event(), [0], [0]
    real = Checkpoints.save

    def save(self: Checkpoints, *arguments: Any, **options: Any) -> Path:
        in_flight[0] += 1
        most[0] = max(most[0], in_flight[0])
        assert may_write.wait(timeout=60)
        path = real(self, *arguments, **options)
        in_flight[0] -= 1
        return path

    monkeypatch.setattr(Checkpoints, "save", save)
    trainer = make_trainer(tmp_path / "run", average_checkpoints=9)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    take = trainer._step

    def step() -> None:
        take()
        net = dict(trainer.net.named_parameters())
        weights[trainer.state.step] = {
            name: tensor.detach().clone() for name, tensor in net.items()
        }
        if trainer.state.step == 5:
            assert in_flight == [1]
            assert trainer.checkpoints.newest() is None
            may_write.set()

    monkeypatch.setattr(trainer, "_step", step)
    trainer.run()
    assert most == [1]
    for number in (3, 6, 9, 12):
        path = trainer.checkpoints.directory / f"step-{number:08d}" / "model.safetensors"
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, weights[number][name])
    assert not torch.equal(*(next(iter(weights[n].values())) for n in (3, 6)))


def test_an_error_of_the_writer_is_raised_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> Path:
        raise UserError("cannot write it: No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(UserError, match="No space left"):
        trainer.run()
    assert trainer.state.step < 6
    assert trainer.listeners[0].of_type(CheckpointSaved) == []


def test_a_run_that_fails_completes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path / "run")
    take = trainer._step

    def step() -> None:
        if trainer.state.step == 4:
            raise UserError("a wrong batch")
        take()

    monkeypatch.setattr(trainer, "_step", step)
    with pytest.raises(UserError, match="a wrong batch"):
        trainer.run()
    assert trainer.checkpoints.newest().name == "step-00000003"


def test_an_urgent_checkpoint_is_complete_at_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(Checkpoints(tmp_path / "run", 1), is_asynchronous=True)
    tensors = {"a": torch.ones(2)}
    options = {"interim": True, "is_sharded": False}
    writer.save(1, tensors, tensors, {}, **options, is_urgent=True)
    path = tmp_path / "run" / "interim-00000001"
    assert {file.name for file in path.iterdir()} == {*FILES, "state.json"}
    event = writer.finished()
    assert event is not None
    assert (event.step, event.path, event.kind) == (1, str(path), "interim")
    assert writer.finished(wait=True) is None


def _kill_in_write(rank: int = 0) -> None:
    """SIGKILL in the middle of the second checkpoint, of step 3, when step 4 has been taken."""
    from heedful.training import checkpoint
    from heedful.training.trainer import Trainer

    if rank:
        return
    take, real, calls = Trainer._step, checkpoint.write_json, [0]
    is_due, goes_on = threading.Event(), threading.Event()

    def step(self: Trainer) -> None:
        take(self)
        if self.state.step == 4:
            assert is_due.wait(60)
            goes_on.set()
            time.sleep(60)

    def write(path: Path, content: Any) -> None:
        real(path, content)
        calls[0] += 1
        if calls[0] == 2:
            is_due.set()
            assert goes_on.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._step = step  # type: ignore[method-assign]
    checkpoint.write_json = write


@pytest.mark.parametrize("sharing", ["none", "fsdp"])
def test_killed_while_writing_the_checkpoint_before_remains(
    commands: Commands, tmp_path: Path, sharing: str
) -> None:
    """And the resumed run ends as one that was never killed."""
    changes = {"training__checkpoint_every": 2, "training__batch_parts": 2}
    recipe, out = write_recipe(tmp_path / "recipe.json", **changes), tmp_path / "run"
    words = ["train", recipe, "--out", out, "--quiet"]
    if sharing == "none":
        assert commands.run(*words, first=_kill_in_write).signal == signal.SIGKILL
    else:
        words += ["--set", "training.parallel=fsdp"]
        codes = [-signal.SIGKILL, 2]
        run_group(commands, tmp_path, 2, run_command, tmp_path, words, _kill_in_write, codes=codes)
    assert [*(out / "checkpoints").glob(".*.tmp")]
    newest = Checkpoints(out / "checkpoints", 1).newest()
    assert newest is not None
    steps = [e.step for e in read_log(out / "log.jsonl") if isinstance(e, CheckpointSaved)]
    assert int(newest.name.split("-")[1]) == 2
    assert steps == [2]
    assert commands.run("train", out, "--resume", "--quiet").code == 0
    assert not [*(out / "checkpoints").glob(".*.tmp")]
    assert commands.train(recipe, tmp_path / "whole").code == 0
    names = ("scores.json", "test.output.txt") if sharing == "fsdp" else ("model.safetensors",)
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _full_at_second(rank: int) -> None:
    """The disk of one process is full from the second checkpoint on."""
    from heedful.training import checkpoint

    real, calls = checkpoint.save_shards, [0]

    def save(*arguments: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise UserError("rank 1 cannot write its part")
        real(*arguments)

    checkpoint.save_shards = save


def test_a_full_disk_of_one_process_is_one_line(commands: Commands, tmp_path: Path) -> None:
    """The checkpoint before it remains."""
    changes = {"training__checkpoint_every": 2, "training__parallel": "fsdp"}
    (line,) = run_two(commands, tmp_path, _full_at_second, [2, 2], **changes)
    assert line == "error: rank 1 cannot write its part"
    newest = Checkpoints(tmp_path / "run" / "checkpoints", 1).newest()
    assert newest is not None
    assert newest.name == "interim-00000002"
    assert not [*(tmp_path / "run").rglob(".*.tmp")]
