"""Outputs that must hold phrases are the best of those, as an exhaustive search finds them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import TEXTS, model_of
from heedful.errors import UserError
from heedful.generation.constrained import constrained_beam_search
from heedful.generation.hypotheses import LengthScore
from tables import Remembered, from_rows, parts_of, random_rows, remembering, whole_space

SIZE, LONGEST = 5, 5
PHRASES = st.lists(
    st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=3), min_size=1, max_size=2
)


def holds(ids: object, phrase: list[int]) -> bool:
    """Whether a phrase stands in it, told by text."""
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
        if all(holds(ids, phrase) for phrase in phrases)
    ]
    [found] = constrained_beam_search(
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
        assert not found[0].finished
        return
    assert [each.score for each in found] == pytest.approx([each[0] for each in best])
    assert tuple(found[0].ids) == best[0][1]
    assert found[0].finished is best[0][2]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), PHRASES, st.integers(1, 6))
def test_a_narrow_beam_keeps_to_all_phrases_and_no_text_depends_on_another(
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
    assert [found[0].ids for found in together] == [found[0].ids for found in alone]
    for [found, *_] in together:
        assert all(holds(found.ids, phrase) for phrase in phrases)
        assert found.ids.count(0) == int(found.finished)


@pytest.mark.parametrize(
    ("phrases", "words"),
    [([[]], "0 tokens"), ([[1] * 9], "9 tokens"), ([[1, 0]], "holds an end")],
)
def test_phrases_that_cannot_stand_are_refused(phrases: list[list[int]], words: str) -> None:
    row = from_rows(random_rows(0, SIZE))
    with pytest.raises(UserError, match=words):
        constrained_beam_search(
            row, torch.tensor([[1]]), phrases, beam_size=2, eos_id=0, max_new_tokens=5
        )


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_a_model_writes_what_is_required(name: str) -> None:
    model = model_of(name)
    options = {"beam_size": 6, "max_new_tokens": 16}
    found = model.generate(TEXTS, require=["dog", "the mat"], **options)
    assert all("dog" in text and "the mat" in text for text in found), found
    assert not all("dog" in text for text in model.generate(TEXTS, **options))
    for wrong in ({"beam_size": 1}, {"temperature": 1.0}, {"beam_size": 4, "num_groups": 2}):
        with pytest.raises(UserError, match="require needs a beam"):
            model.generate(TEXTS, require=["dog"], **wrong)
    with pytest.raises(UserError, match="require needs a beam"):
        next(model.stream(TEXTS[0], require=["dog"]))
