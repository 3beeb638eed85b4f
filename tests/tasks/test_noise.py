"""Noise of T5 and BART: counts of the papers, distributions, invariants."""

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chance import fits, fits_uniform
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.tasks.denoising import Denoising
from heedful.tasks.masked_lm import example_rng
from heedful.tasks.noise import BartNoise, Noise, NoiseTokens, T5Noise, sentence_ends
from heedful.tasks.task import parse_objective

BOS, EOS, MASK, STOP = 1, 2, 3, 4
SENTINELS = tuple(range(999, 899, -1))  # T5's: a hundred, from the vocabulary's end down
TOKENS = NoiseTokens(
    eos_id=EOS,
    bos_id=BOS,
    mask_id=MASK,
    sentinel_ids=SENTINELS,
    full_stop_ids=frozenset({STOP}),
)
QUIET = BartNoise(infilling=0.0, permute_sentences=False)
STILL = T5Noise(random_roll=False)

text_ids = st.lists(st.integers(10, 500), max_size=80).map(lambda ids: np.array(ids, np.uint16))
seeds = st.integers(0, 2**32)


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def noisy(ids: np.ndarray, rng: np.random.Generator, **settings: Any) -> np.ndarray:
    """The source with only the given transformations of BART."""
    source, _ = QUIET.model_copy(update=settings).sides(ids.astype(np.int64), rng, TOKENS)
    return source[:-1]


# T5


def test_the_example_of_the_paper() -> None:
    # Figure 2, with its sentinels <X>, <Y> and <Z>
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    vocabulary = {word: i for i, word in enumerate([*words, "<X>", "<Y>", "<Z>", "</s>"])}
    names = list(vocabulary)
    dropped = np.isin(words, ["for", "inviting", "last"])
    sentinels = tuple(vocabulary[name] for name in ("<X>", "<Y>", "<Z>"))
    tokens = NoiseTokens(vocabulary["</s>"], sentinel_ids=sentinels)
    sides = T5Noise().insert_sentinels(np.arange(len(words)), dropped, tokens)
    inputs, targets = (" ".join(names[i] for i in side) for side in sides)
    assert inputs == "Thank you <X> me to your party <Y> week . </s>"
    assert targets == "<X> for inviting <Y> last <Z> </s>"


def test_counts_equal_the_authors_code() -> None:
    # round(length x 0.15) and round(noise / 3), halves to even, at least 1 of each; 568 tokens
    # are the paper's inputs of 568 - 85 + 28 + EOS = 512 and targets of 114
    table = {2: (1, 1), 3: (1, 1), 10: (2, 1), 16: (2, 1), 17: (3, 1), 30: (4, 1), 31: (5, 2)}
    table |= {50: (8, 3), 100: (15, 5), 190: (28, 9), 512: (77, 26), 568: (85, 28)}
    assert {length: STILL.counts(length) for length in table} == table
    for length in range(4, 2_000):
        num_noise = round(length * Fraction(15, 100))
        assert STILL.counts(length) == (num_noise, max(round(Fraction(num_noise, 3)), 1))
    assert STILL.counts(0) == STILL.counts(1) == (0, 0)
    assert T5Noise(noise_density=0.0).counts(100) == (0, 0)
    assert T5Noise(noise_density=0.99, mean_span_length=1.0).counts(10) == (
        9,
        1,
    )  # one kept token, one span


@given(length=st.integers(0, 200), density=st.floats(0, 0.99), mean=st.floats(1, 10), seed=seeds)
def test_masks_have_exactly_the_counted_noise(
    length: int, density: float, mean: float, seed: int
) -> None:
    keys = {"noise_density": density, "mean_span_length": mean}
    num_noise, num_spans = T5Noise(**keys).counts(length)
    mask, rolled = (
        T5Noise(**keys, random_roll=roll).mask(length, rng_of(seed)) for roll in (False, True)
    )
    assert len(mask) == len(rolled) == length
    assert mask.sum() == rolled.sum() == num_noise
    runs = [key for key, _ in itertools.groupby(mask.tolist())]
    assert runs == ([False, True] * num_spans or [False] * bool(length))
    num_rolled = [key for key, _ in itertools.groupby(rolled.tolist())].count(True)
    assert num_rolled in (num_spans, num_spans + 1)


def test_all_masks_are_equally_likely() -> None:
    # 4 of 9 tokens in 2 spans of 2 on average, kept first and dropped last: by enumeration
    possible = [
        mask
        for mask in itertools.product([False, True], repeat=9)
        if sum(mask) == 4 and [k for k, _ in itertools.groupby(mask)] == [False, True] * 2
    ]
    noise, rng = T5Noise(noise_density=0.44, mean_span_length=2.0, random_roll=False), rng_of(0)
    assert noise.counts(9) == (4, 2)
    samples = Counter(tuple(noise.mask(9, rng).tolist()) for _ in range(3_000))
    assert len(possible) == 12
    assert set(samples) == set(possible)
    assert fits_uniform(np.array([samples[mask] for mask in possible]))


