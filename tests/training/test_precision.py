"""Precision of training steps: resolution of `auto`, resuming, loss scaling in fp16."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.amp import GradScaler

from commands import tiny
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.run import train
from heedful.training import optimizer as precisions
from heedful.training.events import RunStarted, StepDone
from heedful.training.listeners import read_log
from heedful.training.optimizer import resolve_precision
from heedful.training.step import step_batches
from heedful.zoo.saved import weights_of
from trainers import copied, pairs, settings, small_net, trainer_of


def fp16_trainer(folder, *, net=None, scale=2.0**16, growth_interval=2000, **keys):
    """A trainer in fp16, whose loss is scaled by `scale` in the first step."""
    store, plan = pairs([(3, 2), (4, 5), (9, 7)]), [[0], [1], [2]]
    trainer, _ = trainer_of(
        net or small_net(), store, plan, settings(**keys), folder, precision="fp16"
    )
    trainer.updates.scaler = GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return trainer


@pytest.mark.parametrize(
    ("precision", "device", "has_bf16", "resolved"),
    [
        ("auto", "cuda", True, "bf16"),
        ("auto", "cuda", False, "fp16"),
        ("auto", "cpu", True, "bf16"),
        ("auto", "cpu", False, "fp32"),
        ("fp16", "cuda", True, "fp16"),
        ("fp32", "cuda", True, "fp32"),
        ("bf16", "cpu", False, "bf16"),
    ],
)
def test_auto_is_a_precision_that_the_device_supports(
    monkeypatch, precision, device, has_bf16, resolved
):
    monkeypatch.setattr(precisions, "has_fast_bf16", lambda device: has_bf16)
    assert resolve_precision(precision, torch.device(device)) == resolved


@pytest.mark.parametrize(("precision", "device"), [("bf16", "cuda"), ("fp16", "mps")])
def test_an_unsupported_precision_is_refused(monkeypatch, precision, device):
    monkeypatch.setattr(precisions, "has_fast_bf16", lambda device: False)
    with pytest.raises(UserError, match=rf"{precision}.*add training\.precision=fp") as refused:
        resolve_precision(precision, torch.device(device))
    assert "\n" not in str(refused.value)


def test_a_resumed_run_keeps_its_precision(tmp_path, monkeypatch):
    """`auto` is resolved once, not again on the machine of a resumed run."""
    for number, has_bf16 in enumerate((True, False)):
        monkeypatch.setattr(precisions, "has_fast_bf16", lambda device, has=has_bf16: has)
        recipe = parse_recipe(
            tiny(training__precision="auto", training__max_steps=3 * (number + 1))
        )
        train(recipe, tmp_path / "run", resume=bool(number))
    starts = [e for e in read_log(tmp_path / "run/log.jsonl") if isinstance(e, RunStarted)]
    assert [start.recipe["training"]["precision"] for start in starts] == ["bf16", "bf16"]
    assert "bf16" in (tmp_path / "run/report.html").read_text()


def test_a_step_in_fp16_is_nearly_that_in_fp32(tmp_path):
    after = []
    store, plan = pairs([(3, 2), (4, 5), (9, 7)]), [[0], [1], [2]]
    for precision in ("fp32", "fp16"):
        folder, keys = tmp_path / precision, settings(max_steps=6)
        trainer, _ = trainer_of(small_net(), store, plan, keys, folder, precision=precision)
        before = copied(trainer.net)
        trainer.run()
        after.append(copied(trainer.net))
        assert sum(event.num_skipped for event in trainer.listeners[0].of_type(StepDone)) == 0
    change = math.sqrt(sum(float((after[0][n] - before[n]).square().sum()) for n in before))
    error = math.sqrt(sum(float((after[0][n] - after[1][n]).square().sum()) for n in before))
    assert 0 < error < 0.1 * change


def test_a_change_below_the_resolution_of_bf16_is_kept(tmp_path):
    """Weights in bf16 would lose changes of less than 1/256 of them."""
    store, plan = pairs([(3, 2), (4, 5), (9, 7)]), [[0], [1], [2]]
    trainer, _ = trainer_of(
        small_net(), store, plan, settings(), tmp_path, rate=lambda step: 1e-6, precision="bf16"
    )
    before = copied(trainer.net)
    trainer.run()
    for name, weight in copied(trainer.net).items():
        assert weight.dtype == torch.float32
        assert 0 < (weight - before[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("parts", [1, 3])
def test_a_gradient_that_is_finite_at_a_loss_scale_is_not_skipped_there(tmp_path, parts):
    """The gradient of the sum over the targets overflows fp16; that of the mean does not."""
    net = small_net()
    with torch.no_grad():
        net.head.out.weight[:, 0] = 0.0

    def large_channel(module, inputs, out):
        return torch.cat([torch.full_like(out[..., :1], 2.0**14), out[..., 1:]], dim=-1)

    net.decoder.final_dropout.register_forward_hook(large_channel)
    store, rows = pairs([(3, 9)] * 24), list(range(24))
    plan = [rows[first::parts] for first in range(parts)]
    keys = settings(gradient_accumulation=parts)
    trainer, _ = trainer_of(net, store, plan, keys, tmp_path, precision="fp16")
    trainer.updates.scaler = GradScaler("cpu", init_scale=4.0)
    trainer._step()
    assert trainer.updates.scaler.get_scale() == 4.0
    assert net.head.out.weight[:, 0].any()


def test_a_gradient_in_fp16_has_the_factor_of_the_processes_and_no_part_of_uncounted_rows(tmp_path):
    updates = (trainer := fp16_trainer(tmp_path, scale=256.0)).updates
    batches = step_batches(
        trainer.plan_epoch,
        trainer.load_batch,
        trainer.processes,
        num_batches=1,
        num_parts=1,
        seed=trainer.settings.seed,
        device=updates.device,
    )
    (rows,), _ = next(batches)
    seen = []
    updates.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in trainer.net.parameters()]))
    )

    def gradients(rows, processes, targets):
        updates._trained.loss_factor = processes
        updates._processes = SimpleNamespace(sum=lambda counts: [targets, *counts[1:]])
        updates.take([rows], 0.0, 1)
        return seen[-1]

    one = gradients(rows, 1, 4)
    assert one.any()
    torch.testing.assert_close(gradients(rows, 8, 16), 2 * one, rtol=0.01, atol=0.01)
    assert not gradients(replace(rows, is_counted=False), 8, 4).any()


def test_a_step_whose_gradient_overflows_fp16_is_skipped_and_halves_the_scale(tmp_path):
    net = small_net()
    trainer = fp16_trainer(tmp_path, net=net, max_steps=30, log_every=2, scale=2.0**24)
    before, skipped = copied(net), 0
    while all(torch.equal(weight, before[name]) for name, weight in weights_of(net).items()):
        assert trainer.updates.scaler.get_scale() == 2.0 ** (24 - skipped)
        trainer._step()
        skipped += trainer.updates.scaler.get_scale() < 2.0 ** (24 - skipped)
    assert 0 < skipped < 24
    assert trainer.updates.scaler.get_scale() == 2.0 ** (24 - skipped)
    assert all(bool(weight.isfinite().all()) for weight in weights_of(net).values())
    trainer._report_steps()
    (event,) = trainer.listeners[0].of_type(StepDone)
    assert (event.step, event.num_skipped) == (skipped + 1, skipped)
    assert math.isfinite(event.grad_norm)


def test_a_gradient_that_overflows_at_any_scale_ends_the_run(tmp_path):
    net = small_net()
    net.head.out.weight.register_hook(lambda gradient: gradient * math.inf)
    trainer = fp16_trainer(tmp_path, net=net, max_steps=99, log_every=1)
    before = copied(net)
    with pytest.raises(UserError, match=r"step 17: .*gradient norm (nan|inf).*precision"):
        trainer.run()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(net).items())


def test_a_resumed_run_in_fp16_keeps_its_loss_scale(tmp_path):
    keys = {"scale": 2.0**20, "growth_interval": 2, "evaluate_every": 5, "max_steps": 11}
    whole = fp16_trainer(tmp_path / "whole", **keys)
    whole.run()
    first = fp16_trainer(tmp_path / "parts", **keys | {"max_steps": 5})
    first.run()
    second = fp16_trainer(tmp_path / "parts", **keys)
    assert second.resume() == 5
    assert second.updates.scaler.state_dict() == first.updates.scaler.state_dict()
    assert second.updates.scaler.get_scale() != 2.0**20
    second.run()
    assert second.updates.scaler.state_dict() == whole.updates.scaler.state_dict()
    for name, weight in weights_of(second.net).items():
        assert torch.equal(weight, weights_of(whole.net)[name]), name
