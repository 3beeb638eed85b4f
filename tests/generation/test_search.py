"""Beam and greedy search over tables: published numbers, exhaustive search, known mistakes."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import beam_search, greedy_search
from heedful.generation.hypotheses import top_k
from heedful.generation.outputs import LengthScore
from heedful.generation.rules import PresencePenalty, Temperature
from heedful.generation.token_rules import (
    BannedTokens,
    ForcedTokens,
    PrefixFunction,
    SequenceBias,
)
from tables import (
    INF,
    Remembered,
    Row,
    from_rows,
    from_table,
    parts_of,
    random_rows,
    remembering,
    whole_space,
)

EOS = 0


def table_of(table: dict[tuple[int, ...], dict[int, float]], size: int) -> Callable[..., Tensor]:
    """Probabilities by prefix and token; all other prefixes are followed by EOS."""
    rows = {prefix: [of.get(token, 0.0) for token in range(size)] for prefix, of in table.items()}
    return from_table(rows, [1.0] + [0.0] * (size - 1))


def plain_score(log_prob: float, length: int, normalization: str, penalty: float) -> float:
    if normalization == "none":
        return log_prob
    base = length if normalization == "average" else (5 + length) / 6
    return log_prob / base**penalty


def plain_beam(
    row: Row, start: tuple[int, ...], beam: int, longest: int, shortest: int, stop: str
) -> list[tuple[tuple[int, ...], float]]:
    """A plain beam search for one sentence, on log-probabilities, without early stopping under
    `optimal`."""
    open_: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    actual: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, longest + 1):
        candidates = []
        for ids, log_prob in open_:
            for token, part in enumerate(row(start + ids)):
                short = token == EOS and length < shortest
                forced = stop == "beam_full" and length == longest and token != EOS
                if part > -INF and not short and not forced:
                    candidates.append(((*ids, token), log_prob + part))
        candidates.sort(key=lambda candidate: -candidate[1])
        counted = candidates if stop == "optimal" else candidates[:beam]
        actual += [candidate for candidate in counted if candidate[0][-1] == EOS]
        open_ = [candidate for candidate in candidates if candidate[0][-1] != EOS][:beam]
        if stop == "beam_full" and len(actual) >= beam:
            return actual[:beam]
    return actual + (open_ if stop == "optimal" else [])


# --- Exact tables -------------------------------------------------------------------------------

searches = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "size": st.integers(2, 4),
        "num_ends": st.integers(1, 3),
        "longest": st.integers(1, 4),
        "shortest": st.integers(0, 4),
        "holes": st.sampled_from([0.0, 0.3]),
        "normalization": st.sampled_from(["average", "gnmt", "none"]),
        "penalty": st.sampled_from([-2.0, -0.5, 0.0, 0.6, 1.0, 2.0]),
    }
)


@settings(max_examples=150, deadline=None)
@given(case=searches, num_return=st.integers(1, 6), force_eos=st.booleans())
def test_optimal_finds_the_optimum_of_the_search_space(
    case: dict, num_return: int, force_eos: bool
) -> None:
    row = random_rows(case["seed"], case["size"], case["holes"])
    longest, shortest = case["longest"], min(case["shortest"], case["longest"])
    scoring = (case["normalization"], case["penalty"])
    start, ends = (1, EOS), range(min(case["num_ends"], case["size"] - 1))
    space = {
        ids: (plain_score(log_prob, len(ids), *scoring), finished and not at_limit)
        for ids, log_prob, finished in whole_space(row, start, shortest, longest, ends)
        for at_limit in [force_eos and len(ids) == longest]
        if ids[-1] == EOS or not at_limit
    }
    [actual] = beam_search(
        from_rows(row),
        [start],
        beam_size=max(num_return, case["size"] ** longest),
        eos_id=list(ends),
        max_new_tokens=longest,
        min_new_tokens=shortest,
        normalization=scoring[0],
        length_penalty=scoring[1],
        num_return=num_return,
        force_eos=force_eos,
    )
    if not space:
        assert len(actual) == 1
        assert not actual[0].finished
        assert not set(ends) & set(actual[0].ids)
        return
    best = sorted((score for score, _ in space.values()), reverse=True)[:num_return]
    assert [h.score for h in actual] == pytest.approx(best, abs=1e-9)
    assert len({tuple(h.ids) for h in actual}) == len(actual)
    for hypothesis in actual:
        score, finished = space[tuple(hypothesis.ids)]
        assert hypothesis.score == pytest.approx(score, abs=1e-9)
        assert hypothesis.finished == finished


@settings(max_examples=100, deadline=None)
@given(case=searches, beam=st.integers(1, 4), stop=st.sampled_from(["optimal", "beam_full"]))
def test_small_beams_equal_a_plain_search(case: dict, beam: int, stop: str) -> None:
    """Also that `optimal` may stop early: the plain search continues to the limit."""
    row = random_rows(case["seed"], case["size"], case["holes"])
    longest, shortest = case["longest"] + 2, min(case["shortest"], case["longest"] + 2)
    scoring = (case["normalization"], case["penalty"])
    expected = [
        plain_score(log_prob, len(ids), *scoring)
        for ids, log_prob in plain_beam(row, (), beam, longest, shortest, stop)
    ]
    [actual] = beam_search(
        from_rows(row),
        [[]],
        beam_size=beam,
        num_return=beam,
        eos_id=EOS,
        max_new_tokens=longest,
        min_new_tokens=shortest,
        normalization=scoring[0],
        length_penalty=scoring[1],
        stop=stop,
    )
    if expected:
        best = sorted(expected, reverse=True)[:beam]
        assert [h.score for h in actual] == pytest.approx(best, abs=1e-9)
    else:
        assert [h.finished for h in actual] == [False]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 12), longest=st.integers(1, 8))
def test_greedy_takes_the_most_probable_token(seed: int, size: int, longest: int) -> None:
    row = random_rows(seed, size, holes=0.2)
    ids: list[int] = []
    while len(ids) < longest and ids[-1:] != [EOS]:
        likely = row(tuple(ids))
        ids.append(likely.index(max(likely)))
    [[actual]] = greedy_search(from_rows(row), [[]], eos_id=EOS, max_new_tokens=longest)
    assert actual.ids == ids
    assert actual.finished == (ids[-1] == EOS)
    assert actual.score == pytest.approx(sum(parts_of(row, (), ids)) / len(ids))


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    flat = from_rows(lambda _prefix: [-math.log(6)] * 6)
    [[actual]] = greedy_search(flat, [[]], eos_id=5, max_new_tokens=2)
    assert actual.ids == [0, 0]


# --- States --------------------------------------------------------------------------------------


def test_the_state_is_reordered_with_its_beams_and_selected_with_its_sentences() -> None:
    table = {
        (1,): {1: 0.6, 2: 0.4},
        (1, 1): {2: 0.5, EOS: 0.1, 1: 0.4},
        (1, 2): {1: 1.0},  # the beams cross here
        (2,): {EOS: 0.9, 1: 0.1},
    }
    state = Remembered(2)

    def full(prefix: tuple[int, ...]) -> list[float]:
        known = table.get(prefix, {EOS: 1.0})
        return [math.log(known.get(token, 1e-30)) for token in range(3)]

    actual = beam_search(
        remembering(full), [[1], [2]], beam_size=2, eos_id=EOS, max_new_tokens=5, state=state
    )
    assert actual == beam_search(
        from_rows(full), [[1], [2]], beam_size=2, eos_id=EOS, max_new_tokens=5
    )
    assert len(state.prefixes) < 4
    assert any(a > b for sentences in state.followed[1:] for a, b in sentences)


def test_the_state_is_not_reordered_without_need() -> None:
    row = random_rows(3, 6)
    state = Remembered(2)
    greedy = greedy_search(
        remembering(row), [[1], [2]], eos_id=5, min_new_tokens=4, max_new_tokens=4, state=state
    )
    assert state.followed == []
    assert len(greedy) == 2


# --- Defects of other searches ------------------------------------------------------------------


def test_a_finished_hypothesis_is_kept_when_it_falls_out_of_the_beam() -> None:
    """EOS is only fourth after (), so it is in no beam of 2, yet it is the best in the end."""
    table = {(): {1: 0.3, 2: 0.25, 3: 0.24, EOS: 0.21}}
    weak = dict.fromkeys(range(10), 0.1)
    table |= {prefix: weak for n in (1, 2) for prefix in itertools.product(range(1, 10), repeat=n)}
    [[actual]] = beam_search(
        table_of(table, 10), [[]], beam_size=2, eos_id=EOS, max_new_tokens=3, normalization="none"
    )
    assert (actual.ids, actual.finished) == ([EOS], True)
    assert actual.log_prob == pytest.approx(math.log(0.21))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"normalization": "none"}, 1),
        ({"length_penalty": -1.0}, 1),  # 2 log .6, the best still possible, is below log .4
        ({"length_penalty": 1.0, "max_new_tokens": 4}, 4),  # log .6 / 4 is above log .4
        ({"stop": "beam_full"}, 2),
    ],
)
def test_search_ends_before_the_limit(options: dict[str, object], steps: int) -> None:
    calls = []
    table = {(): {EOS: 0.4, 1: 0.6}, (1,): {EOS: 0.1, 1: 0.9}, (1, 1): {1: 0.9, EOS: 0.1}}
    if "normalization" in options:
        table[()] = {EOS: 0.6, 1: 0.4}

    def counted(prefixes: Tensor) -> Tensor:
        calls.append(len(prefixes))
        return table_of(table, 2)(prefixes)

    options = {"max_new_tokens": 100, "beam_size": 2, "eos_id": EOS} | options
    beam_search(counted, [[]], **options)
    assert len(calls) == steps


@pytest.mark.parametrize(
    ("penalty", "table", "best"),
    [
        # With a bound at the current length, the row of 1s would be dropped long before its end.
        (1.0, {(): {EOS: 0.5, 1: 0.5}, (1,): {1: 0.2, 2: 0.8}}, [1] * 9 + [EOS]),
        # With a bound at the maximum length, (1,) would be dropped just before its end.
        (-1.0, {(): {EOS: 0.3, 1: 0.7}}, [1, EOS]),
    ],
)
def test_early_stop_uses_the_formula_of_the_scores(
    penalty: float, table: dict, best: list[int]
) -> None:
    if penalty > 0:
        table = table | {(1,) * n: {1: 1.0} for n in range(2, 9)}
    [[actual]] = beam_search(
        table_of(table, 3), [[]], beam_size=2, eos_id=EOS, max_new_tokens=10,
        length_penalty=penalty,
    )  # fmt: skip
    assert actual.ids == best


def test_length_counts_eos_and_not_the_start() -> None:
    table = {(1, 2, 3): {1: 0.5, EOS: 0.1, 2: 0.4}, (1, 2, 3, 1): {EOS: 0.5, 1: 0.5}}
    options = {"beam_size": 3, "eos_id": EOS, "min_new_tokens": 2, "max_new_tokens": 2}
    for normalization, divisor in (("average", 2.0), ("gnmt", 7 / 6), ("none", 1.0)):
        actual = beam_search(
            table_of(table, 4), [[1, 2, 3]], normalization=normalization, num_return=3, **options
        )
        score = {tuple(h.ids): h.score for h in actual[0]}
        assert score[1, EOS] == pytest.approx(math.log(0.25) / divisor)
        assert score[2, EOS] == pytest.approx(math.log(0.4) / divisor)


@pytest.mark.parametrize("penalty", [1e308, -1e308])
def test_a_score_of_any_penalty_is_a_number(penalty: float) -> None:
    actual = LengthScore("average", penalty).hypothesis([1, EOS], [-1.0, -1.0], finished=True)
    assert not math.isnan(actual.score)
    assert actual.score <= 0


# --- Rules --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), ngram=st.integers(1, 3))
def test_no_repeat_ngram_excludes_only_repetitions(seed: int, ngram: int) -> None:
    """The start does not count, and the best sequence without a repetition is found."""
    row = random_rows(seed, 5)
    space = [
        (log_prob, ids)
        for ids, log_prob, _ in whole_space(row, (1, 2), 4, 4)
        if len({ids[i : i + ngram] for i in range(5 - ngram)}) == 5 - ngram
    ]
    [[actual]] = beam_search(
        from_rows(row), [[1, 2]], beam_size=64, no_repeat_ngram_size=ngram, eos_id=EOS,
        max_new_tokens=4, min_new_tokens=4,
    )  # fmt: skip
    assert tuple(actual.ids) == max(space)[1]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), forced=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_forced_prefix_comes_first_and_counts(seed: int, forced: list[int]) -> None:
    row = random_rows(seed, 4)
    space = [
        (plain_score(log_prob, len(ids), "average", 1.0), list(ids))
        for ids, log_prob, _ in whole_space(row, (), 0, 4)
        if ids[: len(forced)] == tuple(forced)
    ]
    actual = beam_search(
        from_rows(row),
        [[], []],
        beam_size=27,
        eos_id=EOS,
        max_new_tokens=4,
        forced_prefix=[[], forced],
    )
    assert actual[1][0].ids == max(space)[1]
    assert actual[1][0].score == pytest.approx(max(space)[0])
    [[greedy]] = greedy_search(
        from_rows(row), [[]], eos_id=EOS, max_new_tokens=5, forced_prefix=[forced],
        no_repeat_ngram_size=1,
    )  # fmt: skip
    assert greedy.ids[: len(forced)] == forced


@pytest.mark.parametrize("is_mapping", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_certain_token_costs_nothing_in_a_forced_prefix(seed: int, is_mapping: bool) -> None:
    """A forced BOS did, so that a prefix of another sentence changed which output is the best."""
    rules = [ForcedTokens({0: 2} if is_mapping else [{0: 2}, {0: 2}], certain=True)]
    function = from_rows(random_rows(seed, 5))
    options = {"beam_size": 4, "num_return": 4, "eos_id": EOS, "max_new_tokens": 4, "rules": rules}
    plain = beam_search(function, [[], []], **options)
    actual = beam_search(function, [[], []], forced_prefix=[[2], [2, 3]], **options)
    assert [(h.ids, h.score) for h in actual[0]] == [(h.ids, h.score) for h in plain[0]]
    for hypothesis in actual[1]:
        assert hypothesis.ids[:2] == [2, 3]
        assert hypothesis.log_prob <= 0
    allowed = [h for h in plain[1] if h.ids[:2] == [2, 3]]
    for hypothesis in allowed:  # the same outputs cost the same
        assert (hypothesis.ids, hypothesis.score) in [(h.ids, h.score) for h in actual[1]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 30),
    ends=st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
    beam=st.integers(1, 3),
    stop=st.sampled_from(["optimal", "beam_full", "heuristic"]),
)
def test_beams_stay_full_with_several_eos_ids(
    seed: int, ends: list[int], beam: int, stop: str
) -> None:
    """Open hypotheses fill the beam, however many EOS tokens are more probable."""
    widths = []

    def function(prefixes: Tensor) -> Tensor:
        assert not set(prefixes.flatten().tolist()) & set(ends)
        widths.append(len({tuple(p) for p in prefixes.tolist()}))
        return from_rows(random_rows(seed, 5))(prefixes)

    [actual] = beam_search(
        function, [[]], beam_size=beam, num_return=beam, eos_id=ends, max_new_tokens=3, stop=stop,
        force_eos=False, length_penalty=20.0,
    )  # fmt: skip
    going_on = 5 - len(ends)
    assert widths == [1, min(beam, going_on), min(beam, going_on**2)][: len(widths)]
    assert len(widths) == 3 or stop != "optimal"  # with such a penalty the longest are the best
    assert len({tuple(h.ids) for h in actual}) == len(actual)


def test_the_first_of_several_eos_ids_is_forced() -> None:
    function = from_rows(random_rows(1, 5))
    options = {"beam_size": 2, "max_new_tokens": 3, "min_new_tokens": 3, "force_eos": True}
    for ends in ([3, 1], [1, 3]):
        [[actual]] = beam_search(function, [[]], eos_id=ends, **options)
        assert actual.ids[-1] == ends[0]
        assert not actual.finished
    options = {"eos_id": [0, 2], "max_new_tokens": 4}
    [[actual]] = greedy_search(function, [[]], forced_prefix=[[1, 2]], **options)
    assert (actual.ids, actual.finished) == ([1, 2], True)
    with pytest.raises(UserError, match=r"holds EOS \(2\) before"):
        greedy_search(function, [[]], forced_prefix=[[2, 1]], **options)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 30))
def test_scores_are_computed_under_the_rules(seed: int) -> None:
    row = random_rows(seed, 5)
    space = {
        ids: 2 * log_prob / len(ids)
        for ids, log_prob, _ in whole_space(row, (), 0, 3)
        if 2 not in ids and ids[:2] != (1, 3)
    }
    [[actual]] = beam_search(
        from_rows(row), [[]], beam_size=125, eos_id=EOS, max_new_tokens=3,
        rules=[
            Temperature(0.5),
            BannedTokens([2]),
            PrefixFunction(lambda _, ids: [0, 1, 2, 4] if ids == [1] else range(5)),
        ],
    )  # fmt: skip
    assert actual.score == pytest.approx(max(space.values()))
    assert space[tuple(actual.ids)] == pytest.approx(actual.score)


# --- Ends, limits and bad input -----------------------------------------------------------------


@pytest.mark.parametrize("stop", ["optimal", "beam_full"])
def test_impossible_tokens_extend_no_hypotheses(stop: str) -> None:
    never_ends = from_rows(lambda _prefix: [-INF, math.log(0.5), math.log(0.5)])
    [actual] = beam_search(
        never_ends, [[]], beam_size=8, num_return=8, eos_id=EOS, max_new_tokens=3, stop=stop,
        force_eos=True,
    )  # fmt: skip
    assert [(len(h.ids), h.finished) for h in actual] == [(2, False)]
    dead = from_rows(lambda prefix: [-INF, 0.0] if len(prefix) < 2 else [-INF, -INF])
    [actual] = beam_search(dead, [[]], beam_size=2, eos_id=EOS, max_new_tokens=9, stop=stop)
    assert [(h.ids, h.score, h.finished) for h in actual] == [([1, 1], 0.0, False)]
    nothing = from_rows(lambda _prefix: [-INF, -INF])
    [[actual]] = beam_search(nothing, [[]], beam_size=2, eos_id=EOS, max_new_tokens=9, stop=stop)
    assert (actual.ids, actual.log_prob, actual.finished) == ([], 0.0, False)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beam=st.integers(2, 6))
def test_every_row_is_a_possible_prefix(seed: int, beam: int) -> None:
    """A function need not return values for impossible prefixes."""
    possible = random_rows(seed, 4, holes=0.6)

    def row(prefix: tuple[int, ...]) -> list[float]:
        assert EOS not in prefix
        assert all(possible(prefix[:i])[prefix[i]] > -INF for i in range(len(prefix)))
        return possible(prefix)

    beam_search(from_rows(row), [[], []], beam_size=beam, eos_id=EOS, max_new_tokens=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beam_size": 0}, "beam_size"),
        ({"num_return": 3}, "num_return"),
        ({"num_return": 0}, "num_return"),
        ({"normalization": "mean"}, "average, gnmt, none"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"stop": "patience"}, "beam_full"),
        ({"forced_prefix": [[], [1] * 5], "stop": "beam_full"}, "leaves 4"),
        ({"num_groups": 3}, "num_groups must divide"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 2, "diversity_penalty": -0.1}, "diversity_penalty"),
        ({"num_groups": 2, "diversity_penalty": INF}, "diversity_penalty"),
        ({"num_groups": 2, "diversity_penalty": math.nan}, "diversity_penalty"),
        ({"rules": [PresencePenalty(-9.0)], "min_new_tokens": 5}, "a rule gave .* no negative"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], says: str) -> None:
    good = {"start": [[1], [2]], "beam_size": 2, "eos_id": EOS, "max_new_tokens": 5}
    with pytest.raises(UserError, match=says):
        beam_search(from_rows(random_rows(0, 4)), **(good | options))


@pytest.mark.parametrize("stop", ["heuristic", "beam_full"])
def test_values_above_zero_are_ranked_by_stop_rules_without_a_bound(stop: str) -> None:
    """A bias on every token changes scores by it, and no choice."""
    rows, bias = from_rows(random_rows(0, 6)), SequenceBias([([token], 9.0) for token in range(6)])
    keys = {"beam_size": 3, "num_return": 3, "eos_id": EOS, "max_new_tokens": 5, "stop": stop}
    keys["force_eos"] = False  # which has the log-probability of the model, without the bias
    plain = beam_search(rows, [[1], [2]], **keys)
    biased = beam_search(rows, [[1], [2]], rules=[bias], **keys)
    for one, other in zip(itertools.chain(*plain), itertools.chain(*biased), strict=True):
        assert one.ids == other.ids
        assert other.score == pytest.approx(one.score + 9.0)
    with pytest.raises(UserError, match="stop rule optimal has no bound"):
        beam_search(rows, [[1]], rules=[bias], **(keys | {"stop": "optimal"}))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 40), k=st.integers(1, 8))
def test_top_k_takes_the_first_of_equal_values(seed: int, width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 5, (6, width), generator=generator).float()
    rows[rows == 0] = -INF
    values, indices, _ = top_k(rows, k)
    assert torch.equal(indices, indices.sort(dim=1).values)
    assert torch.equal(rows.gather(1, indices), values)
    values, order = values.sort(dim=1, descending=True, stable=True)
    indices = indices.gather(1, order)
    expected = rows.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    real = values > -INF
    assert torch.equal(indices[real], expected.indices[:, :k][real])
