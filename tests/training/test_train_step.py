"""One step of every task: equal on one and two processes, without device synchronization."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compiled_nets
import ddp_worker
import fsdp_worker
from architectures import tiny
from commands import Commands
from encoder_runs import PreparedTask, loss_net_of, recipe_of
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.kernels import library as kernels
from heedful.parts import losses
from heedful.training.checkpoint import Checkpoints
from heedful.training.step import LossNet
from heedful.training.trainer import Trainer
from process_group import run_group
from trainers import batch_for
from waits import Waits

TASKS = ("translation", "language_modeling", "masked_lm", "denoising", "classification")


def recipe_named(name: str, folder: Path, **changes: Any) -> Any:
    """A recipe of a task, of R-Drop, or of distillation from a teacher of equal size."""
    kind, _, task = name.rpartition("-")
    keys = {"model__dropout": 0.0, "training__label_smoothing": 0.1}
    if kind == "rdrop":
        keys |= {"training__r_drop": 2.0, "model__dropout": 0.2}
    if kind == "distilled":
        keys["distillation"] = {"teacher": "a net of the test", "cosine_weight": 1.0}
    if kind == "hidden":
        keys["training__word_dropout"] = 0.3
    return recipe_of(task, folder, **keys, **changes)


NAMES = (
    *TASKS,
    *(f"distilled-{name}" for name in TASKS if name != "denoising"),
    "rdrop-translation",
    "rdrop-classification",
)
HIDDEN = ("hidden-translation", "hidden-masked_lm")  # which mask tokens at random


def is_rdrop(name: str) -> bool:
    """True for a loss of two passes, which are equal without dropout."""
    return name.startswith("rdrop")


def run_two(commands: Commands, worker: Callable[..., None], folder: Path) -> None:
    """Call a worker in two processes, which write into the folder."""
    run_group(commands, folder, 2, worker, folder, 2, wait=30, trials=2)


def test_two_processes_have_the_gradients_of_one(commands, tmp_path):
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        recipe = recipe_named(name, folder)
        (tmp_path / f"{name}.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    run_two(commands, ddp_worker.save_gradients, tmp_path)
    for name in NAMES:
        run = PreparedTask(recipe_named(name, tmp_path / name), tmp_path / "data")
        loss_net = loss_net_of(run).train(is_rdrop(name))  # others without dropout
        batches = [run.load_batch(item) for item in run.plan_epoch(0)[:2]]
        assert len(batches) == 2
        targets = sum(batch.num_targets for batch in batches)
        for seed, batch in enumerate(batches):
            torch.manual_seed(seed)  # of the dropout, as in the process of the batch
            (loss_net(batch).loss / targets).backward()
        actual = load_file(tmp_path / f"{name}.safetensors")
        for key, weight in loss_net.net.named_parameters():
            if weight.grad is not None:
                torch.testing.assert_close(actual[key], weight.grad, rtol=1e-4, atol=1e-6)


def test_two_shards_of_a_net_have_the_gradients_of_the_whole(commands, tmp_path):
    """FSDP2 of every block and of the step, the loss in chunks of a head that may be tied."""
    run_two(commands, fsdp_worker.save_gradients, tmp_path)
    for name in fsdp_worker.NETS:
        loss_net = LossNet(fsdp_worker.net_of(name), fsdp_worker.objective)
        batch = fsdp_worker.batch(0, fsdp_worker.ROWS)
        (loss_net(batch).loss / int(batch.tokens.real.sum())).backward()
        grads = fsdp_worker.gradients(loss_net)
        for checkpointed in (False, True):
            case = f"{name}-{checkpointed}"
            actual = load_file(tmp_path / f"{case}.safetensors")
            assert set(actual) == set(grads)
            for key, grad in grads.items():
                torch.testing.assert_close(
                    actual[key],
                    grad,
                    rtol=1e-5,
                    atol=1e-8,
                    msg=lambda m, k=key, c=case: f"{c} {k}: {m}",
                )


@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_is_sharded_by_itself_has_the_same_loss(tmp_path, name, monkeypatch):
    """Whatever the loss is: in chunks within one call of the head, or at once if a part of it is a
    unit; so are those of a compiled step."""
    run = PreparedTask(recipe_named(name, tmp_path), tmp_path / "data")
    loss_net = loss_net_of(run).train(is_rdrop(name))
    batch = run.load_batch(run.plan_epoch(0)[0])
    actual = []
    for count in (0, 1, 2):
        units = partial(_first_modules, count=count)
        monkeypatch.setattr(losses, "_sharded_units", units)
        loss_net.zero_grad()
        torch.manual_seed(3)
        sums = loss_net(batch)
        sums.loss.backward()
        actual.append([sums.loss, sums.nll, *(p.grad for p in loss_net.net.parameters())])
    for chunked, within, whole in zip(*actual, strict=True):
        if chunked is not None:
            torch.testing.assert_close(within, chunked, rtol=0, atol=0)
            torch.testing.assert_close(whole, chunked, rtol=1e-5, atol=1e-6)


def _first_modules(head, count):
    return [*head.modules()][:count]


@pytest.mark.parametrize("name", TASKS)
def test_a_plan_is_independent_of_the_number_of_processes(tmp_path, name):
    run, again = (PreparedTask(recipe_named(name, tmp_path), tmp_path / "data") for _ in range(2))
    plans = []
    for epoch in (0, 1):
        whole = [run.load_batch(item).indices.tolist() for item in run.plan_epoch(epoch)]
        plans.append(whole)
        assert [
            again.load_batch(item).indices.tolist() for item in again.plan_epoch(epoch)
        ] == whole
        if name != "language_modeling":  # which counts windows, not rows
            assert sorted(chain(*whole)) == list(range(run.num_train))
        for world in (2, 3):
            shares = [run.plan_epoch(epoch)[rank::world] for rank in range(world)]
            dealt = [
                run.load_batch(shares[place % world][place // world]).indices.tolist()
                for place in range(len(whole))
            ]
            assert dealt == whole
            assert sum(map(len, shares)) == len(whole)
    assert plans[0] != plans[1]


@pytest.mark.parametrize(("clip", "optimizer"), [(1.0, "adam"), (None, "muon")])
@pytest.mark.parametrize("name", [*NAMES, *HIDDEN])
def test_a_step_between_reports_does_not_wait_for_the_device(
    tmp_path, monkeypatch, name, clip, optimizer
):
    # As on a device without the kernels of the CPU, whose plan reads the tokens of a batch.
    monkeypatch.setattr(kernels, "can_run", lambda *x: False)
    keys = {"training__ema_decay": 0.9, "training__optimizer": {"name": optimizer}}
    recipe = recipe_named(name, tmp_path, training__clip_norm=clip, **keys)
    run = PreparedTask(recipe, tmp_path / "data")
    batches = [run.load_batch(item) for item in run.plan_epoch(0)]  # made on the CPU, beforehand
    hooks: dict[str, Any] = {
        "plan_epoch": lambda epoch: range(len(batches)),
        "load_batch": lambda epoch, place: batches[place],
        "evaluate": lambda: pytest.fail("no evaluation is due"),
        "save_best": lambda: None,
    }
    settings = recipe.training.model_copy(update={"log_every": 1000})
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    trainer = Trainer(loss_net_of(run), settings, lambda step: 0.01, checkpoints, **hooks)
    trainer._step()  # the optimizer's state is made
    with Waits() as waits:
        for _ in range(3):
            trainer._step()
    assert not waits.seen
    assert trainer.state.step == 4
    with Waits() as waits:
        trainer._report_steps()
    assert sum(waits.seen.values()) <= 1


def gradients_without_waiting(loss_net: LossNet, batch: Batch) -> Waits:
    """The synchronizations of a forward and a backward pass; all trained weights have gradients."""
    with Waits() as waits:
        loss_net.train()(batch).loss.backward()
    for key, weight in loss_net.net.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, key
    return waits


@pytest.mark.parametrize("name", [*NAMES, *HIDDEN])
def test_the_loss_of_every_task_needs_no_values_of_tensors(tmp_path, name):
    run = PreparedTask(recipe_named(name, tmp_path), tmp_path / "data")
    batch = run.load_batch(run.plan_epoch(0)[0]).to("meta")  # tensors without values
    assert not gradients_without_waiting(loss_net_of(run, "meta"), batch).seen


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", compiled_nets.NETS)
def test_no_architecture_waits_for_the_device_in_a_step(name, checkpointing):
    """The others have no module and no option beside theirs (tests/models/test_compiled.py)."""
    for device in ("cpu", "meta"):
        net = tiny(name, dropout=0.3)
        batch = batch_for(net).to(device)
        loss_net = LossNet(net.to(device), batch_loss, activation_checkpointing=checkpointing)
        trace = gradients_without_waiting(loss_net, batch).seen
        # Experts on a CPU, where nothing is waited for, count their tokens.
        counts = (name, device) == ("mixtral", "cpu")
        assert set(trace) == ({"bincount", "tolist"} if counts else set())
