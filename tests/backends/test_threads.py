"""Eager takes as many threads as its work is worth: by the size of a step, never by the clock."""

import pytest
import torch

from backend_models import TEXTS, model_of
from heedful.backends.base import Settings
from heedful.backends.torch import eager
from heedful.backends.torch.eager import Eager
from heedful.backends.torch.threads import run_with, threads_for, weights_of_step
from heedful.zoo import vaswani2017

TINY, SMALL, BASE = 1_800_000, 6_300_000, 29_000_000  # weights of a step, V 8000


@pytest.mark.parametrize(
    ("weights", "rows", "threads"),
    [
        (TINY, 64, 1),
        (SMALL, 4, 1),
        (SMALL, 64, 16),
        (BASE, 1, 16),
    ],
)
def test_small_steps_have_one_thread(weights: int, rows: int, threads: int) -> None:
    assert threads_for(weights, rows, 16) == threads
    assert threads_for(weights, rows, 1) == 1


def test_weights_of_a_step_are_those_that_write() -> None:
    sizes = {"src_vocab_size": 50, "tgt_vocab_size": 50, "d_model": 8, "num_heads": 2, "d_ff": 16}
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2}
    net = vaswani2017.build(vaswani2017.Config(**sizes, **layers))
    a_layer = 8 * 24 + 8 * 8 + 3 * 8 * 8 + 8 * 8 + 2 * 8 * 16
    assert weights_of_step(net) == 50 * 8 + 2 * a_layer


def test_the_weights_of_a_step_are_counted_once_for_all_tokens_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []
    model = model_of("gpt2")
    monkeypatch.setattr(
        eager, "weights_of_step", lambda net: counted.append(net) or weights_of_step(net)
    )
    assert len([*model.stream(TEXTS[0], max_new_tokens=9, min_new_tokens=9)]) > 2
    assert counted == [model.net]


@pytest.mark.parametrize(("asked", "seen"), [(None, 1), (3, 3)])
def test_a_pass_has_its_threads_and_gives_them_back(asked: int | None, seen: int) -> None:
    found = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(2, 2)

        def forward(self, ids, lengths, types=None):
            found.append(torch.get_num_threads())
            return self.encoder.weight[None].expand(len(ids), 2, 2)

    with run_with(4):
        Eager(Net(), 8, settings=Settings(asked)).logits([[1, 2]])
        assert torch.get_num_threads() == 4
    assert found == [seen]
