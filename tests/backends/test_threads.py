"""Threads of the eager backend: by the size of a step, not by measured time."""

import pytest
import torch

from backend_models import TEXTS, model_of
from heedful.backends.base import Settings
from heedful.backends.torch import eager, threads
from heedful.backends.torch.eager import Eager
from heedful.backends.torch.threads import run_with, threads_for, weights_of_step
from heedful.zoo import vaswani2017

TINY, SMALL, BASE = 1_800_000, 6_300_000, 29_000_000  # weights of a step, V 8000


@pytest.mark.parametrize(
    ("weights", "rows", "expected"),
    [
        (TINY, 64, 1),
        (SMALL, 4, 1),
        (SMALL, 64, 16),
        (BASE, 1, 16),
    ],
)
def test_small_steps_use_one_thread(weights: int, rows: int, expected: int) -> None:
    assert threads_for(weights, rows, 16) == expected
    assert threads_for(weights, rows, 1) == 1


def test_weights_of_a_step_are_those_of_decoder_and_head() -> None:
    sizes = {"src_vocab_size": 50, "tgt_vocab_size": 50, "d_model": 8, "num_heads": 2, "d_ff": 16}
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2}
    net = vaswani2017.build(vaswani2017.Config(**sizes, **layers))
    a_layer = 8 * 24 + 8 * 8 + 3 * 8 * 8 + 8 * 8 + 2 * 8 * 16
    assert weights_of_step(net) == 50 * 8 + 2 * a_layer


def test_weights_are_counted_once_per_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []
    model = model_of("gpt2")
    monkeypatch.setattr(
        eager, "weights_of_step", lambda net: counted.append(net) or weights_of_step(net)
    )
    assert len([*model.stream(TEXTS[0], max_new_tokens=9, min_new_tokens=9)]) > 2
    assert counted == [model.net]


@pytest.mark.parametrize(("num_threads", "expected"), [(None, 1), (3, 3)])
def test_the_number_of_threads_is_restored_after_a_pass(
    monkeypatch: pytest.MonkeyPatch, num_threads: int | None, expected: int
) -> None:
    monkeypatch.setattr(threads, "limited", lambda count: count)  # as on idle cores
    actual = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(2, 2)

        def forward(self, ids, lengths, types=None):
            actual.append(torch.get_num_threads())
            return self.encoder.weight[None].expand(len(ids), 2, 2)

    with run_with(4):
        Eager(Net(), 8, settings=Settings(num_threads)).logits([[1, 2]])
        assert torch.get_num_threads() == 4
    assert actual == [expected]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), 3),
        (Settings(4, may_reduce=True), 3),
        (Settings(4), 4),  # as the user says: scores do not depend on other programs
    ],
)
def test_a_pass_takes_no_more_threads_than_others_leave_free(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, expected: int
) -> None:
    monkeypatch.setattr(threads, "limited", lambda count: min(count, 3))
    policy = threads.ThreadPolicy(settings, lambda: BASE)
    with run_with(4), policy.for_tokens(64):
        assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), [1, 3, 4]),
        (Settings(3, may_reduce=True), [1, 3, 3]),
        (Settings(3), [3, 3, 3]),
    ],
)
def test_the_threads_of_a_search_follow_the_free_cores(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, expected: list[int]
) -> None:
    """A search that began right after another program's work had one thread to its end."""
    free = [1]
    monkeypatch.setattr(threads, "limited", lambda count: min(count, *free))
    policy, actual = threads.ThreadPolicy(settings, lambda: BASE), []
    with run_with(4):
        with policy.for_tokens(64):
            for free[0] in (1, 3, 9):
                threads.adapt()
                actual.append(torch.get_num_threads())
            with run_with(2):  # a pass of a number of its own inside
                threads.adapt()
                assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
        threads.adapt()
        assert torch.get_num_threads() == 4
    assert actual == expected


def test_each_step_of_a_search_adapts_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(threads, "limited", lambda count: asked.append(count) or count)
    model = model_of("gpt2")
    for options in ({}, {"beam_size": 2}):
        asked.clear()
        model.generate(TEXTS[0], max_new_tokens=7, min_new_tokens=7, **options)
        assert len(asked) >= 7
