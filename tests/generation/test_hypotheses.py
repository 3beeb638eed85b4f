"""Back-pointers return the sequences that lists of hypotheses would."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.generation.hypotheses import BackPointers, BestFinished, Extensions

Path = tuple[list[int], list[float]]


def random_step(generator: torch.Generator, beams: int, width: int, count: int) -> Extensions:
    """`count` extensions of each beam by random tokens, of random parents."""
    size = (beams, count)
    parent = torch.randint(width, size, generator=generator)
    token = torch.randint(100, size, generator=generator)
    values = torch.rand(size, generator=generator, dtype=torch.float64)
    return Extensions(parent, token, -values, -values)


def extended(paths: list[Path], step: Extensions, beam: int) -> list[Path]:
    """The extensions of the hypotheses of one beam, as lists."""
    rows = zip(*(values[beam].tolist() for values in step[:3]), strict=True)
    return [
        ([*paths[parent][0], token], [*paths[parent][1], value]) for parent, token, value in rows
    ]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 4),
    width=st.integers(1, 4),
    num_endings=st.integers(1, 5),
    data=st.data(),
)
def test_paths_equal_plain_lists(
    seed: int, beams: int, width: int, num_endings: int, data: st.DataObject
) -> None:
    """Every entry of every step, whichever beams leave after any steps."""
    generator = torch.Generator().manual_seed(seed)
    num_entries = width + num_endings
    history = BackPointers(num_entries)
    open_: list[list[Path]] = [[([], [])] * width for _ in range(beams)]
    expected: list[list[Path]] = [[] for _ in range(beams)]  # by reference
    for _ in range(data.draw(st.integers(1, 7), label="steps")):
        count = len(open_)
        step = random_step(generator, count, width, width)
        endings = random_step(generator, count, width, num_endings)
        history.append(step, endings)
        for beam in range(count):
            of_endings = extended(open_[beam], endings, beam)
            open_[beam] = extended(open_[beam], step, beam)
            expected[beam] += open_[beam] + of_endings
        if data.draw(st.booleans(), label="select"):
            keep = data.draw(st.lists(st.integers(0, count - 1), min_size=1), label="beams")
            history = history.select(torch.tensor(keep))
            open_ = [list(open_[beam]) for beam in keep]
            expected = [list(expected[beam]) for beam in keep]
    refs = [[*range(len(paths))] for paths in expected]
    assert list(history.paths(refs)) == expected
    assert list(history.paths(refs)) == expected  # reading changes nothing


def test_a_negative_reference_is_the_empty_hypothesis() -> None:
    generator = torch.Generator().manual_seed(0)
    history = BackPointers(5)
    history.append(random_step(generator, 2, 2, 2), random_step(generator, 2, 2, 3))
    assert list(history.paths([[-5], []])) == [[([], [])], []]


def test_select_does_not_change_the_original() -> None:
    generator = torch.Generator().manual_seed(1)
    history = BackPointers(2)
    history.append(random_step(generator, 3, 1, 1), random_step(generator, 3, 1, 1))
    before = list(history.paths([[0, 1]] * 3))
    selected = history.select(torch.tensor([2]))
    selected.append(random_step(generator, 1, 1, 1), random_step(generator, 1, 1, 1))
    assert list(history.paths([[0, 1]] * 3)) == before
    assert list(selected.paths([[0, 1]])) == before[2:]


def test_extensions_are_taken_at_indices_of_each_beam() -> None:
    step = random_step(torch.Generator().manual_seed(2), 2, 3, 4)
    best = step.take(torch.tensor([[3, 0], [1, 1]]))
    for values, all_values in zip(best, step, strict=True):
        assert values.tolist() == [
            [all_values[0, 3].item(), all_values[0, 0].item()],
            [all_values[1, 1].item()] * 2,
        ]


SCORES = st.sampled_from([-math.inf, -3.0, -2.0, -1.0])


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.lists(st.lists(SCORES, min_size=3, max_size=3), min_size=2, max_size=2)),
    keep_earlier=st.booleans(),
)
def test_the_best_finished_equal_a_sorted_list(
    capacity: int, steps: list[list[list[float]]], keep_earlier: bool
) -> None:
    """Of equal scores the earlier one is kept; with `keep_earlier`, the first ones."""
    finished = BestFinished(
        torch.full((2, capacity), -math.inf), torch.zeros(2, capacity, dtype=torch.long)
    )
    expected: list[list[tuple[float, int]]] = [[], []]
    for step, scores in enumerate(steps):
        finished = finished.add(torch.tensor(scores), 10 * step, keep_earlier=keep_earlier)
        for beam in range(2):
            new = sorted(
                ((s, 10 * step + n) for n, s in enumerate(scores[beam]) if s > -math.inf),
                key=lambda pair: -pair[0],
            )
            merged = expected[beam] + new
            if not keep_earlier:
                merged.sort(key=lambda pair: -pair[0])
            expected[beam] = merged[:capacity]
    for beam in (0, 1):
        pairs = zip(finished.score[beam].tolist(), finished.ref[beam].tolist(), strict=True)
        assert [pair for pair in pairs if pair[0] > -math.inf] == expected[beam]


@pytest.mark.parametrize("beams", [[1], [1, 0], []])
def test_selected_finished_hypotheses_keep_scores_and_references(beams: list[int]) -> None:
    score, ref = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[7, 2], [5, 9]])
    selected = BestFinished(score, ref).select(torch.tensor(beams, dtype=torch.long))
    assert selected.score.tolist() == [score[beam].tolist() for beam in beams]
    assert selected.ref.tolist() == [ref[beam].tolist() for beam in beams]
