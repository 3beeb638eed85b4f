"""Masking: selected positions and their replacements."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chance import fits, fits_uniform
from heedful.tasks.masked_lm import Masking, example_rng, mask_ids

VOCAB, MASK = 50, 7
SPECIAL = frozenset({1, 2, 7, 49})  # 0 is an ordinary id here
ORDINARY = np.array(sorted(set(range(VOCAB)) - SPECIAL))


def hide(ids: Any, masking: Masking = Masking(), seed: int = 0, **changes: Any) -> Any:  # noqa: B008
    settings: dict[str, Any] = {
        "rng": np.random.default_rng(seed),
        "masking": masking,
        "mask_id": MASK,
        "vocab_size": VOCAB,
        "special_ids": SPECIAL,
        "word_starts": None,
    }
    return mask_ids(np.asarray(ids), **(settings | changes))


@st.composite
def texts(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids with special tokens at random positions, and word starts."""
    ids = draw(st.lists(st.integers(0, VOCAB - 1), max_size=60))
    starts = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return np.array(ids, dtype=np.uint16), np.array(starts, dtype=bool)


@given(
    text=texts(),
    fraction=st.floats(0.01, 1),
    mask_share=st.floats(0, 1),
    whole_word=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_specials_stay_and_only_selected_tokens_change(
    text: tuple[np.ndarray, np.ndarray],
    fraction: float,
    mask_share: float,
    whole_word: bool,
    seed: int,
) -> None:
    ids, starts = text
    before, starts_before = ids.copy(), starts.copy()
    masking = Masking(
        mlm_probability=fraction,
        mask_share=mask_share,
        random_share=1 - mask_share,
        whole_word=whole_word,
    )
    inputs, selected = hide(ids, masking, seed, word_starts=starts if whole_word else None)
    special = np.isin(ids, list(SPECIAL))
    assert (ids == before).all()
    assert (starts == starts_before).all()
    assert inputs.dtype == np.int64
    assert not selected[special].any()
    assert (inputs[~selected] == ids[~selected]).all()
    assert set(inputs[selected]) <= {MASK, *ORDINARY}
    num_ordinary = int((~special).sum())
    expected = max(1, round(fraction * num_ordinary)) if num_ordinary else 0
    if not whole_word:
        assert selected.sum() == expected
        return
    words = words_of(special, starts)
    assert all(len(set(selected[word])) == 1 for word in words)
    longest = max(map(len, words), default=0)
    assert expected <= selected.sum() < expected + max(longest, 1)


def words_of(special: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    """The positions of each word."""
    words: list[list[int]] = []
    inside = False
    for place, (is_special, is_start) in enumerate(zip(special, starts, strict=True)):
        if is_special:
            inside = False
        elif is_start or not inside:
            words.append([place])
            inside = True
        else:
            words[-1].append(place)
    return words


def test_no_special_is_ever_selected_and_each_ordinary_token_may_be() -> None:
    ids = np.arange(VOCAB)
    inputs, selected = hide(ids, Masking(mlm_probability=1.0))
    assert ids[selected].tolist() == ORDINARY.tolist()
    assert set(inputs[selected]) <= {MASK, *ORDINARY}
    _, selected = hide(ids, Masking(mlm_probability=1.0), special_ids=SPECIAL - {MASK})
    assert ids[selected].tolist() == ORDINARY.tolist()  # the mask is special in any case


def test_every_position_is_selected_equally_often() -> None:
    ids = np.array([1, *range(10, 30), 2])
    counts = sum(hide(ids, seed=seed)[1].astype(int) for seed in range(2_000))
    assert counts.sum() == 2_000 * 3
    assert fits_uniform(counts[1:-1])


def test_eighty_ten_ten() -> None:
    ids = np.full(100_000, 10)
    inputs, selected = hide(ids)
    new = inputs[selected]
    masked, unchanged = (new == MASK).sum(), (new == 10).sum()
    # one in 46 of the random tokens is the original
    shares = np.array([0.8, 0.1 * 45 / 46, 0.1 + 0.1 / 46])
    assert fits(np.array([masked, len(new) - masked - unchanged, unchanged]), shares * 15_000)


def test_random_tokens_are_uniform_over_the_ordinary_ids() -> None:
    ids = np.full(100_000, 10)
    inputs, _ = hide(ids, Masking(mlm_probability=1.0, mask_share=0.0, random_share=1.0))
    assert set(inputs) == set(ORDINARY)
    assert fits_uniform(np.bincount(inputs, minlength=VOCAB)[ORDINARY])


def test_masking_a_row_needs_no_memory_for_the_vocabulary() -> None:
    vocab_size = 1 << 20
    ids = np.arange(100, 164)
    tracemalloc.start()
    hide(ids, Masking(random_share=0.2), vocab_size=vocab_size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < vocab_size  # an array over the vocabulary has more bytes, even of bool


@given(
    special=st.frozensets(st.integers(0, 30), max_size=29),
    seed=st.integers(0, 2**32),
)
def test_the_kth_number_is_the_kth_ordinary_id(special: frozenset[int], seed: int) -> None:
    vocab_size = 31
    special |= {30}
    ordinary = sorted(set(range(vocab_size)) - special)
    ids = np.full(40, ordinary[0])
    masking = Masking(mlm_probability=1.0, mask_share=0.0, random_share=1.0)
    inputs, _ = hide(ids, masking, seed, mask_id=30, vocab_size=vocab_size, special_ids=special)
    rng = np.random.default_rng(seed)
    rng.permutation(len(ids))
    rng.random(len(ids))
    assert inputs.tolist() == [ordinary[k] for k in rng.integers(len(ordinary), size=len(ids))]


def test_tokens_of_a_word_are_masked_independently() -> None:
    ids = np.full(40_000, 10)
    pairs = np.arange(40_000) % 2 == 0
    masking = Masking(mlm_probability=1.0, mask_share=0.5, random_share=0.0, whole_word=True)
    inputs, _ = hide(ids, masking, word_starts=pairs)
    first, second = (inputs == MASK).reshape(-1, 2).T
    assert fits_uniform(np.bincount(2 * first + second, minlength=4))


def test_long_words_of_short_texts_are_selected_as_often_as_short_ones() -> None:
    ids = np.array([1, *range(10, 17), 2])
    starts = np.array([1, 1, 0, 0, 1, 1, 1, 1, 1], dtype=bool)  # one word of 3, four of 1
    masking = Masking(whole_word=True)
    selected = [hide(ids, masking, seed, word_starts=starts)[1] for seed in range(2_000)]
    words = np.array(selected)[:, [1, 4, 5, 6, 7]].sum(axis=0)
    assert words.sum() == 2_000  # one token is to be masked, so one word is
    assert fits_uniform(words)


def test_an_example_depends_on_seed_epoch_and_index_alone() -> None:
    ids = np.arange(10, 45)

    def masked(seed: int, epoch: int, index: int) -> list[int]:
        return hide(ids, rng=example_rng(seed, epoch, index))[0].tolist()

    assert masked(1, 2, 3) == masked(1, 2, 3)
    places = [(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    draws = {tuple(example_rng(*place).integers(2**63, size=2).tolist()) for place in places}
    assert len(draws) == len(places)


def test_masks_are_independent_of_the_plan_of_an_epoch() -> None:
    plan = np.random.default_rng(np.random.SeedSequence([5, 3]))
    assert example_rng(5, 3, 0).integers(2**63) != plan.integers(2**63)


def test_an_examples_masking_stays_the_same_from_version_to_version() -> None:
    inputs, selected = hide(
        np.arange(10, 30), Masking(mlm_probability=0.5), rng=example_rng(1, 0, 0)
    )
    assert np.flatnonzero(selected).tolist() == [1, 4, 5, 6, 9, 11, 12, 14, 17, 18]
    assert inputs[selected].tolist() == [38, 7, 7, 7, 7, 7, 7, 7, 7, 28]


@pytest.mark.parametrize("key", ["mlm_probability", "mask_share", "random_share"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused_by_its_key(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=f"{key}\n.*Input should be"):
        Masking(**{key: value})


def test_shares_that_add_up_to_one_are_not_refused() -> None:
    for tenths in range(11):
        Masking(mask_share=tenths / 10, random_share=1 - tenths / 10)
