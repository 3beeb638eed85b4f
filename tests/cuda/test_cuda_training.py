"""Runs on a GPU take the steps of runs on the CPU, resume bit-equal, and do not wait in a step."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from architectures import tiny
from encoder_runs import PreparedTask, assert_resumes, loss_net_of, recipe_of
from heedful import processes
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.parts import attend_fused
from heedful.parts.tokens import Tokens
from heedful.processes import Group
from heedful.run import train
from heedful.training import parallel as sharing
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import StepDone
from heedful.training.listeners import read_log
from heedful.training.step import LossNet
from heedful.training.trainer import Trainer
from option_space import VOCAB

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
TASKS = ("translation", "language_modeling", "masked_lm", "denoising", "classification", "sft")


def losses_of(task: str, folder: Path, name: str, **changes: Any) -> list[float]:
    recipe = recipe_of(task, folder, **changes)
    train(recipe, folder / name)
    events = read_log(folder / name / "log.jsonl")
    return [event.loss for event in events if isinstance(event, StepDone)]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_has_the_losses_of_a_run_on_the_cpu(task: str, tmp_path: Path) -> None:
    """Without dropout, whose random numbers are those of the device; in bf16 they are near."""
    keys: dict[str, Any] = {"model__dropout": 0.0}
    if task in ("masked_lm", "classification"):
        keys["model__attention_dropout"] = 0.0
    expected = losses_of(task, tmp_path, "cpu", training__device="cpu", **keys)
    actual = losses_of(task, tmp_path, "cuda", training__device="cuda", **keys)
    assert len(actual) > 5
    assert actual == pytest.approx(expected, rel=1e-4)
    keys |= {"training__device": "cuda", "training__precision": "bf16"}
    assert losses_of(task, tmp_path, "bf16", **keys) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_bit_equal(precision: str, tmp_path: Path) -> None:
    keys = {"training__device": "cuda", "training__precision": precision}
    recipe = recipe_of("translation", tmp_path, training__ema_decay=0.9, **keys)
    assert_resumes(recipe, tmp_path, ["scores.json"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", TASKS)
def test_a_step_does_not_wait_for_the_device(task: str, precision: str, tmp_path: Path) -> None:
    """CUDA itself reports every synchronization as an error."""
    recipe = recipe_of(task, tmp_path, training__ema_decay=0.9)
    run = PreparedTask(recipe, tmp_path / "data")
    batches = [run.load_batch(item) for item in run.plan_epoch(0)]
    settings = recipe.training.model_copy(update={"log_every": 1000})
    loss_net = loss_net_of(run, "cuda")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    trainer = Trainer(
        loss_net,
        settings,
        lambda step: 0.01,
        checkpoints,
        plan_epoch=lambda epoch: range(len(batches)),
        load_batch=lambda epoch, place: batches[place],
        evaluate=lambda: pytest.fail("no evaluation is due"),
        save_best=lambda: None,
        precision=precision,
    )
    for _ in range(3):
        trainer._step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer._step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    trainer._report_steps()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that torchrun started alone: its group exists, and NCCL sums over one GPU."""
    for name, value in {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(processes, "is_launched", return_value=True), processes.join() as group:
        assert isinstance(group, Group)
        yield


@pytest.mark.parametrize("task", ["translation", "language_modeling", "masked_lm"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_takes_the_steps_of_a_process(
    task: str, parallel: str, tmp_path: Path
) -> None:
    """Through NCCL, with dropout: the seeds of the parts are the same."""
    keys = {"training__device": "cuda", "training__activation_checkpointing": True}
    expected = losses_of(task, tmp_path, "plain", **keys)
    with mock.patch.object(sharing, "parallelism_of", return_value=parallel):
        actual = losses_of(task, tmp_path, parallel, **keys)
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", ["translation", "language_modeling", "masked_lm"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(task: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model__dropout": 0.0, "training__device": "cuda"}
    if task == "masked_lm":
        keys["model__attention_dropout"] = 0.0
    if task != "language_modeling":
        keys |= {"training__batch_sentences": None, "training__batch_tokens": 64}
    expected = losses_of(task, tmp_path, "plain", **keys)
    actual = losses_of(task, tmp_path, "compiled", training__compile=True, **keys)
    assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("window", [None, 40])
def test_packed_rows_by_flex_attention_have_the_gradients_of_other_attention(
    window: int | None,
) -> None:
    """Rows of several texts and padding, compiled; in fp32 against fp64 on the CPU."""
    name = "llama" if window is None else "mistral"
    keys: dict[str, Any] = {"head_dim": 16, "max_length": 400, "dropout": 0.0}
    net = tiny(name, **keys, **({} if window is None else {"window": window}))
    expected = packed_gradients(LossNet(net, batch_loss).train(), "cpu")
    loss_net = LossNet(net.float().to("cuda"), batch_loss).train()
    BlockCompiler(loss_net.net)
    used = mock.patch.object(
        attend_fused, "packed_block_mask", side_effect=attend_fused.packed_block_mask
    )
    with used as calls:
        actual = packed_gradients(loss_net, "cuda")
    assert calls.called
    for ours, reference in zip(actual, expected, strict=True):
        scale = reference.double().abs().max()
        torch.testing.assert_close(
            ours.double() / scale, reference.double() / scale, rtol=0, atol=1e-4
        )


def packed_gradients(loss_net: LossNet, device: str) -> list[torch.Tensor]:
    """Loss and gradients for rows of three texts, one of which has padding."""
    lengths = ([200, 70, 30], [10, 150, 100])
    segments = torch.zeros(2, 300, dtype=torch.long)
    for row, sizes in enumerate(lengths):
        numbers = torch.arange(3).repeat_interleave(torch.tensor(sizes))
        segments[row] = torch.cat([numbers, numbers[-1:].expand(300 - len(numbers))])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, segments.shape, generator=generator)
    tokens = Tokens.from_ids(ids, torch.tensor([300, 260]), segments=segments)
    positions = torch.arange(500)
    targets = torch.randint(VOCAB, positions.shape, generator=generator)
    batch = Batch(
        tokens=tokens,
        targets=targets,
        target_positions=positions,
        indices=np.arange(2),
        num_tokens=560,
    ).to(device)
    loss_net.zero_grad()
    loss = loss_net(batch).loss
    loss.backward()
    grads = [p.grad.cpu().clone() for p in loss_net.parameters() if p.grad is not None]
    return [loss.detach().cpu(), *grads]
