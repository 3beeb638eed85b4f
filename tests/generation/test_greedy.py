"""Greedy decoding from logits returns what greedy search over log-probabilities returns."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_models import TEXTS, model_of
from heedful.errors import UserError
from heedful.generation import Hypothesis, LengthScore, greedy_search, sample
from heedful.generation.rules import PresencePenalty
from heedful.generation.token_rules import BannedTokens
from tables import from_rows, random_rows

SIZE, EOS = 6, 0
SCORE = LengthScore("average", 0.7)


class LogitTable:
    """A state whose logits are those of a table plus a constant; it checks the number of rows."""

    has_logits, longest = True, 99

    def __init__(self, seed: int, start: list[list[int]], holes: float = 0.0) -> None:
        self.function = from_rows(random_rows(seed, SIZE, holes))
        self.prefixes = [list(ids[:-1]) for ids in start]

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits after the last token of each row."""
        assert len(tokens) == len(self.prefixes)
        for prefix, row in zip(self.prefixes, tokens.tolist(), strict=True):
            prefix.append(row[-1])
        assert self.prefixes == tokens.tolist()
        return self.function(torch.tensor(self.prefixes)) + 3.0

    def reorder(self, parents: Tensor) -> None:
        """Greedy decoding has one row for each sentence."""
        raise AssertionError(parents)

    def select(self, sentences: Tensor) -> None:
        """Keep these sentences."""
        self.prefixes = [self.prefixes[sentence] for sentence in sentences.tolist()]


def never(prefixes: Tensor, state: LogitTable) -> Tensor:
    raise AssertionError("greedy decoding under bans needs no log-probabilities")


def decode(seed: int, start: list[list[int]], banned: list[int], **options: Any) -> Any:
    state = LogitTable(seed, start, options.pop("holes", 0.0))
    rules = [BannedTokens(banned)]
    return sample(never, start, seeds=None, state=state, rules=rules, score=SCORE, **options)


def expected(seed: int, start: list[list[int]], banned: list[int], **options: Any) -> Any:
    function = from_rows(random_rows(seed, SIZE, options.pop("holes", 0.0)))
    if banned:
        options["rules"] = [BannedTokens(banned)]
    outputs = greedy_search(function, start, length_penalty=0.7, **options)
    return [hypothesis for [hypothesis] in outputs]


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    limits=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7)), min_size=1, max_size=9),
    banned=st.lists(st.integers(0, SIZE - 1), max_size=2, unique=True),
    eos_id=st.sampled_from([EOS, [EOS, 3]]),
    holes=st.sampled_from([0.0, 0.4]),
)
def test_outputs_equal_greedy_search(
    seed: int,
    limits: list[tuple[int, int]],
    banned: list[int],
    eos_id: int | list[int],
    holes: float,
) -> None:
    """Sentences have different limits, and leave the batch at different steps."""
    start = [[1 + sentence % 5] for sentence in range(len(limits))]
    options = {
        "eos_id": eos_id,
        "max_new_tokens": [longest for longest, _ in limits],
        "min_new_tokens": [min(limit) for limit in limits],
        "holes": holes,
    }
    outputs = decode(seed, start, banned, **options)
    reference = expected(seed, start, banned, **options)
    assert [output.ids for output in outputs] == [output.ids for output in reference]
    for output, other in zip(outputs, reference, strict=True):
        assert output.finished == other.finished
        assert output.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)
        assert output.score == pytest.approx(other.score, abs=1e-5)
    assert all(isinstance(output, Hypothesis) for output in outputs)


def test_without_scores_the_tokens_are_the_same_and_all_numbers_are_nan() -> None:
    options = {"eos_id": EOS, "max_new_tokens": 6}
    start = [[1], [2], [3]]
    outputs = decode(5, start, [2], scores=False, **options)
    reference = decode(5, start, [2], **options)
    assert [output.ids for output in outputs] == [output.ids for output in reference]
    for output in outputs:
        assert all(map(math.isnan, [output.score, output.log_prob, *output.token_log_probs]))


def test_a_sentence_is_reported_in_the_step_in_which_it_ends() -> None:
    reported: dict[int, list[Hypothesis]] = {}

    def on_done(sentence: int, results: list[Hypothesis]) -> None:
        assert sentence not in reported
        reported[sentence] = results

    limits = [6, 1, 3]
    options = {"eos_id": EOS, "max_new_tokens": limits, "min_new_tokens": limits}
    outputs = decode(5, [[1], [2], [3]], [2], on_done=on_done, **options)
    assert list(reported) == [1, 2, 0]
    assert [reported[sentence] for sentence in range(3)] == [[output] for output in outputs]


def test_no_sentences_give_no_outputs() -> None:
    assert decode(0, [], [], eos_id=EOS, max_new_tokens=[]) == []


def test_nan_is_reported_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitTable, "next_logits", lambda self, _: torch.full((1, SIZE), math.nan))
    with pytest.raises(UserError, match="the model gave NaN at step 1"):
        decode(0, [[1]], [], eos_id=EOS, max_new_tokens=3)


@pytest.mark.parametrize(
    ("banned", "eos_id", "words"),
    [([SIZE], EOS, "banned token id 6"), ([], 7, "token id 7 (prompt, EOS or forced)")],
)
def test_ids_outside_the_vocabulary_are_refused(banned: list[int], eos_id: int, words: str) -> None:
    with pytest.raises(UserError, match=f"{re.escape(words)} is outside the vocabulary"):
        decode(0, [[1]], banned, eos_id=eos_id, max_new_tokens=3)


@pytest.mark.parametrize(
    "options", [{"typical_p": 0.1}, {"top_k": 1}, {"top_p": 0.2, "min_p": 0.5}, {"top_h": 0.1}]
)
def test_options_of_sampling_do_not_change_greedy_decoding(options: dict[str, Any]) -> None:
    """Beside temperature 0 `typical_p` excluded the most probable tokens."""
    model = model_of("gpt2")
    expected = model.generate(TEXTS, beam_size=1, max_new_tokens=6)
    assert model.generate(TEXTS, temperature=0, max_new_tokens=6, **options) == expected


@pytest.mark.parametrize("options", [{"rules": [PresencePenalty(0.5)]}, {"force_eos": True}])
def test_rules_that_read_or_change_log_probabilities_get_them(options: dict[str, Any]) -> None:
    """Only bans apply to logits."""

    class BothTable(LogitTable):
        def next_log_probs(self, tokens: Tensor, state: LogitTable) -> Tensor:
            return super().next_logits(tokens) - 3.0

        def next_logits(self, tokens: Tensor) -> Tensor:
            raise AssertionError("logits")

    start = [[1], [2]]
    options |= {"eos_id": EOS, "max_new_tokens": 4}
    state = BothTable(3, start)
    outputs = sample(state.next_log_probs, start, seeds=None, state=state, score=SCORE, **options)
    reference = expected(3, start, [], **options)
    assert [output.ids for output in outputs] == [output.ids for output in reference]
    assert [output.score for output in outputs] == pytest.approx([o.score for o in reference])
