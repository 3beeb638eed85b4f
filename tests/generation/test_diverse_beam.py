"""Diverse beam search: one group is the plain search, and groups are charged for likeness."""

import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import beam_search
from heedful.generation.rules import NoRepeatNgram, RepetitionPenalty
from tables import Remembered, remembering

EOS, SIZE = 0, 7
INF = math.inf


@cache
def row_of(seed: int, prefix: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**40)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64).log_softmax(dim=0)


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    return lambda prefixes: torch.stack([row_of(seed, tuple(p)) for p in prefixes.tolist()])


Open = tuple[tuple[int, ...], float, float]  # ids, log-probability, what it is ranked by


def plain_diverse(
    seed: int, start: tuple[int, ...], width: int, groups: int, penalty: float, longest: int
) -> dict[tuple[int, ...], float]:
    """Every hypothesis that the groups find when none stops early: ids and log-probability."""
    beams: list[list[Open]] = [[((), 0.0, 0.0)] for _ in range(groups)]
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, longest + 1):
        taken: Counter[int] = Counter()
        for group in range(groups):
            candidates: list[Open] = []
            for ids, log_prob, key in beams[group]:
                for token, part in enumerate(row_of(seed, start + ids).tolist()):
                    charge = penalty * taken[token]
                    candidates.append(((*ids, token), log_prob + part, key + part - charge))
            candidates.sort(key=lambda candidate: -candidate[2])
            found |= {ids: log_prob for ids, log_prob, _ in candidates if ids[-1] == EOS}
            beams[group] = [one for one in candidates if one[0][-1] != EOS][:width]
            taken.update(ids[-1] for ids, _, _ in beams[group])
        if length == longest:
            found |= {ids: log_prob for beam in beams for ids, log_prob, _ in beam}
    return found


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 50),
    width=st.integers(1, 3),
    groups=st.integers(2, 4),
    penalty=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    longest=st.integers(1, 5),
)
def test_groups_find_what_a_plain_implementation_finds(
    seed: int, width: int, groups: int, penalty: float, longest: int
) -> None:
    """Also that `optimal` may stop early: the plain search goes on to the limit."""
    expected = plain_diverse(seed, (1,), width, groups, penalty, longest)
    best = sorted(expected.items(), key=lambda one: -one[1])[:width]
    [found] = beam_search(
        random_function(seed), [[1]], beam_size=width * groups, num_groups=groups, eos_id=EOS,
        diversity_penalty=penalty, max_new_tokens=longest, normalization="none", num_return=width,
    )  # fmt: skip
    assert [tuple(h.ids) for h in found] == [ids for ids, _ in best]
    assert [h.log_prob for h in found] == pytest.approx([log_prob for _, log_prob in best])
    for hypothesis in found:
        parts = [
            float(row_of(seed, (1, *hypothesis.ids[:i]))[hypothesis.ids[i]])
            for i in range(len(hypothesis.ids))
        ]
        assert hypothesis.token_log_probs == pytest.approx(parts)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 50),
    beam=st.integers(1, 4),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
)
def test_one_group_is_the_plain_search(seed: int, beam: int, stop: str) -> None:
    options = {
        "beam_size": beam, "num_return": beam, "eos_id": EOS, "max_new_tokens": [5, 3],
        "stop": stop, "no_repeat_ngram_size": 2,
    }  # fmt: skip
    plain = beam_search(random_function(seed), [[1], [2]], **options)
    one = beam_search(
        random_function(seed), [[1], [2]], num_groups=1, diversity_penalty=3.0, **options
    )
    assert one == plain
    # Without a penalty each group is the plain search with its part of the beam.
    options |= {"beam_size": 3 * beam}
    groups = beam_search(
        random_function(seed), [[1], [2]], num_groups=3, diversity_penalty=0.0, **options
    )
    assert groups == plain


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 50),
    limits=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    groups=st.integers(2, 3),
    width=st.integers(1, 2),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
    data=st.data(),
)
def test_a_result_depends_on_neither_batch_nor_order_nor_state(
    seed: int, limits: list[int], groups: int, width: int, stop: str, data: st.DataObject
) -> None:
    """Sentences, and groups of one sentence, end at different steps and leave the batch."""
    batch = range(len(limits))
    least = [data.draw(st.integers(0, limit)) for limit in limits]
    forced = [
        data.draw(st.lists(st.integers(1, 6), max_size=min(2, limit - 1))) for limit in limits
    ]
    prompts = [data.draw(st.lists(st.integers(0, 6), max_size=3)) for _ in limits]

    def search(of: list[int], state: Remembered | None = None) -> list:
        return beam_search(
            random_function(seed) if state is None else remembering(partial(row_of, seed)),
            torch.tensor([[5, sentence % 3 + 1] for sentence in of]),
            beam_size=groups * width,
            num_groups=groups,
            diversity_penalty=0.7,
            num_return=width * groups,
            eos_id=[EOS, 3],
            max_new_tokens=[limits[sentence] for sentence in of],
            min_new_tokens=[least[sentence] for sentence in of],
            forced_prefix=[[t for t in forced[sentence] if t != 3] for sentence in of],
            prompts=[prompts[sentence] for sentence in of],
            rules=[RepetitionPenalty(1.2), NoRepeatNgram(2, include_prompt=True)],
            stop=stop,
            state=state,
        )

    together = search(list(batch))
    assert together == [search([sentence])[0] for sentence in batch]
    order = data.draw(st.permutations(batch))
    assert [together[sentence] for sentence in order] == search(list(order))
    assert search(list(batch), Remembered(len(limits))) == together
    for sentence in together:
        assert len({tuple(h.ids) for h in sentence}) == len(sentence) >= 1
        assert [h.score for h in sentence] == sorted((h.score for h in sentence), reverse=True)


