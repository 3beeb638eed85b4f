"""The parts of a batch, each a forward and backward pass, together have its rows and its loss."""

from typing import Any

import numpy as np
import pytest
import torch

from architectures import tiny
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.processes import Processes
from heedful.training.step import parts_per_batch, step_batches
from trainers import batch_for

NETS = ("vaswani2017", "bert", "gpt2")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_have_the_rows_and_the_loss_of_their_batch(name: str, count: int) -> None:
    net = tiny(name).eval()
    batch: Batch = batch_for(net)
    parts = [part for index in range(count) if (part := batch.part(index, count)) is not None]
    assert len(parts) == min(count, len(batch.indices))
    assert batch.part(count - 1, count) is not None
    np.testing.assert_array_equal(np.concatenate([p.indices for p in parts]), batch.indices)
    for of_parts, whole in (
        (torch.cat([part.targets for part in parts]), batch.targets),
        (sum(part.num_tokens for part in parts), batch.num_tokens),
    ):
        torch.testing.assert_close(of_parts, whole)
    losses = [batch_loss(net, part).loss for part in parts]
    torch.testing.assert_close(sum(losses), batch_loss(net, batch).loss)


class _Process(Processes):
    """One of several processes, which exchanges nothing."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_processes_share_the_parts_of_every_step(count: int) -> None:
    """Each part once, with the same random numbers, and in each process equally many passes."""
    net = tiny("vaswani2017")
    batch: Batch = batch_for(net)

    def parts_of(rank: int, processes: int) -> list[list[tuple[int, ...]]]:
        batches = step_batches(
            lambda epoch: range(5),
            lambda epoch, item: batch,
            _Process(rank, processes),
            num_batches=2,
            num_parts=2,
            seed=1,
            device=torch.device("cpu"),
            num_epochs=2,
        )
        steps = []
        for own, _ in batches:
            steps.append([(rows.seed, *rows.batch.indices) for rows in own if rows.is_counted])
            lengths.setdefault(len(steps), set()).add(len(own))
        return steps

    lengths: dict[int, set[int]] = {}
    alone = parts_of(0, 1)
    lengths.clear()
    shares = [parts_of(rank, count) for rank in range(count)]
    assert all(len(sizes) == 1 for sizes in lengths.values())
    for step, parts in enumerate(alone):
        assert sorted(parts) == sorted(part for share in shares for part in share[step])
    seeds = [seed for parts in alone for seed, *_ in parts]
    assert len(seeds) == len(set(seeds)) == 2 * 5 * 2


def test_steps_from_a_position_are_those_that_follow_it() -> None:
    """Seeds and positions, also across the end of an epoch whose last step is shorter."""
    batch = batch_for(tiny("vaswani2017"))
    keys: Any = {"num_batches": 2, "num_parts": 1, "seed": 1, "device": torch.device("cpu")}

    def steps(start: tuple[int, int]) -> list[tuple[list[int], tuple[int, int]]]:
        plan, load = (lambda epoch: range(5)), (lambda epoch, item: batch)
        batches = step_batches(plan, load, Processes(), **keys, start=start, num_epochs=3)
        return [([rows.seed for rows in own], at) for own, at in batches]

    whole = steps((0, 0))
    assert [len(seeds) for seeds, _ in whole] == [2, 2, 1] * 3
    positions = [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0), (2, 2), (2, 4), (3, 0)]
    assert [position for _, position in whole] == positions
    for number, position in enumerate(positions, 1):
        assert steps(position) == whole[number:]


def test_an_epoch_without_rows_is_an_error_and_no_endless_search() -> None:
    """As of corpora that all have weight 0 from an epoch on."""
    batch = batch_for(tiny("vaswani2017"))
    steps = step_batches(
        lambda epoch: [] if epoch else [0],
        lambda epoch, item: batch,
        Processes(),
        num_batches=1,
        num_parts=1,
        seed=1,
        device=torch.device("cpu"),
        num_epochs=2,
    )
    assert next(steps)[1] == (1, 0)
    with pytest.raises(UserError, match="epoch 1 has no training rows; raise"):
        next(steps)


def test_the_parts_of_a_batch_give_all_processes_equal_shares() -> None:
    for batches, processes in ((1, 4), (4, 2), (3, 4), (6, 4), (1, 1)):
        parts = parts_per_batch(batches, processes)
        assert batches * parts % processes == 0
        assert all(batches * fewer % processes for fewer in range(1, parts))
