"""The host synchronizes with the device once or twice a beam step, otherwise only at intervals."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.generation import beam_search, sample
from heedful.generation.constrained import constrained_beam_search
from heedful.generation.rules import sampling_rules
from tables import Remembered
from waits import Waits

EOS, SIZE = 0, 30
RULES: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1,
    "no_repeat_ngram_size": 2, "banned": [3, [4, 5]], "forced": {2: 7}, "top_k": 9, "top_p": 0.9,
    "temperature": 0.8, "min_p": 0.01, "typical_p": 0.95,
}  # fmt: skip


class Table(Remembered):
    """A state whose next-token function does not need the host."""

    calls = 0

    def __call__(self, prefixes: Tensor, state: "Table") -> Tensor:
        self.calls += 1
        logits = torch.sin(prefixes[:, -1:] * torch.arange(1.0, SIZE + 1) + self.calls)
        logits = 2 * logits.index_fill(1, torch.tensor([EOS]), -2.0)
        return logits.log_softmax(dim=1)

    def reorder(self, parents: Tensor) -> None:
        pass


@pytest.mark.parametrize("rules", [{}, RULES], ids=["no rules", "all rules"])
@pytest.mark.parametrize("seeds", [None, [1, 2, 3]], ids=["greedy", "sampled"])
def test_no_step_synchronizes_between_reads(seeds: list[int] | None, rules: dict[str, Any]) -> None:
    table = Table(3)
    samples = 1 if seeds is None else 2
    with Waits() as waits:
        actual = sample(
            table, [[1], [2], [3]], state=table, seeds=seeds, num_samples=samples, eos_id=EOS,
            rules=sampling_rules(**rules), max_new_tokens=24, min_new_tokens=24, steps_per_read=8,
        )  # fmt: skip
    assert [len(one.ids) for one in actual] == [24] * 3 * samples
    assert table.calls == 24
    assert waits.seen == {"tolist": 3}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stop", ["optimal", "beam_full", "heuristic"])
@pytest.mark.parametrize("rules", [{}, RULES], ids=["no rules", "all rules"])
def test_a_beam_step_synchronizes_once(stop: str, rules: dict[str, Any], groups: int) -> None:
    table = Table(3)
    steps = []
    with Waits() as waits:
        function = table.__call__

        def stepped(prefixes: Tensor, state: Table) -> Tensor:
            steps.append(sum(waits.seen.values()))
            return function(prefixes, state)

        beam_search(
            stepped, [[1], [2], [3]], state=table, beam_size=4, num_groups=groups, eos_id=EOS,
            rules=sampling_rules(**rules), max_new_tokens=12, min_new_tokens=12, stop=stop,
        )  # fmt: skip
    assert steps == list(range(12))  # before each step there was one look for each one before it


def test_a_constrained_step_synchronizes_at_most_twice() -> None:
    table = Table(3)
    steps = []
    with Waits() as waits:

        def stepped(prefixes: Tensor, state: Table) -> Tensor:
            steps.append(sum(waits.seen.values()))
            return table(prefixes, state)

        constrained_beam_search(
            stepped, [[1], [2], [3]], [[4, 5, 4], [5, 6]], state=table, beam_size=4, eos_id=EOS,
            max_new_tokens=12, min_new_tokens=12,
        )  # fmt: skip
    counts = [after - before for before, after in pairwise(steps)]
    # The candidates, and which beams are open; the latter alone once all phrases are complete,
    # which they are not in each bank.
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 2