def test_a_short_text_loses_its_end_always_unless_the_mask_is_rolled() -> None:
    rng = rng_of(0)
    still = [STILL.mask(30, rng) for _ in range(50)]
    assert (np.array(still) == [False] * 26 + [True] * 4).all()
    rolled = np.array([T5Noise().mask(30, rng) for _ in range(6_000)])
    # The four of a span move together: one of them counts.
    begins = rolled & ~np.roll(rolled, 1, axis=1)
    assert fits_uniform(begins.sum(axis=0))
    assert fits_uniform(rolled.sum(axis=0))


def authors_sentinels(ids: np.ndarray, mask: np.ndarray) -> list[int]:
    """The authors' `noise_span_to_unique_sentinel`; the targets are those of the inverse mask."""
    out: list[int] = []
    unused = iter(SENTINELS)
    for i, (token, is_noise) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        if not is_noise:
            out.append(token)
        elif i == 0 or not mask[i - 1]:
            out.append(next(unused))
    return out


@given(ids=text_ids.filter(len), seed=seeds)
def test_both_sides_equal_the_authors_code_if_the_first_token_is_kept(
    ids: np.ndarray, seed: int
) -> None:
    mask = rng_of(seed).random(len(ids)) < 0.4
    mask[0] = False
    inputs, targets = T5Noise(final_sentinel=not mask[-1]).insert_sentinels(ids, mask, TOKENS)
    assert inputs.tolist() == [*authors_sentinels(ids, mask), EOS]
    assert targets.tolist() == [*authors_sentinels(ids, ~mask), EOS]


@given(
    ids=text_ids,
    density=st.floats(0, 0.9),
    mean=st.floats(1, 6),
    roll=st.booleans(),
    final=st.booleans(),
    seed=seeds,
)
def test_inputs_and_targets_join_to_the_text(
    ids: np.ndarray, density: float, mean: float, roll: bool, final: bool, seed: int
) -> None:
    before = ids.copy()
    noise = T5Noise(
        noise_density=density, mean_span_length=mean, random_roll=roll, final_sentinel=final
    )
    inputs, targets = noise.corrupt(ids, rng_of(seed), TOKENS)
    assert (ids == before).all()
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in targets[:-1].tolist():
        if token in SENTINELS:
            current = spans[token] = []
        else:
            current.append(token)
    joined = [spans.get(token, [token]) for token in inputs[:-1].tolist()]
    assert [*itertools.chain(*joined)] == ids.tolist()
    used = [token for token in inputs.tolist() if token in SENTINELS]
    assert list(spans) == list(SENTINELS[: len(used) + final])  # in order, each once
    assert used == list(SENTINELS[: len(used)])
    assert inputs[-1] == targets[-1] == EOS


def test_a_text_with_more_spans_than_sentinels_is_refused_with_the_numbers() -> None:
    few = NoiseTokens(EOS, sentinel_ids=SENTINELS[:5])
    with pytest.raises(UserError, match=r"100 tokens has 5 spans and needs 6 sentinels.* has 5"):
        STILL.sides(np.arange(100), rng_of(0), few)
    T5Noise(random_roll=False, final_sentinel=False).sides(np.arange(100), rng_of(0), few)


# BART


@given(ids=text_ids, share=st.floats(0, 0.99), seed=seeds)
def test_masking_and_deletion_select_exactly_their_share(
    ids: np.ndarray, share: float, seed: int
) -> None:
    before = ids.copy()
    num_corrupted = round(share * len(ids))
    masked = noisy(ids, rng_of(seed), masking=share)
    assert ((masked == ids) | (masked == MASK)).all()
    assert (masked == MASK).sum() == num_corrupted
    places = np.arange(10, 10 + len(ids))
    left = noisy(places, rng_of(seed), deletion=share)
    assert len(left) == len(ids) - num_corrupted
    assert (np.diff(left) > 0).all()
    assert (ids == before).all()


def test_masking_and_deletion_select_every_position_equally_often() -> None:
    ids, rng = np.arange(10, 30), rng_of(0)
    masked = [noisy(ids, rng, masking=0.3) == MASK for _ in range(1_000)]
    assert fits_uniform(np.sum(masked, axis=0))
    left = [noisy(ids, rng, deletion=0.3) for _ in range(1_000)]
    assert fits_uniform(np.bincount(np.concatenate(left))[10:])


