"""Outputs with required phrases are the best ones, as an exhaustive search finds them."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_models import TEXTS, model_of
from heedful.errors import UserError
from heedful.generation.constrained import constrained_beam_search
from heedful.generation.exact_counts import ExactCounts
from heedful.generation.outputs import LengthScore
from heedful.generation.search import beam_search
from heedful.generation.token_rules import Context, PrefixFunction
from tables import (
    INF,
    Remembered,
    Row,
    from_rows,
    parts_of,
    random_rows,
    remembering,
    whole_space,
)

SIZE, LONGEST = 5, 5
PHRASES = st.lists(
    st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=3), min_size=1, max_size=2
)


def contains_phrase(ids: object, phrase: list[int]) -> bool:
    """True if the ids contain the phrase, compared as text."""
    return f",{','.join(map(str, phrase))}," in f",{','.join(map(str, ids))},"  # type: ignore[call-overload]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), PHRASES, st.sampled_from([0.0, 0.7, 1.5]))
def test_a_beam_as_large_as_the_space_finds_the_best_with_all_phrases(
    seed: int, phrases: list[list[int]], penalty: float
) -> None:
    row, score = random_rows(seed, SIZE), LengthScore("average", penalty)
    space = [
        (sum(parts_of(row, (), ids)) / score.divisor(len(ids)), ids, finished)
        for ids, _, finished in whole_space(row, (), 1, LONGEST)
        if all(contains_phrase(ids, phrase) for phrase in phrases)
    ]
    [actual] = constrained_beam_search(
        from_rows(row),
        torch.zeros(1, 0, dtype=torch.long),
        phrases,
        beam_size=1500,
        length_penalty=penalty,
        num_return=2,
        eos_id=0,
        max_new_tokens=LONGEST,
    )
    best = sorted(space, reverse=True)[:2]
    if not best:  # the phrases do not fit together
        assert not actual[0].finished
        return
    assert [item.score for item in actual] == pytest.approx([item[0] for item in best])
    assert tuple(actual[0].ids) == best[0][1]
    assert actual[0].finished is best[0][2]


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_as_large_as_the_space_finds_the_best_with_exact_counts(seed: int) -> None:
    row = random_rows(seed, SIZE)
    counts = [{(1, 2): 2, (3,): 0}, {(4,): 1}, {(3,): 1, (1, 2): 0}]
    found = beam_search(
        from_rows(row),
        torch.zeros(len(counts), 0, dtype=torch.long),
        beam_size=1500,
        rules=[ExactCounts(counts)],
        eos_id=0,
        max_new_tokens=LONGEST,
    )
    for own, [best] in zip(counts, found, strict=True):
        numbers = {group: own.get(group, 0) for of_one in counts for group in of_one}
        space = []
        for ids, _, finished in whole_space(row, (), 1, LONGEST):
            has = {group: sum(map(ids.count, group)) for group in numbers}
            fits = has == numbers if finished else all(has[g] <= numbers[g] for g in has)
            if fits:  # an output that the limit cuts off may lack tokens
                space.append((sum(parts_of(row, (), ids)) / len(ids), ids))
        score, ids = max(space)
        assert (tuple(best.ids), best.score) == (ids, pytest.approx(score))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), PHRASES, st.integers(1, 6))
def test_narrow_beams_meet_all_phrases_independently_of_the_batch(
    seed: int, phrases: list[list[int]], width: int
) -> None:
    row = random_rows(seed, SIZE, order=3)
    options = {"beam_size": width, "eos_id": 0, "max_new_tokens": 16}
    start = torch.tensor([[1], [2], [3]])
    state = Remembered(3)
    together = constrained_beam_search(remembering(row), start, phrases, state=state, **options)
    alone = [
        constrained_beam_search(from_rows(row), start[place : place + 1], phrases, **options)[0]
        for place in range(3)
    ]
    assert [actual[0].ids for actual in together] == [actual[0].ids for actual in alone]
    for [actual, *_] in together:
        assert all(contains_phrase(actual.ids, phrase) for phrase in phrases)
        assert actual.ids.count(0) == int(actual.finished)


def num_met(ids: tuple[int, ...], phrases: list[list[int]]) -> int:
    """Tokens of the phrases that `ids` contains, and of the longest phrase that it ends in."""
    complete = [phrase for phrase in phrases if contains_phrase(ids, phrase)]
    partial_matches = [
        count
        for phrase in phrases
        for count in range(min(len(phrase) - 1, len(ids)) + 1)
        if not contains_phrase(ids, phrase) and list(ids[len(ids) - count :]) == phrase[:count]
    ]
    return sum(map(len, complete)) + max(partial_matches, default=0)


def plain_constrained(
    row: Row, phrases: list[list[int]], width: int, limit: int, score: LengthScore
) -> list[int]:
    """Dynamic beam allocation over lists of prefixes, with EOS 0 and one result."""
    width = max(width, sum(map(len, phrases)) + 1)
    open_: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best: tuple[float, tuple[int, ...]] = (-INF, ())
    prefix: tuple[int, ...] = ()
    for length in range(1, limit + 1):
        extended = [
            [(total + part, (*ids, token)) for token, part in enumerate(row(ids)) if part > -INF]
            for total, ids in open_
        ]
        for total, ids in (pair for pairs in extended for pair in pairs):
            if ids[-1] == 0 and all(contains_phrase(ids, phrase) for phrase in phrases):
                best = max(best, (total / score.divisor(length), ids), key=lambda pair: pair[0])
        likely = sorted((pair for pairs in extended for pair in pairs), reverse=True)[: 2 * width]
        likely += [max(pairs) for pairs in extended if pairs]
        for pairs in extended:
            for total, ids in pairs:
                unmet = [phrase for phrase in phrases if not contains_phrase(ids[:-1], phrase)]
                counts = [num_met(ids[:-1], [phrase]) for phrase in unmet]
                ahead = [phrase[count] for phrase, count in zip(unmet, counts, strict=True)]
                if ids[-1] in [*ahead, *(phrase[0] for phrase in unmet)]:
                    likely.append((total, ids))
        banks: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for pair in sorted({pair for pair in likely if pair[1][-1] != 0}, reverse=True):
            banks.setdefault(num_met(pair[1], phrases), []).append(pair)
        quota = width // (sum(map(len, phrases)) + 1)
        order = [banks[number] for number in sorted(banks, reverse=True)]
        selected = [pair for bank in order for pair in bank[:quota]]
        open_ = (selected + [pair for bank in order for pair in bank[quota:]])[:width]
        prefix = open_[0][1] if open_ else prefix
        if length == limit:
            for total, ids in open_:
                if all(contains_phrase(ids, phrase) for phrase in phrases):
                    best = max(best, (total / score.divisor(length), ids), key=lambda pair: pair[0])
        if not open_:
            break
        most = max(score.divisor(length + 1), score.divisor(limit))
        if best[0] > -INF and max(open_)[0] / most <= best[0]:
            break
    return list(best[1] if best[0] > -INF else prefix)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 999), PHRASES, st.integers(1, 12), st.sampled_from([0.0, 0.3]), st.integers(4, 9)
)
def test_a_narrow_beam_finds_what_a_plain_implementation_finds(
    seed: int, phrases: list[list[int]], width: int, holes: float, limit: int
) -> None:
    row = random_rows(seed, SIZE, holes)
    [[actual]] = constrained_beam_search(
        from_rows(row),
        torch.zeros(1, 0, dtype=torch.long),
        phrases,
        beam_size=width,
        eos_id=0,
        max_new_tokens=limit,
    )
    assert actual.ids == plain_constrained(row, phrases, width, limit, LengthScore())


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("phrase", [[1], [1, 2], [1, 2, 4]])
def test_a_beam_smaller_than_its_banks_does_not_prefer_an_early_phrase(
    width: int, phrase: list[int]
) -> None:
    """The model wants two other tokens first. Without a slot for each bank, the hypotheses that
    begin the phrase at once were all that the beam held, and the result was 1e3 times less
    probable."""
    best = [3, 3, *phrase, 0]

    def row(ids: tuple[int, ...]) -> list[float]:
        wanted = best[len(ids)] if list(ids) == best[: len(ids)] and len(ids) < len(best) else 0
        return [math.log(0.96 if token == wanted else 0.01) for token in range(SIZE)]

    [[actual]] = constrained_beam_search(
        from_rows(row),
        torch.zeros(1, 0, dtype=torch.long),
        [phrase],
        beam_size=width,
        length_penalty=0.0,
        eos_id=0,
        max_new_tokens=8,
    )
    assert actual.ids == best


@pytest.mark.parametrize("seed", [4, 5, 16, 22, 32, 34])
def test_most_of_the_likeliest_candidates_of_a_beam_can_be_of_one_hypothesis(seed: int) -> None:
    """Also more than `width` and the number of EOS ids, which a plain beam needs of each row."""
    size, width = 30, 3 + seed % 3
    row, phrases = random_rows(seed, size), [[1 + seed % 7, 8 + seed % 11]]
    [[found]] = constrained_beam_search(
        from_rows(row),
        torch.zeros(1, 0, dtype=torch.long),
        phrases,
        beam_size=width,
        eos_id=0,
        max_new_tokens=9,
    )
    assert found.ids == plain_constrained(row, phrases, width, 9, LengthScore())


@pytest.mark.parametrize(
    ("phrases", "words"),
    [([[]], "0 tokens"), ([[1] * 9], "9 tokens"), ([[1, 0]], "contains an EOS")],
)
def test_impossible_phrases_are_refused(phrases: list[list[int]], words: str) -> None:
    row = from_rows(random_rows(0, SIZE))
    with pytest.raises(UserError, match=words):
        constrained_beam_search(
            row, torch.tensor([[1]]), phrases, beam_size=2, eos_id=0, max_new_tokens=5
        )


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "gave NaN at step 2"), (0.5, "gave 0.5 at step 2")]
)
@pytest.mark.parametrize("where", ["no rules", "before a rule", "by a rule"])
def test_values_that_are_no_log_probabilities_are_refused(
    value: float, words: str, where: str
) -> None:
    row = random_rows(0, SIZE)

    def changed(log_probs: Tensor, length: int) -> Tensor:
        return log_probs.index_fill(1, torch.tensor([2]), value) if length == 1 else log_probs

    def model(prefixes: Tensor) -> Tensor:
        actual = from_rows(row)(prefixes)
        return actual if where == "by a rule" else changed(actual, prefixes.shape[1])

    def rule(log_probs: Tensor, context: Context) -> Tensor:
        if where == "by a rule":
            return changed(log_probs, context.length)
        return log_probs.masked_fill(log_probs.isnan() | (log_probs > 0), -1.0)

    options = {"beam_size": 3, "eos_id": 0, "max_new_tokens": 4}
    options |= {"rules": [] if where == "no rules" else [rule]}
    start = torch.zeros(1, 0, dtype=torch.long)
    for search in (partial(constrained_beam_search, phrases=[[1]]), beam_search):
        with pytest.raises(UserError, match=words):
            search(model, start, **options)


@pytest.mark.parametrize("with_state", [False, True])
def test_a_prefix_function_is_not_called_for_sentences_that_are_done(with_state: bool) -> None:
    """After EOS or at the limit a prefix function may return nothing, or raise."""
    row, limits = random_rows(3, SIZE, eos_bias=3.0), [9, 2, 5]

    def allowed(sentence: int, ids: list[int]) -> list[int]:
        assert 0 not in ids
        assert len(ids) < limits[sentence]
        return [*range(SIZE)]

    options = {"beam_size": 3, "eos_id": 0, "rules": [PrefixFunction(allowed)]}
    start = torch.tensor([[1], [2], [3]])
    state = {"state": Remembered(3)} if with_state else {}
    function = remembering(row) if with_state else from_rows(row)
    options |= {"max_new_tokens": limits} | state
    actual = constrained_beam_search(function, start, [[3]], **options)
    del options["rules"], options["max_new_tokens"]
    for place, limit in enumerate(limits):
        alone = constrained_beam_search(
            from_rows(row), start[place : place + 1], [[3]], max_new_tokens=limit,
            **options | {"state": None},
        )  # fmt: skip
        assert alone == [actual[place]]


def test_a_forced_eos_is_not_finished() -> None:
    row = from_rows(lambda _: [-2.3, -0.1])
    options = {"beam_size": 2, "eos_id": 0, "max_new_tokens": 3, "force_eos": True}
    [[actual]] = constrained_beam_search(row, torch.zeros(1, 0).long(), [[1, 1]], **options)
    assert actual.ids == [1, 1, 0]
    assert not actual.finished


def test_at_a_dead_end_the_prefix_with_the_most_of_the_phrases_is_returned() -> None:
    """1 begins the phrase and is less probable than 2; no token is possible after it."""
    table = {(): [-INF, math.log(0.1), math.log(0.9)]}
    row = from_rows(lambda prefix: table.get(prefix, [-INF] * 3))
    options = {"beam_size": 3, "eos_id": 0, "max_new_tokens": 5}
    [[actual]] = constrained_beam_search(row, torch.zeros(1, 0).long(), [[1, 2]], **options)
    assert (actual.ids, actual.finished) == ([1], False)


def test_no_sentences_give_no_outputs() -> None:
    start = torch.zeros(0, 1, dtype=torch.long)
    row = from_rows(random_rows(0, SIZE))
    options = {"beam_size": 2, "eos_id": 0, "max_new_tokens": 5}
    assert constrained_beam_search(row, start, [[1]], **options) == []


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_model_outputs_contain_the_required_phrases(name: str) -> None:
    model = model_of(name)
    options = {"beam_size": 6, "max_new_tokens": 16}
    actual = model.generate(TEXTS, require=["dog", "the mat"], **options)
    assert all("dog" in text and "the mat" in text for text in actual), actual
    enlarged = model.generate(TEXTS, require=["dog", "the mat"], **options | {"beam_size": 2})
    assert all("dog" in text and "the mat" in text for text in enlarged), enlarged
    assert not all("dog" in text for text in model.generate(TEXTS, **options))
    for wrong in ({"beam_size": 1}, {"temperature": 1.0}, {"beam_size": 4, "num_groups": 2}):
        with pytest.raises(UserError, match="require needs a beam"):
            model.generate(TEXTS, require=["dog"], **wrong)
    with pytest.raises(UserError, match="require needs a beam"):
        next(model.stream(TEXTS[0], require=["dog"]))


@pytest.mark.parametrize(
    ("phrase", "banned", "message"),
    [
        ("the Ω dog", [], r"'the Ω dog': the tokenizer has no tokens .* it is 'the  dog'"),
        (" ", [], "required phrase ' ' is empty"),
        ("the dog", ["do"], "'the dog' contains 'do', which is banned"),
    ],
)
def test_a_phrase_that_no_output_can_contain_is_refused(
    phrase: str, banned: list[str], message: str
) -> None:
    """Unknown tokens are not decoded, so that the output would lack a part of the phrase."""
    with pytest.raises(UserError, match=message):
        model_of("gpt2").generate(TEXTS, require=[phrase], banned=banned, beam_size=4)
