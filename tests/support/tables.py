"""Next-token functions of random tables, their search spaces, and a state that reveals mistakes."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

Row = Callable[[tuple[int, ...]], list[float]]  # log-probabilities after a prefix
INF = math.inf


def from_rows(row: Callable[[tuple[int, ...]], Any]) -> Callable[[Tensor], Tensor]:
    """A table as a function of prefixes."""
    return lambda prefixes: torch.tensor(
        [list(row(tuple(prefix))) for prefix in prefixes.tolist()], dtype=torch.float64
    )


def from_table(
    table: dict[tuple[int, ...], list[float]], rest: list[float]
) -> Callable[[Tensor], Tensor]:
    """Probabilities by prefix, and those of all other prefixes."""
    function = from_rows(lambda prefix: table.get(prefix, rest))
    return lambda prefixes: function(prefixes).log()


def random_rows(
    seed: int, size: int, holes: float = 0.0, *, order: int | None = None, eos_bias: float = 0.0
) -> Row:
    """A random distribution for each prefix, or for its last `order` tokens; some impossible."""

    @cache
    def row(key: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, size, key)) % 2**40)
        logits = torch.randn(size, generator=generator, dtype=torch.float64) * 2
        keep = torch.rand(size, generator=generator) >= holes
        keep[int(torch.randint(size, (1,), generator=generator))] = True
        logits[0] += eos_bias
        return logits.masked_fill(~keep, -INF).log_softmax(0).tolist()

    return row if order is None else lambda prefix: row(prefix[-order:])


def parts_of(row: Row, start: tuple[int, ...], ids: Collection[int]) -> list[float]:
    """The log-probability of each token after the start and those before it."""
    ids = tuple(ids)
    return [row(start + ids[:i])[token] for i, token in enumerate(ids)]


def whole_space(
    row: Row, start: tuple[int, ...], shortest: int, longest: int, ends: Collection[int] = (0,)
) -> Iterator[tuple[tuple[int, ...], float, bool]]:
    """Every sequence that a search may return: ids, log-probability, finished."""
    size = len(row(start))
    for length in range(1, longest + 1):
        for ids in itertools.product(range(size), repeat=length):
            finished = ids[-1] in ends
            if not set(ends) & set(ids[:-1]) and (
                length >= shortest if finished else length == longest
            ):
                parts = parts_of(row, start, ids)
                if -INF not in parts:
                    yield ids, sum(parts), finished


class Remembered:
    """A state that stores its inputs, so that a wrong reordering shows."""

    def __init__(self, batch: int) -> None:
        self.prefixes = torch.zeros(batch, 0, dtype=torch.long)
        self.batch = batch
        self.followed: list[list[list[int]]] = []

    def reorder(self, parents: Tensor) -> None:
        rows = self.prefixes.unflatten(0, (self.batch, -1))
        assert len(parents) == self.batch
        self.prefixes = torch.cat([of[own] for of, own in zip(rows, parents, strict=True)])
        self.followed.append(parents.tolist())

    def select(self, sentences: Tensor) -> None:
        assert 0 < len(sentences) < self.batch, "a selection that does nothing"
        self.prefixes = self.prefixes.unflatten(0, (self.batch, -1))[sentences].flatten(0, 1)
        self.batch = len(sentences)


def remembering(row: Callable[[tuple[int, ...]], Any]) -> Callable[[Tensor, Remembered], Tensor]:
    """A function that reads the last token, and the rest from its state."""

    def next_log_probs(prefixes: Tensor, state: Remembered) -> Tensor:
        new = prefixes if state.prefixes.shape[1] == 0 else prefixes[:, -1:]
        state.prefixes = torch.cat([state.prefixes, new], dim=1)
        assert torch.equal(state.prefixes, prefixes)
        return from_rows(row)(state.prefixes)

    return next_log_probs
