"""Properties of every kind of search: beams, groups of beams, greedy decoding and sampling."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import Hypothesis, beam_search, greedy_search, sample
from heedful.generation.rules import RepetitionPenalty, Temperature, TopK, sampling_rules
from heedful.generation.token_rules import BannedTokens, Context, ForcedTokens, NoRepeatNgram
from tables import Remembered, from_rows, from_table, parts_of, random_rows, remembering

EOS, SIZE = 0, 7
NUM_RETURN = {"beams": 3, "groups": 4, "greedy": 1, "sampled": 2}
KINDS = list(NUM_RETURN)
Found = list[list[Hypothesis]]


def search(kind: str, function: Callable[..., Tensor], start: Any, **options: Any) -> Found:
    """The results of each sentence of a batch."""
    seeds, count = options.pop("seeds", range(len(start))), NUM_RETURN[kind]
    if kind == "greedy":
        return greedy_search(function, start, **options)
    if kind == "sampled":
        actual = sample(function, start, seeds=seeds, num_samples=count, **options)
        return [actual[at : at + count] for at in range(0, len(actual), count)]
    groups = {"num_groups": 2, "diversity_penalty": 0.7} if kind == "groups" else {}
    return beam_search(function, start, beam_size=count, num_return=count, **groups, **options)


def allow_again(log_probs: Tensor, context: Context) -> Tensor:
    """A plugin rule: token 4 has its log-probability before all rules."""
    assert context.model_log_probs is not None
    four = torch.tensor([4])
    return log_probs.index_copy(1, four, context.model_log_probs[:, four])


OPTIONS: dict[str, Any] = {
    "eos_id": st.sampled_from([EOS, [EOS, 3]]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "rules": st.sampled_from(
        [
            (),
            [RepetitionPenalty(1.7), NoRepeatNgram(2, include_prompt=True), BannedTokens([[1, 2]])],
            sampling_rules(temperature=0.8, top_k=5, top_p=0.9),
            sampling_rules(repetition_penalty=1.5, frequency_penalty=0.5, min_p=0.05),
            sampling_rules(no_repeat_ngram_size=1, typical_p=0.8, banned=[1, [2, 3]]),
            [BannedTokens([1, 4]), ForcedTokens({0: 4, 2: 4}, certain=True)],
            [BannedTokens([1, 4]), allow_again],
        ]
    ),
}
SCORES: dict[str, Any] = {
    "normalization": st.sampled_from(["average", "gnmt", "none"]),
    "length_penalty": st.sampled_from([-1.0, 0.0, 1.0]),
}
STOPS: dict[str, Any] = {"stop": st.sampled_from(["optimal", "beam_full", "heuristic"])}
OF_KIND = {"beams": SCORES | STOPS, "groups": SCORES | STOPS, "greedy": SCORES, "sampled": {}}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    holes=st.sampled_from([0.0, 0.3]),
    limits=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    data=st.data(),
)
def test_results_are_independent_of_batch_order_and_state(
    kind: str, seed: int, holes: float, limits: list[int], data: st.DataObject
) -> None:
    """Sentences, and groups or samples of one sentence, end at different steps and leave."""
    row = random_rows(seed, SIZE, holes)
    batch = range(len(limits))
    tokens = st.integers(1, SIZE - 1).filter(lambda token: token != 3)
    of_each: dict[str, list[Any]] = {
        "max_new_tokens": limits,
        "min_new_tokens": [data.draw(st.integers(0, limit)) for limit in limits],
        "forced_prefix": [data.draw(st.lists(tokens, max_size=min(2, n - 1))) for n in limits],
        "prompts": [data.draw(st.lists(st.integers(0, SIZE), max_size=4)) for _ in batch],
    }
    if kind == "sampled":
        of_each["seeds"] = [data.draw(st.integers(0, 2**63)) for _ in batch]
    options = data.draw(st.fixed_dictionaries(OPTIONS | OF_KIND[kind]))

    def found(of: list[int], state: Remembered | None = None) -> Found:
        return search(
            kind,
            from_rows(row) if state is None else remembering(row),
            torch.tensor([[5, sentence % 3 + 1] for sentence in of]),
            state=state,
            **{name: [values[sentence] for sentence in of] for name, values in of_each.items()},
            **options,
        )

    done: dict[int, list[Hypothesis]] = {}
    options["on_done"] = lambda sentence, results: done.update({sentence: [*results]})
    together = found(list(batch))
    assert [done.pop(sentence) for sentence in batch] == together
    assert not done
    del options["on_done"]
    assert together == [found([sentence])[0] for sentence in batch]
    order = data.draw(st.permutations(batch))
    assert [together[sentence] for sentence in order] == found(list(order))
    assert found(list(batch), Remembered(len(limits))) == together
    ends = [EOS, 3] if options["eos_id"] != EOS else [EOS]
    for sentence, results in enumerate(together):
        assert results
        for one in results:
            assert len(one.ids) <= limits[sentence]
            assert not set(ends) & set(one.ids[:-1])
            assert not one.finished or one.ids[-1] in ends
            assert not one.finished or len(one.ids) >= of_each["min_new_tokens"][sentence]
            assert sum(one.token_log_probs) == pytest.approx(one.log_prob)
        if kind != "sampled":
            assert len({tuple(one.ids) for one in results}) == len(results)
            scores = [one.score for one in results]
            assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_is_reported_once_while_others_are_in_progress(kind: str) -> None:
    calls, reported = 0, []
    row = random_rows(4, SIZE, 0.0)

    def function(prefixes: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        log_probs = from_rows(row)(prefixes).clone()
        log_probs[:, EOS] = -torch.inf  # nothing ends before its limit
        return log_probs

    def on_done(sentence: int, results: list[Hypothesis]) -> None:
        reported.append((calls, sentence, len(results)))

    limits = {"max_new_tokens": [5, 1, 3]}
    search(kind, function, [[1], [2], [3]], eos_id=EOS, on_done=on_done, **limits)
    count = NUM_RETURN[kind]
    assert [(step, sentence) for step, sentence, _ in reported] == [(1, 1), (3, 2), (5, 0)]
    assert {number for *_, number in reported} <= set(range(1, count + 1))
    if kind in ("beams", "groups"):
        reported.clear()
        options = {"num_groups": 2} if kind == "groups" else {}
        rest = {"eos_id": EOS, "beam_size": 4, "on_done": on_done, **limits, **options}
        beam_search(function, [[1], [2], [3]], num_return=1, **rest)
        assert [number for *_, number in reported] == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_searches_ignore_the_content_of_start(kind: str) -> None:
    """Left padding, or EOS in the prompt, changes nothing; rules see `prompts` alone."""
    rules = [RepetitionPenalty(1.4), NoRepeatNgram(2, include_prompt=True)]
    options = {"rules": rules, "eos_id": EOS, "max_new_tokens": 6, "prompts": [[3], [2, 1]]}
    function = from_table({}, [0.1, 0.3, 0.2, 0.2, 0.2])
    padded = search(kind, function, [[EOS, EOS, 3], [EOS, 2, 1]], **options)
    assert padded == search(kind, function, [[7, 4], [4, 4]], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_one_call_for_all_open_sentences(kind: str) -> None:
    shapes = []

    def endless(prefixes: Tensor) -> Tensor:
        shapes.append(tuple(prefixes.shape))
        return from_table({}, [0.0, 0.3, 0.3, 0.2, 0.2])(prefixes)

    search(kind, endless, [[1], [2]], eos_id=EOS, max_new_tokens=[2, 4])
    rows = NUM_RETURN[kind]
    assert shapes == [(2, 1), (2 * rows, 2), (rows, 3), (rows, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_keeps_a_token_if_eos_is_excluded(kind: str) -> None:
    likely_end = from_table({}, [0.9, 0.06, 0.04])
    limits = {"max_new_tokens": 3, "min_new_tokens": 3}
    [[actual, *_]] = search(kind, likely_end, [[]], eos_id=EOS, rules=[TopK(1)], **limits)
    assert actual.ids == [1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_override_rules_and_have_the_models_log_probability(kind: str) -> None:
    """A forced prefix, and a rule that forces the first token, as a language's in translation."""
    row = random_rows(2, SIZE)
    rules = [BannedTokens([3]), Temperature(0.5)]
    limits = {"eos_id": EOS, "max_new_tokens": 2, "min_new_tokens": 2}
    for options in ({"rules": rules, "forced_prefix": [[3]]},
                    {"rules": [*rules, ForcedTokens({0: 3})]}):  # fmt: skip
        [[actual, *_]] = search(kind, from_rows(row), [[]], **limits, **options)
        first, second = parts_of(row, (), actual.ids)
        assert actual.ids[0] == 3
        scale = 2 if kind in ("beams", "groups") else 1  # whose numbers are those under the rules
        assert actual.token_log_probs == pytest.approx([first, scale * second])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_state", [False, True])