def spans_of(filled: np.ndarray, length: int) -> list[tuple[int, int]]:
    """(masks, dropped tokens) of each run of masks, for a text of 10, 11, 12, …"""
    runs, before = [], 9
    for is_mask, group in itertools.groupby(filled.tolist(), key=lambda token: token == MASK):
        members = list(group)
        if is_mask:
            runs.append([len(members), before])
        else:
            before = members[-1]
            if runs and len(runs[-1]) == 2:
                runs[-1].append(members[0] - 1)
    if runs and len(runs[-1]) == 2:
        runs[-1].append(9 + length)
    return [(masks, after - before) for masks, before, after in runs]


@given(length=st.integers(0, 80), share=st.floats(0, 0.99), mean=st.floats(1, 6), seed=seeds)
def test_infilling_drops_exactly_its_share_and_keeps_the_order(
    length: int, share: float, mean: float, seed: int
) -> None:
    ids = np.arange(10, 10 + length)
    filled = noisy(ids, rng_of(seed), infilling=share, mean_span_length=mean)
    visible = filled[filled != MASK]
    assert len(visible) == length - round(share * length)
    assert (np.diff(visible) > 0).all()
    spans = BartNoise(mean_span_length=mean).span_lengths(round(share * length), rng_of(seed))
    runs = spans_of(filled, length)
    assert sum(masks for masks, _ in runs) == len(spans)  # one mask a span
    assert sum(tokens for _, tokens in runs) == spans.sum() == round(share * length)
    # Each run of masks replaces the next spans, in their order.
    unused = iter(spans.tolist())
    assert [sum(next(unused) for _ in range(masks)) for masks, _ in runs] == [
        tokens for _, tokens in runs
    ]


def poisson(mean: float, most: int) -> np.ndarray:
    """Probabilities of 0 to `most` - 1, and of `most` or more."""
    terms = np.exp(-mean) * np.cumprod([1.0, *(mean / k for k in range(1, most))])
    return np.append(terms, 1 - terms.sum())


def test_infilled_spans_have_poisson_lengths() -> None:
    length = 60_000
    filled = noisy(np.arange(10, 10 + length), rng_of(0), infilling=0.3)
    runs = spans_of(filled, length)
    # The lengths of adjacent masks cannot be told from the source.
    lengths = np.minimum([tokens for masks, tokens in runs if masks == 1], 8)
    assert len(lengths) > 4_500
    assert fits(np.bincount(lengths), poisson(3.0, 8) * len(lengths))
    samples = np.minimum(BartNoise().span_lengths(60_000, rng_of(1)), 8)
    assert fits(np.bincount(samples), poisson(3.0, 8) * len(samples))


def test_all_orders_of_kept_tokens_and_spans_are_equally_likely() -> None:
    rng, places = rng_of(0), Counter[tuple[int, ...]]()
    for _ in range(12_000):
        filled = noisy(np.arange(10, 16), rng, infilling=0.5)
        if (filled == MASK).sum() == 2:
            places[tuple(np.flatnonzero(filled == MASK).tolist())] += 1
    assert set(places) == set(itertools.combinations(range(5), 2))  # 3 kept tokens, 2 masks
    assert fits_uniform(np.array(list(places.values())))


@given(stops=st.lists(st.booleans(), max_size=40), seed=seeds)
def test_permutation_moves_whole_sentences_and_loses_nothing(stops: list[bool], seed: int) -> None:
    places = np.arange(10, 10 + len(stops))
    full_stops = frozenset(places[stops].tolist())
    tokens = replace(TOKENS, full_stop_ids=full_stops)
    noise = QUIET.model_copy(update={"permute_sentences": True})
    permuted = noise.sides(places, rng_of(seed), tokens)[0][:-1]
    assert sorted(permuted.tolist()) == places.tolist()
    # A break in the order comes only behind the end of a sentence.
    jumps = permuted[:-1][np.diff(permuted) != 1]
    assert set(jumps.tolist()) <= {*full_stops, *places[-1:].tolist()}


def test_all_orders_of_sentences_are_equally_likely() -> None:
    ids = np.array([10, STOP, 11, 12, STOP, STOP, 13])  # the last has no full stop
    assert sentence_ends(ids, TOKENS).tolist() == [2, 6]
    sentences = ([10, STOP], [11, 12, STOP, STOP], [13])
    possible = [tuple(itertools.chain(*order)) for order in itertools.permutations(sentences)]
    rng = rng_of(0)
    samples = Counter(tuple(noisy(ids, rng, permute_sentences=True).tolist()) for _ in range(1_200))
    assert set(samples) == set(possible)
    assert fits_uniform(np.array([samples[order] for order in possible]))


