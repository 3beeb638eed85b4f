"""R-Drop: the paper's loss and its gradients, in one chunk or many, for every task's net."""

import pytest
import torch
from torch.nn import functional as F

from encoder_runs import PreparedTask, assert_resumes, loss_net_of, recipe_of
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss, target_states
from heedful.parts import losses
from heedful.tasks.rdrop import RDropLoss

TASKS = ("translation", "language_modeling", "sft", "masked_lm", "classification")
ALPHA, SMOOTHING = 3.0, 0.1


def net_and_batch(task, folder, dropout=0.3):
    recipe = recipe_of(task, folder, model__dropout=dropout)
    run = PreparedTask(recipe, folder / "data")
    return loss_net_of(run).net, run.load_batch(run.plan_epoch(0)[0])


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def by_hand(net, batch):
    """The authors' code with the mean over both passes, on full logits."""
    states = [target_states(net, batch) for _ in range(2)]
    logits = [*net.head(torch.stack(states))]  # in one call: a classifier's head has dropout too
    losses = [
        F.cross_entropy(item, batch.targets, label_smoothing=SMOOTHING, reduction="sum")
        for item in logits
    ]
    p, q = (item.log_softmax(-1) for item in logits)
    both = [F.kl_div(*item, log_target=True, reduction="sum") for item in ((p, q), (q, p))]
    return sum(losses) / 2 + ALPHA * sum(both) / 2 / 2


@pytest.mark.parametrize("elements", [10**9, 50])
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_that_of_the_paper(tmp_path, monkeypatch, task, elements):
    monkeypatch.setattr(losses, "_LEAST_ROWS", 3)
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(losses, "_BLOCK_ELEMENTS", elements)
    # The head of a classifier samples dropout in each chunk; the reference has a single chunk.
    dropout = 0.0 if task == "classification" and elements == 50 else 0.3
    net, batch = net_and_batch(task, tmp_path, dropout)
    results = []
    for make_loss in (by_hand, lambda *arguments: RDropLoss(ALPHA, SMOOTHING)(*arguments).loss):
        torch.manual_seed(3)
        loss = make_loss(net.train(), batch)
        results.append((loss.detach(), gradients(net, loss)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_without_dropout_it_is_the_plain_loss(tmp_path):
    net, batch = net_and_batch("translation", tmp_path, dropout=0.0)
    actual = RDropLoss(ALPHA, SMOOTHING)(net.train(), batch)
    plain = batch_loss(net, batch, label_smoothing=SMOOTHING)
    for name in ("loss", "nll"):
        torch.testing.assert_close(getattr(actual, name), getattr(plain, name))
    assert actual.tokens == plain.tokens


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    recipe = recipe_of("translation", tmp_path, training__r_drop=1.0, model__dropout=0.3)
    assert_resumes(recipe, tmp_path, ["scores.json"])


def test_r_drop_with_a_teacher_is_refused(tmp_path):
    with pytest.raises(UserError, match="r_drop and distillation of level word"):
        recipe_of("translation", tmp_path, training__r_drop=1.0, distillation={"teacher": "x"})
