"""The trainer: steps, checkpoints, stop conditions, divergence."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from commands import assert_refused, tiny, write_recipe
from heedful.config import Optimizer, parse_recipe
from heedful.data.collate import collate_pairs
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.evaluation.metrics import Score, Scores
from heedful.parts.losses import LossSum
from heedful.run import train
from heedful.tasks.synthetic import Synthetic
from heedful.training.checkpoint import Checkpoints, average_weights
from heedful.training.events import CheckpointSaved, Evaluated, RunFinished, StepDone
from heedful.training.listeners import read_log
from heedful.training.optimizer import _orthogonal, _stacks, make_optimizer, optimizer_tensors
from heedful.zoo.saved import save_tensors, weights_of
from trainers import copied, evaluation, pairs, settings, small_net, trainer_of

# --- one step -------------------------------------------------------------------------------


def gradients_of(trainer):
    """The gradients that the optimizer receives."""
    gradients = {}

    def look(optimizer, args, kwargs):
        gradients.update({name: p.grad.clone() for name, p in trainer.net.named_parameters()})

    trainer.updates.optimizer.register_step_pre_hook(look)
    trainer.run()
    return gradients


@pytest.mark.parametrize(
    ("smoothing", "precision", "close"),
    [(0.0, "fp32", 1e-5), (0.1, "fp32", 1e-5), (0.1, "fp16", 3e-3)],
)
def test_accumulated_batches_are_one_large_batch(tmp_path, smoothing, precision, close):
    # Different numbers of tokens: a mean of the batches' means would be another gradient.
    store = pairs([(3, 2), (4, 2), (9, 12), (5, 7), (2, 1)])
    split = [[0, 1], [2], [3, 4]]
    options = {"smoothing": smoothing, "precision": precision}
    rows, keys = [[0, 1, 2, 3, 4]], settings(gradient_accumulation=3)
    one, seen_one = trainer_of(small_net(), store, rows, settings(), tmp_path / "1", **options)
    three, seen_three = trainer_of(small_net(), store, split, keys, tmp_path / "3", **options)
    gradients = [gradients_of(one), gradients_of(three)]
    for name, gradient in gradients[0].items():
        limits = {"rtol": 10 * close, "atol": close / 100}
        torch.testing.assert_close(gradients[1][name], gradient, **limits)
    events = [log.of_type(StepDone)[0] for log in (seen_one, seen_three)]
    assert events[0].num_tokens == events[1].num_tokens == 2 + 2 + 12 + 7 + 1
    assert events[0].loss == pytest.approx(events[1].loss, rel=close)
    assert events[0].grad_norm == pytest.approx(events[1].grad_norm, rel=10 * close)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_all_targets(tmp_path, smoothing):
    store = pairs([(3, 2), (9, 12), (5, 7)])
    net = small_net()
    batches = [collate_pairs(*store, np.array([row]), start_ids=[1], pad_id=0) for row in range(3)]
    with torch.no_grad():
        logits = [net(b.source.ids, b.tokens.ids)[0] for b in batches]
        targets = torch.cat([b.targets for b in batches])
        # torch's smoothing also spreads over all entries.
        expected = F.cross_entropy(torch.cat(logits), targets, label_smoothing=smoothing)
        nll = F.cross_entropy(torch.cat(logits), targets)
    keys = settings(gradient_accumulation=3)
    trainer, log = trainer_of(net, store, [[0], [1], [2]], keys, tmp_path, smoothing=smoothing)
    trainer.run()
    step = log.of_type(StepDone)[0]
    assert step.loss == pytest.approx(float(expected), rel=1e-5)
    assert step.nll == pytest.approx(float(nll), rel=1e-5)


def test_clipping_bounds_the_norm_and_keeps_the_direction(tmp_path):
    """A norm below the limit is unchanged; the logged norm is that before clipping."""

    def clipped(limit):
        store, keys = pairs([(5, 7), (4, 3)]), settings(clip_norm=limit)
        trainer, log = trainer_of(small_net(), store, [[0, 1]], keys, tmp_path / str(limit))
        gradients = gradients_of(trainer)
        logged.append(log.of_type(StepDone)[0].grad_norm)
        return gradients

    logged = []
    free = clipped(None)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    cut, same = clipped(norm / 10), clipped(1e6)
    assert logged == pytest.approx([norm] * 3, rel=1e-5)
    for name, gradient in free.items():
        torch.testing.assert_close(cut[name], gradient / 10, rtol=1e-4, atol=1e-8)
        assert torch.equal(same[name], gradient)


def test_the_learning_rate_is_that_of_the_schedule(tmp_path):
    def rate(step):
        return 0.001 * step**2

    store = pairs([(3, 2), (4, 5)])
    keys = settings(max_steps=6)
    trainer, log = trainer_of(small_net(), store, [[0], [1]], keys, tmp_path, rate=rate)
    used = []
    trainer.updates.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: used.append([g["lr"] for g in optimizer.param_groups])
    )
    trainer.run()
    expected = [rate(step) for step in range(1, 7)]
    assert [set(rates) for rates in used] == [{value} for value in expected]
    assert [event.learning_rate for event in log.of_type(StepDone)] == expected


def test_logged_steps_count_every_token_once(tmp_path):
    # Evaluations fall between two reports: their steps are reported all the same.
    keys = settings(max_steps=11, log_every=4, evaluate_every=3)
    reason, trainer, log = run_to_end(tmp_path, keys)
    assert (reason, trainer.state.step) == ("max_steps", 11)
    # The last step is evaluated, though no evaluation falls on it.
    assert [event.step for event in log.of_type(Evaluated)] == [3, 6, 9, 11]
    assert sum(event.num_tokens for event in log.of_type(StepDone)) == 3 * (2 + 5 + 9) + 2 + 5
    assert [event.step for event in log.of_type(StepDone)] == [3, 4, 6, 8, 9, 11]


# --- optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_matrices_have_weight_decay(name):
    net = small_net()
    optimizer = make_optimizer(net, Optimizer(name=name, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    dims = set()
    for name, parameter in net.named_parameters():
        dims.add(parameter.dim())
        share = 1 - 0.1 * 0.5 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * share, rtol=1e-6, atol=0)
    assert dims == {1, 2}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(net.parameters()))


@pytest.mark.parametrize("has_bf16", [True, False])
def test_muon_is_used_for_matrices_of_blocks_and_adamw_for_all_else(monkeypatch, has_bf16):
    """Without bf16 the update is computed in fp32, and differs from torch's by its rounding."""
    monkeypatch.setattr("heedful.training.optimizer.has_fast_bf16", lambda device: has_bf16)
    nets = [small_net() for _ in range(3)]
    ours = make_optimizer(nets[0], Optimizer(name="muon", weight_decay=0.1))
    inside = {
        name
        for name, p in nets[0].named_parameters()
        if "blocks." in name and name.endswith("weight") and p.dim() == 2
    }
    assert len(inside) == 4 + 7  # of the encoder and the decoder
    matrices = [p for name, p in nets[1].named_parameters() if name in inside]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = make_optimizer(nets[2], Optimizer(name="adamw", weight_decay=0.1))
    for number in range(3):
        torch.manual_seed(number)
        gradients = {name: torch.randn_like(p) for name, p in nets[0].named_parameters()}
        for net, optimizer in zip(nets, (ours, muon, adamw), strict=True):
            for name, p in net.named_parameters():
                p.grad = gradients[name].clone()
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
    expected, rest = (dict(net.named_parameters()) for net in nets[1:])
    for name, p in nets[0].named_parameters():
        if name in inside and not has_bf16:
            assert not torch.equal(p, expected[name]), name
            torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-3)
        else:
            assert torch.equal(p, (expected if name in inside else rest)[name]), name