def test_all_rotations_are_equally_likely() -> None:
    ids, rng = np.arange(10, 17), rng_of(0)
    samples = Counter(tuple(noisy(ids, rng, rotate=True).tolist()) for _ in range(1_400))
    possible = [(*range(i, 17), *range(10, i)) for i in range(10, 17)]
    assert set(samples) == set(possible)
    assert fits_uniform(np.array([samples[order] for order in possible]))


# Recipes


@pytest.mark.parametrize("noise", [T5Noise(), BartNoise(), BartNoise(rotate=True, deletion=0.2)])
@given(ids=text_ids, framed=st.booleans(), seed=seeds)
def test_bos_stays_first_and_eos_last(
    noise: Noise, ids: np.ndarray, framed: bool, seed: int
) -> None:
    given_ids = np.array([BOS, *ids, EOS], dtype=np.uint16) if framed else ids
    before = given_ids.copy()
    tokens = TOKENS if framed else replace(TOKENS, bos_id=None)
    source, target = noise.corrupt(given_ids, rng_of(seed), tokens)
    again, _ = noise.corrupt(given_ids[: len(ids) + framed], rng_of(seed), tokens)
    assert source.tolist() == again.tolist()  # with an EOS or without
    assert (given_ids == before).all()
    assert source[-1] == target[-1] == EOS
    assert (source[0] == BOS) == framed
    assert not {BOS, EOS} & set(source[framed:-1].tolist())
    if noise.kind == "bart":
        assert target.tolist() == [*[BOS] * framed, *ids, EOS]


def test_barts_noises_compose_in_the_stated_order() -> None:
    ids = np.array([*range(10, 20), STOP, *range(20, 30), STOP])
    everything = BartNoise(
        infilling=0.2, mean_span_length=2.0, masking=0.3, deletion=0.25, rotate=True
    )
    source, _ = everything.corrupt(ids, rng_of(5), TOKENS)
    rng = rng_of(5)
    text = noisy(ids, rng, permute_sentences=True)
    text = noisy(text, rng, deletion=0.25)
    text = noisy(text, rng, masking=0.3)
    text = noisy(text, rng, infilling=0.2, mean_span_length=2.0)
    assert source.tolist() == [*noisy(text, rng, rotate=True), EOS]


def test_noise_stays_the_same_from_version_to_version() -> None:
    ids = np.array([*range(10, 16), STOP, *range(16, 22), STOP])
    source, target = T5Noise(noise_density=0.3, mean_span_length=2.0).corrupt(
        ids, example_rng(1, 0, 0), TOKENS
    )
    assert source.tolist() == [10, 11, 12, 13, 14, 15, STOP, 16, 999, 20, 21, 998, EOS]
    assert target.tolist() == [999, 17, 18, 19, 998, STOP, 997, EOS]
    source, _ = BartNoise(rotate=True).corrupt(ids, example_rng(1, 0, 0), TOKENS)
    assert source.tolist() == [18, 19, 20, 21, STOP, 10, 11, MASK, STOP, 16, 17, EOS]


def read(keys: dict[str, Any]) -> Noise:
    content = {"task": "denoising", "objective": keys, "training": {"max_steps": 1}}
    return parse_objective(parse_recipe(content), Denoising.objective_class)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "bert"}, r"objective: input tag 'bert' .* expected tags: 'bart', 't5'"),
        ({"noise_density": 0.2}, r"objective: unable to extract tag .*'kind'"),
        (
            {"kind": "t5", "noise_densty": 0.2},
            r"unknown key objective\.noise_densty; did you mean noise_density\?",
        ),
        (
            {"kind": "bart", "noise_density": 0.2},
            r"unknown key objective\.noise_density; known: deletion",
        ),
        (
            {"kind": "t5", "noise_density": "a"},
            r"objective\.noise_density: input should be a valid number",
        ),
        (
            {"kind": "t5", "noise_density": 1.0},
            r"objective\.noise_density: input should be less than 1",
        ),
        ({"kind": "t5", "mean_span_length": 0.5}, r"objective\.mean_span_length: input should be"),
        ({"kind": "bart", "masking": float("nan")}, r"objective\.masking: input should be"),
        ({"kind": "bart", "deletion": 1.0}, r"objective\.deletion: input should be less than 1"),
        ({"kind": "bart", "mean_span_length": float("inf")}, r"objective\.mean_span_length: input"),
        ({"kind": "bart", "rotate": "maybe"}, r"objective\.rotate: input should be a valid bool"),
    ],
)
def test_a_wrong_recipe_is_refused_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        read(keys)


def test_recipes_are_read_and_written() -> None:
    assert read({"kind": "t5", "mean_span_length": 4}) == T5Noise(mean_span_length=4.0)
    for noise in (T5Noise(noise_density=0.2), BartNoise(deletion=0.1, rotate=True)):
        assert read(noise.model_dump()) == noise
