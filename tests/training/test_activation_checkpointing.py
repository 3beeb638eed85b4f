"""Checkpointed activations change no gradient."""

import pytest
import torch

from architectures import ARCHITECTURES, tiny
from heedful.data.collate import collate_pairs, collate_texts
from heedful.evaluation.likelihood import batch_loss
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.training.step import TrainStep
from trainers import pairs


def batch_for(net):
    """Rows of several lengths, so that some of them are padded, with some targets."""
    source, target = pairs([(3, 5), (6, 2), (4, 7)])
    rows = torch.arange(3).numpy()
    if isinstance(net, EncoderDecoder):
        return collate_pairs(source, target, rows, start_ids=[1], pad_id=0)
    return collate_texts(source, rows, pad_id=0, labels=torch.tensor([1, 5, 2]).numpy())


def gradients(net, *, activation_checkpointing):
    """Those of a step with fixed random numbers, and how often a block ran."""
    step = TrainStep(net, batch_loss, activation_checkpointing=activation_checkpointing).train()
    runs = []
    blocks = [module for name, module in net.named_modules() if name.endswith("blocks.0")]
    hooks = [block.register_forward_pre_hook(lambda *given: runs.append(given)) for block in blocks]
    torch.manual_seed(3)
    step(batch_for(net)).loss.backward()
    for hook in hooks:
        hook.remove()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return found, len(runs) / len(blocks), torch.get_rng_state()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_bit_equal_with_dropout(name):
    net = tiny(name, dropout=0.3)
    plain, once, random = gradients(net, activation_checkpointing=False)
    again, twice, random_again = gradients(net, activation_checkpointing=True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == again.keys()
    assert all(torch.equal(grad, again[name]) for name, grad in plain.items())
    assert torch.equal(random, random_again)  # the next step draws the same numbers