@pytest.mark.parametrize("shape", [(5, 24, 8), (3, 8, 24)])
def test_muon_updates_a_stack_of_matrices_as_each_alone(shape):
    """As on a GPU, where matrices of one shape are updated at once."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    each = torch.stack([_orthogonal(matrix) for matrix in matrices])
    torch.testing.assert_close(_orthogonal(matrices), each, rtol=0, atol=1e-5)
    parameters = [torch.nn.Parameter(matrix) for matrix in matrices]
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    assert _stacks(parameters) == [[parameter] for parameter in parameters[1:]]


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_a_skipped_step_does_not_change_weights_or_state(name):
    """Steps with gradients that are not finite change nothing."""
    nets = [small_net(), small_net()]
    with_bad, without = (make_optimizer(net, Optimizer(name=name)) for net in nets)
    torch.manual_seed(0)
    for bad in (True, False, False, True, False):
        gradients = {name: torch.randn_like(p) for name, p in nets[0].named_parameters()}
        for net, optimizer in zip(nets, (with_bad, without), strict=True):
            if bad and optimizer is without:
                continue
            for parameter_name, p in net.named_parameters():
                p.grad = gradients[parameter_name] * (math.nan if bad else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.found_inf = torch.tensor(float(bad))
            optimizer.step()
    expected = dict(nets[1].named_parameters())
    for parameter_name, p in nets[0].named_parameters():
        assert torch.equal(p, expected[parameter_name]), parameter_name
    tensors = optimizer_tensors(nets[1], without)
    for key, tensor in optimizer_tensors(nets[0], with_bad).items():
        assert torch.equal(tensor, tensors[key]), key


# --- ends -----------------------------------------------------------------------------------


def run_to_end(tmp_path, keys, **hooks):
    store, plan = pairs([(3, 2), (4, 5), (2, 9)]), hooks.pop("plan", [[0], [1], [2]])
    trainer, log = trainer_of(small_net(), store, plan, keys, tmp_path, **hooks)
    return trainer.run(), trainer, log


def test_patience_counts_evaluations_without_improvement(tmp_path):
    """The best weights are saved at once, as are those of the first step."""
    keys = settings(max_steps=100, evaluate_every=2, patience=2)
    values, order = iter([1.0, 3.0, 2.0, 4.0, 4.0, 3.9, 99.0]), []

    def evaluate():
        order.append(next(values))
        return evaluation(order[-1])

    hooks = {"evaluate": evaluate, "save_best": lambda: order.append("kept")}
    reason, trainer, log = run_to_end(tmp_path, keys, **hooks)
    assert order == ["kept", 1.0, "kept", 3.0, "kept", 2.0, 4.0, "kept", 4.0, 3.9]
    assert (reason, trainer.state.step) == ("early_stopping", 12)
    assert [e.is_best for e in log.of_type(Evaluated)] == [True, True, False, True, False, False]
    assert (trainer.state.best_step, trainer.state.best_value) == (8, 4.0)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 4), (3, 2), (5, 2)])
def test_max_epochs(tmp_path, accumulate, steps):
    requested = []

    def plan(epoch):
        requested.append(epoch)
        return [[0], [1], [2]]

    keys = settings(max_steps=None, max_epochs=2, gradient_accumulation=accumulate)
    reason, trainer, _ = run_to_end(tmp_path, keys, plan_epoch=plan)
    assert (reason, trainer.state.step, trainer.state.epoch) == ("max_epochs", steps, 2)
    assert requested == [0, 1]


def test_max_minutes_counts_training_time(tmp_path, monkeypatch):
    clock = itertools.count()  # each look at the clock is a second later
    monkeypatch.setattr("heedful.training.trainer.time.perf_counter", lambda: next(clock))
    reason, trainer, _ = run_to_end(tmp_path, settings(max_steps=None, max_minutes=0.5))
    assert reason == "time_limit"
    assert trainer.state.step > 0
    assert trainer.state.seconds >= 30


# --- checkpoints that remain -----------------------------------------------------------------


def test_the_moving_average_is_evaluated_and_saved_and_changes_no_step(tmp_path):
    keys = settings(max_steps=6, evaluate_every=3, ema_decay=0.5)
    store = pairs([(3, 2), (4, 5), (9, 7)])
    evaluated, best, after = [], [], []
    nets = [small_net(dropout=0.2), small_net(dropout=0.2)]
    hooks = {
        "evaluate": lambda: (evaluated.append(copied(nets[0])), evaluation(value=len(evaluated)))[
            1
        ],
        "save_best": lambda: best.append(copied(nets[0])),
    }
    trainer, _ = trainer_of(nets[0], store, [[0], [1], [2]], keys, tmp_path / "a", **hooks)
    plain, _ = trainer_of(
        nets[1], store, [[0], [1], [2]], settings(max_steps=6, evaluate_every=3), tmp_path / "b"
    )
    expected = [copied(nets[0])]
    for number in range(1, 7):
        for item in (trainer, plain):
            torch.manual_seed(number)
            item._step()
        decay = min(0.5, (1 + number) / (10 + number))
        after.append(copied(nets[0]))
        for name, weight in copied(nets[1]).items():
            assert torch.equal(after[-1][name], weight)
        expected.append(
            {n: decay * expected[-1][n] + (1 - decay) * w for n, w in after[-1].items()}
        )
        if number % 3 == 0:
            trainer._evaluate()
            for checkpoint in (evaluated[-1], best[-1]):
                for name, weight in expected[-1].items():
                    torch.testing.assert_close(checkpoint[name], weight)
            for name, weight in copied(nets[0]).items():
                assert torch.equal(after[-1][name], weight)  # its own again
    assert any(not torch.equal(best[-1][name], after[-1][name]) for name in after[-1])


def test_the_last_checkpoints_are_kept_and_averaged(tmp_path):
    keys = settings(max_steps=8, evaluate_every=2, average_checkpoints=3)
    _, trainer, _ = run_to_end(tmp_path, keys)
    folders = trainer.checkpoints.regular()
    assert [folder.name for folder in folders] == [f"step-{n:08d}" for n in (4, 6, 8)]
    # Only the newest can be gone on from.
    resumable = [(folder / "training.safetensors").exists() for folder in folders]
    assert resumable == [False, False, True]
    files = [folder / "model.safetensors" for folder in folders]
    average = average_weights(files)
    loaded = [load_file(file) for file in files]
    assert average.keys() == loaded[0].keys() == weights_of(trainer.net).keys()
    for name, tensor in average.items():
        mean = np.mean([weights[name].double().numpy() for weights in loaded], axis=0)
        np.testing.assert_array_equal(tensor.numpy(), mean.astype(np.float32))
        assert tensor.dtype == torch.float32
    assert any(not torch.equal(loaded[0][name], loaded[2][name]) for name in average)


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path):
    keys = {"average_checkpoints": 2, "average_of": "best", "async_checkpoints": False}
    keys = settings(max_steps=10, evaluate_every=2, **keys)
    values, saved = iter([3.0, 1.0, 4.0, 3.0, 2.0]), []

    def evaluate():
        saved.append([int(path.name[-2:]) for path in trainer.checkpoints.regular()])
        return evaluation(next(values))

    store = pairs([(3, 2), (4, 5)])
    trainer, _ = trainer_of(small_net(), store, [[0], [1]], keys, tmp_path, evaluate=evaluate)
    trainer.run()
    assert saved == [[], [2], [2, 4], [2, 6], [2, 6, 8]]  # of equal ones the older
    names = [path.name for path in trainer.checkpoints.to_average()]
    assert names == ["step-00000002", "step-00000006"]
    assert trainer.checkpoints.newest().name == "step-00000010"


@pytest.mark.parametrize(("metric", "best", "averaged"), [("ter", 6, [6, 12]), ("chrf", 3, [3, 9])])
def test_best_models_follow_the_direction_of_the_metric(
    tmp_path, monkeypatch, metric, best, averaged
):
    """Best model, early stopping and `average_of: best`; for TER lower is better."""
    scores = iter([60.0, 20.0, 40.0, 30.0, 25.0, 50.0, 25.0])

    def decode(task, model, rows, beam_size, metrics):
        value = next(scores)
        actual = {name: Score(name, value, "scripted") for name in metrics}
        return [row["tgt"] for row in rows], Scores(len(rows), actual)

    monkeypatch.setattr(Synthetic, "decode", decode)
    recipe = parse_recipe(
        tiny(
            evaluation__metric=metric,
            training__max_steps=30,
            training__patience=2 if metric == "ter" else 3,
            training__average_checkpoints=2,
            training__average_of="best",
        )
    )
    assert train(recipe, tmp_path / "run").reason == "early_stopping"
    events = read_log(tmp_path / "run/log.jsonl")
    assert events[-1].best["step"] == best
    assert [e.step for e in events if isinstance(e, Evaluated) and e.is_best][-1] == best
    assert [e.step for e in events if isinstance(e, Evaluated)][-1] == 12
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", 2, best=True).to_average()
    assert [int(path.name[-2:]) for path in checkpoints] == averaged


def test_averaging_refuses_different_models(tmp_path):
    save_tensors(tmp_path / "a", {"w": torch.zeros(2), "v": torch.zeros(1)})
    save_tensors(tmp_path / "b", {"w": torch.zeros(3), "v": torch.zeros(1)})
    save_tensors(tmp_path / "c", {"w": torch.zeros(2)})
    with pytest.raises(UserError, match=r"w is \(2,\) and \(3,\)"):
        average_weights([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"v is \(1,\) and absent"):
        average_weights([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(UserError, match="nothing to average"):
        average_weights([])


def test_the_mean_of_large_values_does_not_overflow(tmp_path):
    large = torch.full((2,), 3e38)
    for name in "ab":
        save_tensors(tmp_path / name, {"w": large})
    assert torch.equal(average_weights([tmp_path / "a", tmp_path / "b"])["w"], large)


@pytest.mark.parametrize(
    ("metric", "of"), [("loss", "last"), ("exact_match", "last"), ("loss", "best")]
)
def test_a_run_ends_with_the_better_of_best_and_average(tmp_path, monkeypatch, metric, of):
    """The final weights are the best checkpoint's or the average's, by the validation metric."""
    keys = {"training__average_checkpoints": 3 if of == "last" else 2, "training__average_of": of}
    recipe = parse_recipe(tiny(training__max_steps=9, evaluation__metric=metric, **keys))
    evaluated = []
    real = Synthetic.evaluate

    def spy(task, model, data):
        result = real(task, model, data)
        evaluated.append((result.value, copied(model.net)))
        return result

    monkeypatch.setattr(Synthetic, "evaluate", spy)
    train(recipe, tmp_path / "run")
    final = load_file(tmp_path / "run/model.safetensors")
    keep = keys["training__average_checkpoints"]
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", keep, best=of == "best")
    average = average_weights([path / "model.safetensors" for path in checkpoints.to_average()])
    *regular, (average_value, evaluated_average) = evaluated
    assert len(regular) == 3
    assert all(torch.equal(evaluated_average[name], average[name]) for name in average)
    best_value, best = max(regular, key=lambda entry: entry[0])
    expected = average if average_value > best_value else best
    assert all(torch.equal(final[name], expected[name]) for name in expected)
    end = read_log(tmp_path / "run/log.jsonl")[-1]
    assert isinstance(end, RunFinished)
    weights = "the mean of" if average_value > best_value else "the weights of step"
    assert end.scored.startswith(f"test text, {weights} ")


def test_an_extended_run_ends_with_its_best_model_of_all_sessions(tmp_path, monkeypatch):
    """Also if it is the average at an earlier end, which no later step or average exceeds."""
    values = iter((1.0, 2.0, 1.5, 5.0, 3.0, 4.0, 9.0, 6.0))  # each third of a session is a mean's
    real = Synthetic.evaluate
    monkeypatch.setattr(Synthetic, "evaluate", lambda *a: replace(real(*a), value=next(values)))
    out, finals, sources = tmp_path / "run", [], []
    for end in (9, 12, 15):
        recipe = parse_recipe(tiny(training__max_steps=end))
        train(recipe, out, resume=end > 9)
        finals.append(load_file(out / "model.safetensors"))
        sources.append(read_log(out / "log.jsonl")[-1].scored.removeprefix("test text, "))
    assert sources == ["the mean of 3 checkpoints"] * 2 + ["the weights of step 15"]
    last = load_file(out / "checkpoints/step-00000015/model.safetensors")
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert all(torch.equal(last[name], finals[2][name]) for name in last)


def test_dropout_is_on_in_steps_and_off_in_evaluations(tmp_path):
    modes = []
    store = pairs([(3, 4), (4, 5)])

    def loss(net, batch):
        modes.append(("step", net.training))
        return batch_loss(net, batch)

    net = small_net()

    def evaluate():
        modes.append(("evaluation", net.training))
        return evaluation()

    keys = settings(max_steps=4, evaluate_every=2)
    trainer, _ = trainer_of(net, store, [[0, 1]], keys, tmp_path, loss=loss, evaluate=evaluate)
    trainer.run()
    assert set(modes) == {("step", True), ("evaluation", False)}


# --- a loss that is not finite --------------------------------------------------------------


@pytest.mark.parametrize("log_every", [1, 5])
@pytest.mark.parametrize(
    ("bad", "name"), [(math.nan, "adam"), (math.inf, "adam"), (math.nan, "muon")]
)
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path, bad, name, log_every):
    """Neither do steps before the next report."""
    net, store, count = small_net(), pairs([(3, 4), (4, 5)]), 0

    def loss(net, batch):
        nonlocal count
        count += 1
        value = batch_loss(net, batch)
        if count < 6:
            return value
        return LossSum(value.loss * bad, value.nll, value.correct, value.tokens)

    keys = settings(max_steps=20, evaluate_every=4, log_every=log_every, optimizer={"name": name})
    trainer, _ = trainer_of(net, store, [[0, 1]], keys, tmp_path, loss=loss)
    before = {}

    def look(*_):
        if count == 5:
            before.update(copied(net))

    trainer.updates.optimizer.register_step_post_hook(look)
    with pytest.raises(UserError) as stopped:
        trainer.run()
    good = tmp_path / "checkpoints/step-00000004"
    for part in ("step 6:", "not taken", "learning_rate", str(good)):
        assert part in str(stopped.value)
    assert trainer.checkpoints.newest() == good
    assert count == (6 if log_every == 1 else 8)  # the evaluation at 8 reports before it looks
    assert all(torch.equal(before[name], p) for name, p in weights_of(net).items())
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    net = small_net()
    net.head.out.weight.register_hook(lambda gradient: gradient * math.nan)
    trainer, _ = trainer_of(net, pairs([(3, 4)]), [[0]], settings(), tmp_path)
    before = copied(net)
    with pytest.raises(UserError, match="gradient norm nan"):
        trainer.run()
    assert all(torch.equal(before[name], p) for name, p in weights_of(net).items())


def test_weights_with_a_loss_that_is_not_finite_are_not_saved(tmp_path):
    values = iter([evaluation(1.0), evaluation(math.nan, loss=math.nan)])
    keys = settings(max_steps=10, evaluate_every=2)
    with pytest.raises(UserError, match=r"step 4: the held-out loss is nan.*step-00000002"):
        run_to_end(tmp_path, keys, evaluate=lambda: next(values))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_run_that_diverges_ends_with_one_line(commands, tmp_path):
    recipe = write_recipe(
        tmp_path / "recipe.json", training__schedule__learning_rate=1e30, training__log_every=1
    )
    refused = commands.train(recipe, tmp_path / "run", "--set", "training.clip_norm=null")
    assert_refused(refused, "step ", "learning_rate", "no checkpoint was written yet")
    for file in (tmp_path / "run").rglob("*.safetensors"):
        assert all(bool(t.isfinite().all()) for t in load_file(file).values())
    events = read_log(tmp_path / "run/log.jsonl")
    assert not [event for event in events if isinstance(event, RunFinished)]
    again = commands.train(write_recipe(tmp_path / "recipe.json"), tmp_path / "run")
    assert again.code == 0, again.err  # nothing could be gone on from: it is begun again


# --- checkpoints ----------------------------------------------------------------------------


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    _, trainer, _ = run_to_end(tmp_path, settings(max_steps=2, evaluate_every=2))
    state = tmp_path / "checkpoints/step-00000002/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"new_field": 1}))
    with pytest.raises(UserError, match="another version of heedful"):
        trainer.resume()


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({"checkpoint_every": 2}, [2, 4, 6]),
        ({"checkpoint_every": 3, "evaluate_every": 6}, [3, 6]),
        ({"checkpoint_every_minutes": 1.0}, [6]),
    ],
)
def test_checkpoints_between_evaluations_are_resumed_from_and_not_averaged(
    tmp_path, monkeypatch, keys, saved
):
    clock = itertools.count(step=10)  # seconds; a step looks at it once
    monkeypatch.setattr("heedful.training.trainer.time.perf_counter", lambda: next(clock))
    calls = itertools.count(1)

    def loss(net, batch):
        if next(calls) == 8:
            raise InterruptedError
        return batch_loss(net, batch)

    store, plan = pairs([(3, 2), (4, 5), (2, 9)]), [[0], [1], [2]]
    keys = settings(**{"max_steps": 10, "evaluate_every": 100, "log_every": 100} | keys)
    whole, _ = trainer_of(small_net(), store, plan, keys, tmp_path / "whole")
    whole.run()
    killed, log = trainer_of(small_net(), store, plan, keys, tmp_path / "parts", loss=loss)
    with pytest.raises(InterruptedError):
        killed.run()
    assert [event.step for event in log.of_type(CheckpointSaved)] == saved
    evaluations = {event.step for event in log.of_type(Evaluated)}
    assert {int(path.name[5:]) for path in killed.checkpoints.to_average()} <= evaluations
    resumed, _ = trainer_of(small_net(), store, plan, keys, tmp_path / "parts")
    assert resumed.resume() == saved[-1]
    resumed.run()
    for name, weight in weights_of(whole.net).items():
        assert torch.equal(weight, weights_of(resumed.net)[name]), name


def test_resuming_without_a_checkpoint_starts_anew(tmp_path):
    trainer, _ = trainer_of(small_net(), pairs([(3, 4)]), [[0]], settings(), tmp_path)
    assert trainer.resume() is None
    assert trainer.run() == "max_steps"
