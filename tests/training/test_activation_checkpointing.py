"""Activation checkpointing: equal gradients and models, fewer saved tensors."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import heedful.models.stack
from architectures import ARCHITECTURES, tiny
from encoder_runs import recipe_of
from heedful.evaluation.likelihood import batch_loss
from heedful.run import train
from heedful.training.step import LossNet
from trainers import batch_for


def gradients(net, *, activation_checkpointing):
    """Gradients of a step with fixed random numbers, and the number of block calls."""
    loss_net = LossNet(net, batch_loss, activation_checkpointing=activation_checkpointing).train()
    runs = []
    blocks = [module for name, module in net.named_modules() if name.endswith("blocks.0")]
    hooks = [
        block.register_forward_pre_hook(lambda *arguments: runs.append(arguments))
        for block in blocks
    ]
    torch.manual_seed(3)
    loss_net(batch_for(net)).loss.backward()
    for hook in hooks:
        hook.remove()
    actual = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return actual, len(runs) / len(blocks), torch.get_rng_state()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_bit_equal_with_dropout(name):
    net = tiny(name, dropout=0.3)
    plain, once, random = gradients(net, activation_checkpointing=False)
    again, twice, random_again = gradients(net, activation_checkpointing=True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == again.keys()
    assert all(torch.equal(grad, again[name]) for name, grad in plain.items())
    assert torch.equal(random, random_again)  # the next step has the same random numbers


def saved_bytes(net, *, activation_checkpointing):
    """Bytes of the storages saved by a forward pass, weights excluded."""
    loss_net = LossNet(net, batch_loss, activation_checkpointing=activation_checkpointing).train()
    weights = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_net(batch_for(net))
    activations = {key: tensor for key, tensor in saved.items() if key not in weights}
    return sum(tensor.untyped_storage().nbytes() for tensor in activations.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_block_saves_little_more_than_its_input(name):
    net = tiny(name, dropout=0.3)
    plain = saved_bytes(net, activation_checkpointing=False)
    fewer = saved_bytes(net, activation_checkpointing=True)
    assert fewer < plain / 2


def test_activation_checkpointing_of_a_recipe_does_not_change_the_model(tmp_path, monkeypatch):
    calls = []

    def counted(*args, **keys):
        calls.append(args)
        return checkpoint(*args, **keys)

    monkeypatch.setattr(heedful.models.stack, "checkpoint", counted)
    models = []
    for is_on in (False, True):
        keys = {"training__activation_checkpointing": is_on, "training__max_steps": 4}
        train(recipe_of("masked_lm", tmp_path, **keys), tmp_path / str(is_on))
        models.append((tmp_path / str(is_on) / "model.safetensors").read_bytes())
    assert len(calls) == 4 * 2  # two blocks in each step, none in evaluations
    assert models[0] == models[1]
