"""Frozen weights have no optimizer state and no average; a run with them resumes bit-equal."""

import pytest
import torch
from safetensors.torch import load_file

from heedful.zoo.saved import trainable, weights_of
from trainers import copied, pairs, settings, small_net, trainer_of


def frozen_net():
    net = small_net(dropout=0.1)
    for name, weight in net.named_parameters():
        weight.requires_grad_(name.startswith("decoder") and not name.endswith("bias"))
    return net


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_a_run_with_frozen_weights_resumes_bit_equal(tmp_path, optimizer):
    store, plan = pairs([(3, 2), (4, 5), (2, 9)]), [[0], [1], [2]]
    keys = {"ema_decay": 0.9, "clip_norm": 1.0, "optimizer": {"name": optimizer}}
    before = copied(frozen_net())

    def trainer(folder, steps):
        training = settings(max_steps=steps, evaluate_every=2, **keys)
        return trainer_of(frozen_net(), store, plan, training, tmp_path / folder)[0]

    torch.manual_seed(1)
    whole = trainer("whole", 4)
    whole.run()
    torch.manual_seed(1)
    trainer("parts", 2).run()
    resumed = trainer("parts", 4)
    assert resumed.resume() == 2
    resumed.run()
    trained = trainable(whole.net)
    for name, weight in weights_of(whole.net).items():
        assert torch.equal(weight, weights_of(resumed.net)[name]), name
        assert torch.equal(weight, before[name]) is (name not in trained), name
    saved = load_file(whole.checkpoints.newest() / "training.safetensors")
    owners = {n.removeprefix("average.").removesuffix(f".{n.rpartition('.')[2]}") for n in saved}
    averaged = {n.removeprefix("average.") for n in saved if n.startswith("average.")}
    assert averaged == set(trained)
    assert not {name for name in weights_of(whole.net) if name not in trained} & owners
    assert len(whole.updates.optimizer.state) == len(trained)


def test_evaluated_and_saved_nets_have_the_frozen_weights(tmp_path):
    net, best = frozen_net(), {}
    before = copied(net)
    keys = settings(max_steps=2, evaluate_every=2, ema_decay=0.9, average_checkpoints=2)
    hooks = {"save_best": lambda: best.update(copied(net))}
    trainer, _ = trainer_of(net, pairs([(3, 2), (4, 5)]), [[0], [1]], keys, tmp_path, **hooks)
    trainer.run()
    saved = load_file(trainer.checkpoints.newest() / "model.safetensors")
    assert set(best) == set(saved) == set(before)
    for name in before:
        is_frozen = name not in trainable(net)
        assert torch.equal(saved[name], before[name]) is is_frozen, name
        assert torch.equal(best[name], before[name]) is is_frozen, name
    assert any(not torch.equal(best[name], saved[name]) for name in trainable(net))