def test_groups_part_where_the_penalty_makes_them() -> None:
    """Two groups of one: the second takes the second-best first token from ln(.5 / .3) nats on."""
    table = {(): [0.0, 0.5, 0.3, 0.2]}

    def function(prefixes: Tensor) -> Tensor:
        rows = [table.get(tuple(p), [1.0, 0.0, 0.0, 0.0]) for p in prefixes.tolist()]
        return torch.tensor(rows, dtype=torch.float64).log()

    def first_tokens(groups: int, penalty: float) -> list[int]:
        [found] = beam_search(
            function, [[]], beam_size=groups, num_groups=groups, num_return=groups, eos_id=EOS,
            max_new_tokens=3, diversity_penalty=penalty, normalization="none",
        )  # fmt: skip
        return [hypothesis.ids[0] for hypothesis in found]

    edge = math.log(0.5 / 0.3)
    assert first_tokens(2, edge - 0.01) == [1]
    assert first_tokens(2, edge + 0.01) == [1, 2]
    # A third group is charged once each for 1 and 2, and takes 3 when that is worth it.
    assert first_tokens(3, math.log(0.5 / 0.2) - 0.01) == [1, 2]
    assert first_tokens(3, math.log(0.5 / 0.2) + 0.01) == [1, 2, 3]


def test_a_charge_stays_with_a_hypothesis() -> None:
    """As in the authors' code. Group one takes 1 and 2; with the charge the other leads with 3."""
    half = math.log(0.5)
    first = [-INF, math.log(0.5), math.log(0.3), math.log(0.2)]

    def function(prefixes: Tensor) -> Tensor:
        row = first if prefixes.shape[1] == 0 else [-INF, half, half, -INF]
        return torch.tensor([row] * len(prefixes), dtype=torch.float64)

    [found] = beam_search(
        function, [[]], beam_size=4, num_groups=2, num_return=4, eos_id=EOS, max_new_tokens=2,
        diversity_penalty=1.0, normalization="none",
    )  # fmt: skip
    # In the second step both tokens cost the same. By probability (1, .) would go before (3, .);
    # it still bears the charge of the first step: ln .5 - 1 is below ln .2.
    assert [tuple(h.ids) for h in found] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert found[2].log_prob == pytest.approx(math.log(0.2) + half)


def test_a_group_goes_on_for_a_hypothesis_that_its_charge_put_second() -> None:
    """In group two the open (3) ranks first and cannot beat EOS at .08, but the charged (1) can."""
    rest = [0.0, 1 / 3, 1 / 3, 1 / 3]
    table = {
        (): [0.08, 0.78, 0.08, 0.06], (1,): [0.0, 0.4, 0.35, 0.25], (3,): [0.0, 0.0, 0.0, 1.0],
        (1, 3): [1.0, 0.0, 0.0, 0.0],
    }  # fmt: skip

    def function(prefixes: Tensor) -> Tensor:
        rows = [table.get(tuple(p), rest) for p in prefixes.tolist()]
        return torch.tensor(rows, dtype=torch.float64).log()

    [[found]] = beam_search(
        function, [[]], beam_size=4, num_groups=2, eos_id=EOS, max_new_tokens=3,
        diversity_penalty=4.0, normalization="none",
    )  # fmt: skip
    assert (found.ids, found.finished) == ([1, 3, EOS], True)
    assert found.log_prob == pytest.approx(math.log(0.78 * 0.25))


def test_a_row_that_only_fills_the_beam_charges_nobody() -> None:
    """In the second step group one has (1, 1) and a copy of it; (3, 1) pays for one of them."""
    table = {
        (): [0.0, 0.4, 0.3, 0.2, 0.1], (1,): [0.0, 1.0, 0.0, 0.0, 0.0],
        (3,): [0.0, 0.8, 0.15, 0.05, 0.0],
    }  # fmt: skip

    def function(prefixes: Tensor) -> Tensor:
        rows = [table.get(tuple(p), [1.0, 0.0, 0.0, 0.0, 0.0]) for p in prefixes.tolist()]
        return torch.tensor(rows, dtype=torch.float64).log()

    [found] = beam_search(
        function, [[]], beam_size=4, num_groups=2, num_return=4, eos_id=EOS, max_new_tokens=2,
        diversity_penalty=2.0, normalization="none",
    )  # fmt: skip
    assert [h.ids for h in found] == [[1, 1], [2, EOS], [3, 1], [4, EOS]]


def test_one_call_a_step_for_all_groups_of_all_sentences() -> None:
    shapes = []

    def counted(prefixes: Tensor) -> Tensor:
        shapes.append(tuple(prefixes.shape))
        out = random_function(1)(prefixes)
        out[:, EOS] = -INF
        return out

    beam_search(counted, [[1], [2]], beam_size=6, num_groups=3, eos_id=EOS, max_new_tokens=[2, 4],
                normalization="none")  # fmt: skip
    assert shapes == [(2, 1), (12, 2), (6, 3), (6, 4)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_groups": 3}, "num_groups must divide"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 2, "diversity_penalty": -0.1}, "diversity_penalty"),
        ({"num_groups": 2, "diversity_penalty": INF}, "diversity_penalty"),
        ({"num_groups": 2, "diversity_penalty": math.nan}, "diversity_penalty"),
    ],
)
def test_bad_arguments(options: dict[str, object], says: str) -> None:
    good = {"start": [[1]], "beam_size": 4, "eos_id": EOS, "max_new_tokens": 5}
    with pytest.raises(UserError, match=says):
        beam_search(random_function(0), **(good | options))