def test_a_banned_token_that_a_later_rule_allows_has_the_models_log_probability(
    kind: str, with_state: bool
) -> None:
    """Also where rules may write in place; in a beam search a certain token costs nothing."""
    row = random_rows(2, SIZE)
    rules = [BannedTokens([3, 4]), allow_again, ForcedTokens({0: 3, 2: 3}, certain=True)]
    state = {"state": Remembered(1)} if with_state else {}
    function = remembering(row) if with_state else from_rows(row)
    options = {"eos_id": EOS, "max_new_tokens": 4, "min_new_tokens": 4, "rules": rules}
    for actual in search(kind, function, [[5]], **options, **state)[0]:
        expected = parts_of(row, (5,), actual.ids)
        if kind in ("beams", "groups"):
            expected[0] = expected[2] = 0.0
        assert (actual.ids[0], actual.ids[2]) == (3, 3)
        assert actual.token_log_probs == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sentences_have_no_outputs(kind: str) -> None:
    assert search(kind, from_rows(random_rows(0, 3)), [], eos_id=EOS, max_new_tokens=3) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eos_id": -1}, "eos_id"),
        ({"eos_id": []}, "eos_id"),
        ({"eos_id": [1, -1]}, "eos_id"),
        ({"eos_id": [0, SIZE]}, "outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": [3]}, "2 sentences"),
        ({"min_new_tokens": 6}, "above max_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"prompts": [[1]]}, "2 sentences"),
        ({"forced_prefix": [[1]]}, "2 sentences"),
        ({"forced_prefix": [[], [9]]}, "outside the vocabulary"),
        ({"forced_prefix": [[], [-1]]}, "no token id"),
        ({"forced_prefix": [[], [EOS, 1]]}, r"holds EOS \(0\) before its last"),
        ({"forced_prefix": [[], [EOS]], "min_new_tokens": 2}, "min_new_tokens"),
        ({"forced_prefix": [[], [1] * 6]}, "leaves 5"),
        ({"forced_prefix": [[], [1] * 5], "force_eos": True}, "leaves 4"),
        ({"start": [[1], [1, 2]]}, "equally long"),
        ({"rules": [lambda log_probs, _: log_probs * math.nan]}, "a rule gave NaN"),
        ({"rules": [lambda log_probs, _: log_probs[:, 1:]]}, "must keep"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, options: dict[str, Any], says: str) -> None:
    good = {"start": [[1], [2]], "eos_id": EOS, "max_new_tokens": 5}
    with pytest.raises(UserError, match=says):
        search(kind, from_rows(random_rows(0, SIZE)), **(good | options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", [[], [BannedTokens([0, 1, 2])]], ids=["no rules", "rules"])
def test_wrong_log_probabilities_are_refused(kind: str, rules: list[Any]) -> None:
    """They are checked before the rules."""

    def late(prefixes: Tensor) -> Tensor:
        out = from_table({}, [0.0, 0.2, 0.2, 0.3, 0.3])(prefixes)
        return out.index_fill(1, torch.tensor([2]), math.nan) if prefixes.shape[1] == 3 else out

    for function, says in (
        (late, "next_log_probs gave NaN at step 3"),
        (lambda prefixes: torch.ones(len(prefixes), 4), "next_log_probs gave 1 .*log_softmax"),
        (lambda prefixes: torch.zeros(len(prefixes), 1, 4), "shape"),
    ):
        with pytest.raises(UserError, match=says):
            search(kind, function, [[1]], eos_id=EOS, max_new_tokens=5, rules=rules)
